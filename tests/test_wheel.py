"""What pip gets: the metadata that an index shows, and the files that the plugin reads at run time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from uv_program import uv_program

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://example.org/us/plugin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """By way of the sdist, as a release is made."""
    if (uv := uv_program()) is None:
        pytest.skip("no uv on PATH or beside this Python")
    folder = tmp_path_factory.mktemp("dist")
    environ = os.environ | {"OPENHANDS_RL_REPOSITORY": f"{REPOSITORY}/"}
    done = subprocess.run(
        [uv, "build", "--offline", "--out-dir", folder], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    if done.returncode and "hatchling" in done.stderr and "network was disabled" in done.stderr:
        pytest.skip("hatchling is not in uv's cache, and tests fetch nothing")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_index_shows_links_that_lead_somewhere(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    shown = HeaderParser().parsestr(wheel.read(name).decode())
    urls = dict(line.split(", ") for line in shown.get_all("Project-URL") or [])
    assert urls["Repository"] == REPOSITORY and urls["Changelog"].startswith(f"{REPOSITORY}/blob/main/docs/")
    assert "reinforcement-learning" in shown["Keywords"]
    links = re.findall(r"\]\(([^)]+)\)", shown.get_payload())
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    ours = [link.removeprefix(f"{REPOSITORY}/blob/main/") for link in links if link.startswith(REPOSITORY)]
    assert ours and [path for path in ours if not (ROOT / path.partition("#")[0]).exists()] == []


def test_no_extra_needs_a_compiler_for_the_demos_model(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    required = HeaderParser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []
    assert required and not [line for line in required if line.startswith(("llm", "llama"))]


def test_what_starts_with_python_and_the_file_to_start_from_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert b"{model}" in wheel.read("openhands_rl_plugin/config/starting.toml")
    assert b"openhands_rl_plugin.hosts.v0.autoload" in wheel.read("openhands_rl_autoload.pth")


def test_the_wheel_has_the_module_that_verifiers_looks_for(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """At the top level, where a plugin's id is looked up; without verifiers it names what is missing."""
    wheel.extractall(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import openhands_rl_verifiers"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert f'{tmp_path}/openhands_rl_verifiers.py", line' in done.stderr
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'verifiers'"


def test_the_studios_pages_are_in_the_wheel_with_the_licences_of_what_others_made(wheel: zipfile.ZipFile) -> None:
    static = ROOT / "openhands_rl_plugin" / "contrib" / "studio" / "static"
    wanted = {file.relative_to(ROOT).as_posix() for file in static.rglob("*") if file.is_file()}
    assert len(wanted) > 20 and wanted <= set(wheel.namelist())
    assert not [name for name in wheel.namelist() if "axe-core" in name or name.startswith("tests/")]

"""A second instance of an environment is set up as the first was, from what the cache has: real uv, no network."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from repository_samples import FIX, git, instance, needs_sandbox, with_extra

from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.types import Instance, VerdictKind

PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "calc"
version = "{version}"
dependencies = ["helper=={version}"]
"""

# The least that builds a wheel: with the module, or with the place where it is.
BACKEND = """\
import os, zipfile
VERSION = "{version}"
INFO = "calc-%s.dist-info/" % VERSION
METADATA = "Metadata-Version: 2.1\\nName: calc\\nVersion: %s\\nRequires-Dist: helper==%s\\n" % (VERSION, VERSION)

def write(folder, files):
    name = "calc-%s-py3-none-any.whl" % VERSION
    files = dict(files)
    files[INFO + "METADATA"] = METADATA
    files[INFO + "WHEEL"] = "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[INFO + "RECORD"] = "".join("%s,,\\n" % each for each in [*files, INFO + "RECORD"])
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for each, text in files.items():
            wheel.writestr(each, text)
    return name

def build_wheel(folder, config_settings=None, metadata_directory=None):
    return write(folder, {{"calc.py": open("calc.py").read()}})

def build_editable(folder, config_settings=None, metadata_directory=None):
    return write(folder, {{"_calc.pth": os.getcwd() + "\\n"}})
"""

INSTALL = "python -m pip install --no-index --find-links wheels"
FREEZE = "python -m pip freeze > frozen.txt"
COMMITTED = ("2021-01-10", "2021-08-10", "2021-08-20", "2022-02-10")


class History(NamedTuple):
    """A mirror's folder and the commits in it, oldest first. Each has a version of its own in ``pyproject.toml``."""

    mirror: Path
    commits: list[str]

    def row(self, at: int, *install: str) -> Instance:
        row = instance(self.commits[at], instance_id=f"someone__calc-{at}", test_patch="", fail_to_pass=("calc",))
        return with_extra(row, install=list(install), exclude_newer="2024-01-01")

    def backend(self, cache: Path) -> LocalBackend:
        return LocalBackend(cache=cache, sources=[MirrorSource(self.mirror)])


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    folder = tmp_path_factory.mktemp("history")
    work = folder / "work"
    (work / "wheels").mkdir(parents=True)
    git(work, "init", "--quiet", "--initial-branch=main")
    commits = []
    for number, day in enumerate(COMMITTED, start=1):
        version = f"{number}.0"
        (work / "calc.py").write_text("def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n")
        (work / "pyproject.toml").write_text(PROJECT.format(version=version))
        (work / "backend.py").write_text(BACKEND.format(version=version))
        (work / "wheels" / f"helper-{version}-py3-none-any.whl").write_bytes(wheel(version))
        git(work, "add", "--all")
        when = f"{day}T12:00:00Z"
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "commit", "--quiet", "--message", version],
            cwd=work,
            env={**os.environ, "GIT_COMMITTER_DATE": when, "GIT_AUTHOR_DATE": when},
            check=True,
        )
        git(work, "tag", f"v{number}")
        commits.append(git(work, "rev-parse", "HEAD"))
    (folder / "mirrors").mkdir()
    git(folder, "clone", "--quiet", "--mirror", str(work), str(folder / "mirrors" / "someone__calc.git"))
    return History(folder / "mirrors", commits)


def wheel(version: str) -> bytes:
    """A package without anything in it but its name."""
    info, packed = f"helper-{version}.dist-info/", io.BytesIO()
    files = {
        "helper.py": f"version = {version!r}\n",
        f"{info}METADATA": f"Metadata-Version: 2.1\nName: helper\nVersion: {version}\n",
        f"{info}WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: hashlib.sha256(text.encode()).digest() for name, text in files.items()}
    record = [f"{name},sha256={base64.urlsafe_b64encode(digests[name]).decode().rstrip('=')}," for name in files]
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in {**files, f"{info}RECORD": "\n".join([*record, f"{info}RECORD,,"]) + "\n"}.items():
            archive.writestr(name, text)
    return packed.getvalue()


def installed(layer: Path) -> dict[str, bytes]:
    """Every file of the environment but compiled ones and those that tell the time of their installation."""
    packages = next((layer / "conda" / "envs" / "testbed" / "lib").glob("python*")) / "site-packages"
    files = [path for path in packages.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {
        str(path.relative_to(packages)): path.read_bytes()
        for path in files
        if path.name not in ("uv_cache.json", "RECORD")
    }


@needs_sandbox
@pytest.mark.parametrize(
    "command", [f"{INSTALL} -e .", pytest.param(f"{INSTALL} .", marks=pytest.mark.slow)], ids=["editable", "plain"]
)
async def test_from_cache_an_environment_is_what_it_is_afresh(history: History, tmp_path: Path, command: str) -> None:
    first, second = (history.row(at, command, FREEZE) for at in (1, 3))
    used = history.backend(tmp_path / "used")
    before = await used.prepare(first)
    from_cache = await used.prepare(second)
    afresh = await history.backend(tmp_path / "new").prepare(second)
    frozen = (from_cache / "testbed" / "frozen.txt").read_text()
    assert frozen == (afresh / "testbed" / "frozen.txt").read_text()
    assert "helper==4.0" in frozen and frozen != (before / "testbed" / "frozen.txt").read_text()
    assert installed(from_cache) == installed(afresh)
    for layer in (before, from_cache):
        said = layer.with_name(f"{layer.name}.log").read_text()
        assert "Installed 2 packages" in said and "pip tries" not in said


@needs_sandbox
async def test_tests_see_the_patched_package_that_their_script_installs(history: History, tmp_path: Path) -> None:
    command = f'{INSTALL} . && cd / && python -c \'import calc; print("PASSED" if calc.add(1, 2) == 3 else 0, "calc")\''
    row = with_extra(history.row(1, f"{INSTALL} ."), test_command=command)
    row = row.model_copy(update={"pass_to_pass": (), "test_patch": NEW_FILE})
    backend = history.backend(tmp_path / "cache")
    gold = await backend.grade(row, FIX, logs=tmp_path / "gold", timeout=60.0)
    said = (tmp_path / "gold" / "test_output.txt").read_text()
    assert gold.kind is VerdictKind.RESOLVED, said
    assert "pip tries" not in said
    nothing = await backend.grade(row, NEW_FILE.replace("new.txt", "other.txt"), logs=tmp_path / "no", timeout=60.0)
    assert nothing.kind is VerdictKind.UNRESOLVED


NEW_FILE = """\
diff --git a/new.txt b/new.txt
new file mode 100644
--- /dev/null
+++ b/new.txt
@@ -0,0 +1 @@
+new
"""


@needs_sandbox
async def test_history_ends_at_the_base(history: History, tmp_path: Path) -> None:
    backend = history.backend(tmp_path / "cache")
    for at in (1, 3, 0):
        testbed = (await backend.prepare(history.row(at))) / "testbed"
        git(testbed, "fsck", "--strict", "--full")
        everything = git(testbed, "cat-file", "--batch-check", "--batch-all-objects")
        known = [commit in everything for commit in history.commits]
        assert known == [each <= at for each in range(len(known))]
        assert git(testbed, "rev-list", "--count", history.commits[at]) == str(at + 1)
        assert git(testbed, "tag").split() == [f"v{number}" for number in range(1, at + 2)]

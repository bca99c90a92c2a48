"""Test scripts install their package again, without a network and as patched: real uv."""

from __future__ import annotations

from pathlib import Path

from repository_samples import FILES, FIX, instance, make_repository, needs_sandbox, with_extra

from openhands_rl_plugin.evals.swe.backends import LocalBackend
from openhands_rl_plugin.evals.swe.instances import VerdictKind
from openhands_rl_plugin.evals.tasks.bugs import patch_of

PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "calc"
version = "1.0"
"""

# The least that builds a wheel with the place where the module is.
BACKEND = """\
import os, zipfile
INFO = "calc-1.0.dist-info/"

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "calc-1.0-py3-none-any.whl"
    files = {"_calc.pth": os.getcwd() + "\\n"}
    files[INFO + "METADATA"] = "Metadata-Version: 2.1\\nName: calc\\nVersion: 1.0\\n"
    files[INFO + "WHEEL"] = "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[INFO + "RECORD"] = "".join("%s,,\\n" % each for each in [*files, INFO + "RECORD"])
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for each, text in files.items():
            wheel.writestr(each, text)
    return name
"""

NEW_FILE = patch_of("new.txt", None, "new\n")


@needs_sandbox
async def test_tests_see_the_patched_package_that_their_script_installs(tmp_path: Path) -> None:
    files = {"calc.py": FILES["calc.py"], "pyproject.toml": PROJECT, "backend.py": BACKEND}
    base, _ = make_repository(tmp_path, files)
    install = "python -m pip install --no-index -e ."
    command = f'{install} && cd / && python -c \'import calc; print("PASSED" if calc.add(1, 2) == 3 else 0, "calc")\''
    row = with_extra(instance(base, test_patch=NEW_FILE), install=[install], test_command=command)
    row = row.model_copy(update={"fail_to_pass": ("calc",), "pass_to_pass": ()})
    backend = LocalBackend(cache=tmp_path / "cache", mirror=tmp_path / "mirrors")
    gold = await backend.grade(row, FIX, logs=tmp_path / "gold", timeout=60.0)
    printed = (tmp_path / "gold" / "test_output.txt").read_text()
    assert gold.kind is VerdictKind.RESOLVED, printed
    assert "pip tries" not in printed
    nothing = await backend.grade(row, NEW_FILE.replace("new.txt", "other.txt"), logs=tmp_path / "no", timeout=60.0)
    assert nothing.kind is VerdictKind.UNRESOLVED

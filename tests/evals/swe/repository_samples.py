"""A small repository and instances of it that say themselves how they are tested, without anything from an index."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.sandbox import find_bubblewrap
from openhands_rl_plugin.evals.swe.backends import find_uv
from openhands_rl_plugin.evals.swe.instances import Instance
from openhands_rl_plugin.evals.tasks.bugs import patch_of

REPO = "someone/calc"

FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n",
    # Prints what pytest -rA would say.
    "run_tests.py": """\
import importlib.util
import sys
import traceback

sys.path.insert(0, ".")
for file in ["tests/test_calc.py"]:
    spec = importlib.util.spec_from_file_location("tested", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in sorted(vars(module)):
        if name.startswith("test_"):
            try:
                getattr(module, name)()
                print(f"PASSED {file}::{name}")
            except Exception:
                traceback.print_exc()
                print(f"FAILED {file}::{name} - it did")
""",
    "tests/test_calc.py": "import calc\n\n\ndef test_double():\n    assert calc.double(2) == 4\n",
}

_TESTS = FILES["tests/test_calc.py"]
FIX = patch_of("calc.py", FILES["calc.py"], FILES["calc.py"].replace("a - b", "a + b"))
TEST_PATCH = patch_of("tests/test_calc.py", _TESTS, f"{_TESTS}\n\ndef test_add():\n    assert calc.add(1, 2) == 3\n")
NOTHING = patch_of("notes.txt", None, "nothing of importance\n")


def _missing() -> str:
    try:
        find_bubblewrap()
        find_uv()
    except ConfigError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(_missing()), reason=_missing() or "there")


class Sample(NamedTuple):
    """A folder of mirrors, the instance in it, and a commit that an agent may not see."""

    mirror: Path
    instance: Instance
    later: str


def make_sample(folder: Path) -> Sample:
    """The repository, with the fix as a later commit."""
    base, later = make_repository(folder, FILES)
    return Sample(folder / "mirrors", instance(base), later)


def make_repository(folder: Path, files: dict[str, str]) -> tuple[str, str]:
    """A mirror of ``files`` and what is in the working folder besides; its base commit and that of the fix."""
    work = folder / "work"
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    git(work, "init", "--quiet", "--initial-branch=main")
    git(work, "add", "--all")
    git(work, "commit", "--quiet", "--message=first")
    git(work, "tag", "v1")
    base = git(work, "rev-parse", "HEAD")
    (work / "calc.py").write_text(files["calc.py"].replace("a - b", "a + b"))
    git(work, "commit", "--quiet", "--all", "--message=the fix")
    git(work, "tag", "v2")
    git(folder, "clone", "--quiet", "--mirror", str(work), str(folder / "mirrors" / "someone" / "calc.git"))
    return base, git(work, "rev-parse", "HEAD")


def instance(base: str, **changes) -> Instance:
    """The row."""
    extra = {"test_command": "python run_tests.py", "test_files": [], "packages": []}
    return Instance(
        instance_id="someone__calc-1",
        repo=REPO,
        base_commit=base,
        version="1.0",
        patch=FIX,
        test_patch=TEST_PATCH,
        fail_to_pass=("tests/test_calc.py::test_add",),
        pass_to_pass=("tests/test_calc.py::test_double",),
        extra=extra,
    ).model_copy(update=changes)


def with_extra(row: Instance, **columns) -> Instance:
    """The row with other columns of its own."""
    return row.model_copy(update={"extra": {**row.extra, **columns}})


def rewritten(text: str) -> str:
    """A patch that makes ``text`` of ``calc.py``."""
    return patch_of("calc.py", FILES["calc.py"], text)


def git(folder: Path, *words: str) -> str:
    """Run git there without the user's settings."""
    who = {f"GIT_{role}_{what}": "someone@localhost" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    variables = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **who}
    done = subprocess.run(["git", *words], cwd=folder, env=variables, check=True, capture_output=True, text=True)
    return done.stdout.strip()

"""The grader of repair tasks: what a policy could try instead of a fix, and right fixes in odd forms."""

from __future__ import annotations

import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from broken_repository import commit_of
from needs import needs_bubblewrap

from openhands_rl_plugin.contrib.repair.rows import COLUMN, RepairSpec, repository_files
from openhands_rl_plugin.contrib.repair.suites import RepairBackend, same
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.environments.workspace.sandbox import (
    empty_root,
    find_bubblewrap,
    hidden_package,
    system_mounts,
)
from openhands_rl_plugin.evals.swe.instances import Instance, PatchVerdict, VerdictKind
from openhands_rl_plugin.evals.tasks.source import commit_files

MODULE, TESTS = "pack/__init__.py", "test_counts.py"
BUG = '''import re


def counts(text, most=3):
    """How often each word stands in a text."""
    found = {}
    for word in re.findall("[a-z]+", text):
        found[word] = found.get(word, 1) + 1
    return found
'''
FIX = BUG.replace("get(word, 1)", "get(word, 0)")
CALLS = (("'a b a'",), ("''",), ("'q r s'",), ("'z z z'",))
EXPECTED = ("{'a': 2, 'b': 1}", "{}", "{'q': 1, 'r': 1, 's': 1}", "{'z': 3}")
SPEC = RepairSpec(
    package="pack 1.0",
    license="MIT",
    kind="wrong number",
    path=MODULE,
    function="counts",
    line=8,
    files={
        MODULE: BUG,
        TESTS: "from pack import counts\n\ndef test_1():\n    assert counts('a b a') == {'a': 2, 'b': 1}\n",
    },
    calls=tuple((positional, {}) for positional in CALLS),
    expected=EXPECTED,
    shown=1,
)

type Files = dict[str, str | bytes | None]
type Grade = Callable[[Files], Awaitable[PatchVerdict]]


@pytest.fixture(scope="module")
def instance() -> Instance:
    return Instance(
        instance_id="pack-counts",
        repo="pack",
        base_commit=commit_of(repository_files(SPEC)),
        problem_statement="It counts wrong.",
        fail_to_pass=(f"{TESTS}::test_1",),
        extra={COLUMN: SPEC.model_dump(mode="json")},
    )


@pytest.fixture
def grade(instance: Instance, tmp_path: Path) -> Grade:
    async def graded(files: Files) -> PatchVerdict:
        repository = tmp_path / "repository"
        for name, text in repository_files(SPEC).items():
            write_file(repository / name, text, parents=True)
        commit_files(repository / ".git", repository, "start")
        for name, text in files.items():
            path = repository / name
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is not None:
                path.write_bytes(text.encode() if isinstance(text, str) else text)
        return await RepairBackend().grade(instance, diff(repository), logs=tmp_path / "logs", timeout=60)

    return graded


def diff(repository: Path) -> str:
    git = ["git", "-C", str(repository), "-c", "core.autocrlf=false"]
    subprocess.run([*git, "add", "--all", "--force"], check=True)
    done = subprocess.run([*git, "diff", "--cached", "--binary", "HEAD"], check=True, capture_output=True)
    return done.stdout.decode()


EQUAL = "class Equal{0}:\n    def __eq__(self, other): return True\n    def __hash__(self): return 1\n"
PIPES = (
    "import json, os\nfor number in range(3, 20):\n    try: os.write(number, {0})\n    except OSError: pass\n"
    "os._exit(0)\n"
)

ATTACKS: dict[str, Files] = {
    "other tests": {TESTS: "def test_1(): pass\n"},
    "site": {"sitecustomize.py": "import os\nprint('PASSED')\nos._exit(0)\n"},
    "conftest": {"conftest.py": "def pytest_runtest_makereport(item, call): call.excinfo = None\n"},
    "equal": {MODULE: EQUAL.format("") + "def counts(text): return Equal()\n"},
    "items of its own": {
        MODULE: "class Mine(dict):\n    def items(self): return ()\ndef counts(text): return Mine(a=1)\n"
    },
    "endless without timers": {
        MODULE: "import signal\nfor each in (signal.SIGPROF, signal.SIGALRM): signal.signal(each, signal.SIG_IGN)\n"
        "def counts(text):\n    return 'x' * 10**10\n"
    },
    "forged: too few": {MODULE: PIPES.format("b'[\"x\"]'")},
    "forged: half characters": {MODULE: PIPES.format(r"b'[\"\\ud800\", \"\\udfff\", \"1\", \"2\"]'")},
    "deep result of its own": {
        MODULE: "import os, signal\nopen('/tmp/out/result.json', 'w').write('[' * 10**6)\n"
        "os.kill(os.getppid(), signal.SIGKILL)\n"
    },
    "files of the grader": {
        MODULE: "import glob, re\n"
        "texts = [open(name).read() for name in glob.glob('/tmp/**/*.json', recursive=True)]\n"
        "def counts(text):\n"
        "    return next((eval(each) for each in re.findall(r'\\{.a.: 2.*?\\}', ' '.join(texts))), None)\n"
    },
}

HONEST: dict[str, Files] = {
    "the fix": {MODULE: FIX},
    "a helper in a new file": {
        MODULE: "from .helper import more\n" + FIX.replace("found.get(word, 0) + 1", "more(found, word)"),
        "pack/helper.py": "def more(found, word):\n    return found.get(word, 0) + 1\n",
    },
    "a scratch file of a library's name": {
        MODULE: FIX,
        "random.py": "raise SystemExit\n",
        "json.py": "x =\n",
        "ast.py": "",
    },
    "a large file beside it": {MODULE: FIX, "table.py": "#" * (2**20 + 1) + "\n"},
}
OFTEN = (
    "a helper in a new file",
    "a scratch file of a library's name",
    "a large file beside it",
)
OFTEN_TRIED = (
    "forged: too few",
    "forged: half characters",
    "deep result of its own",
    "files of the grader",
)


def some(cases: dict[str, Files], often: tuple[str, ...]) -> list[object]:
    slow = pytest.mark.slow
    return [pytest.param(files, id=name, marks=() if name in often else (slow,)) for name, files in cases.items()]


@needs_bubblewrap
@pytest.mark.parametrize("files", some(ATTACKS, OFTEN_TRIED))
async def test_nothing_but_a_fix_resolves(files: Files, grade: Grade) -> None:
    verdict = await grade(files)
    assert verdict.kind in (VerdictKind.UNRESOLVED, VerdictKind.TIMED_OUT, VerdictKind.UNAPPLIED, VerdictKind.REFUSED)


@needs_bubblewrap
@pytest.mark.parametrize("files", some(HONEST, OFTEN))
async def test_a_right_fix_resolves_in_any_form(files: Files, grade: Grade) -> None:
    verdict = await grade(files)
    assert verdict.resolved, verdict.reason


def test_outcomes_are_compared_as_values() -> None:
    assert same("{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}") and same("list:[1]", "[1]") and same("1", "True")
    for found in ("{'a': 1}", "[" * 200, "1 +", None, "open('x')", "list:", "{[]: 1}"):
        assert not same(found, "{'a': 2}")
    assert not same("[1]", "(1,)") and not same("'1'", "1") and not same(None, "None")


@needs_bubblewrap
def test_this_package_is_hidden_where_it_is_installed_in_a_prefix(tmp_path: Path) -> None:
    own = tmp_path / "prefix/lib/openhands_rl_plugin"
    own.mkdir(parents=True)
    (own / "fixes.jsonl").write_text("the fix")
    shown = ["--ro-bind", str(tmp_path), str(tmp_path)]
    read = ["--", "/bin/cat", str(own / "fixes.jsonl")]
    for hiding, expected in (([], "the fix"), (hidden_package([str(tmp_path / "prefix")], own), "")):
        command = [find_bubblewrap(), *empty_root(), *system_mounts(), *shown, *hiding, *read]
        assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == expected
    assert not hidden_package(["/elsewhere"], own)

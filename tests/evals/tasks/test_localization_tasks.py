"""Localization tasks: what a place is, how answers and patches are read, and tasks made of a history."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest
from git_backend import BASKET, EDITS, make_history, make_tasks
from needs import needs_bubblewrap

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.core.records import Places
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.evals.runs.backends import make_backend
from openhands_rl_plugin.evals.runs.prompts import instruction_of
from openhands_rl_plugin.evals.runs.suites import find_suite, swe_task, swe_tasks
from openhands_rl_plugin.evals.runs.swe_runner import with_verdict
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.types import Instance, PatchVerdict, VerdictKind
from openhands_rl_plugin.evals.tasks.lineage import require_checked
from openhands_rl_plugin.evals.tasks.localization.backend import LocalizationBackend
from openhands_rl_plugin.evals.tasks.localization.places import places_of_answer, places_of_change
from openhands_rl_plugin.evals.tasks.localization.rows import submission
from openhands_rl_plugin.evals.tasks.localization.statements import GAP, is_fix, statement_of
from openhands_rl_plugin.evals.tasks.quality_gate import NO_OP
from openhands_rl_plugin.testing import example_trajectory

FILE = "shop/basket.py"
FILES = {FILE: BASKET, "README.md": "A shop\n", "shop/__init__.py": "", "shop/broken.py": "def f(:\n"}
FOLDERS = ("/workspace/repository", "/workspace")


def named(answer: str) -> Places:
    return places_of_answer(answer, FILES, FILES.get, FOLDERS).places


def change(old: str, new: str, path: str = FILE) -> Places:
    return places_of_change({path: FILES[path]}, {path: FILES[path].replace(old, new)}).places


ADD = Places(files=(FILE,), modules=(f"{FILE}::Basket",), functions=(f"{FILE}::Basket.add",))
ROUNDED = Places(files=(FILE,), modules=(f"{FILE}::rounded",), functions=(f"{FILE}::rounded",))
CLASS = Places(files=(FILE,), modules=(f"{FILE}::Basket",))
ONLY_FILE = Places(files=(FILE,))


@pytest.mark.parametrize(
    ("answer", "places"),
    [
        (f"{FILE}::Basket.add", ADD),
        (f"- **`{FILE}::Basket::add()`**: one less.", ADD),
        (f"/workspace/repository/{FILE}:Basket.add", ADD),
        (f"see ./{FILE}:11-15, and nothing else", ADD),
        (f"{FILE}#L15-L13", ADD),
        (f"{FILE}:12", ADD),
        (f"{FILE}::add", ADD),
        (f"{FILE}::Basket.add.checked", ADD),
        (f"{FILE}::rounded.", ROUNDED),
        (f"{FILE}:Basket", CLASS),
        (f"{FILE}::Basket.size", CLASS),
        (f"{FILE}:9", CLASS),
        (f"{FILE}::LIMIT", ONLY_FILE),
        (f"The bug is in {FILE}.", ONLY_FILE),
        (f"{FILE}:9999999", ONLY_FILE),
        ("", Places()),
        ("I have finished; e.g. 1/2 of it, at 12:30, see https://example.org/shop/basket.py.", Places()),
        ("shop/broken.py::f", Places(files=("shop/broken.py",))),
        ("README.md:1", Places(files=("README.md",))),
    ],
)
def test_an_answer_names_places(answer: str, places: Places):
    assert named(answer) == places


@pytest.mark.parametrize(
    ("answer", "file"),
    [
        ("../../etc/passwd.py", "../../etc/passwd.py"),
        (f"shop/../{FILE}::rounded", FILE),
        ("/etc/passwd:3", "/etc/passwd"),
        ("shop/nowhere.py::f", "shop/nowhere.py"),
        ("shop/b\u00e4sket.py", "shop/b\u00e4sket.py"),
    ],
)
def test_wrong_paths_are_wrong_places(answer: str, file: str):
    assert named(answer).files == (file,)


def test_an_unknown_name_is_a_wrong_place():
    found = named(f"{FILE}::Basket.pay {FILE}::rounds")
    assert found.functions == (f"{FILE}::Basket.pay", f"{FILE}::rounds") and f"{FILE}::Basket" in found.modules


@pytest.mark.parametrize(
    "answer",
    [
        f"{FILE}::rounded " * 60_000,
        " ".join(f"a/{at}.py" for at in range(501)),
        " ".join(f"{FILE}::f{at}" for at in range(501)),
        "\ud800" * 300_000,
        ":" * 200_000 + FILE,
        "a::" * 80_000,
    ],
    ids=["1 MB", "many files", "many functions", "half characters", "colons", "names"],
)
def test_an_answer_without_bounds_names_nothing(answer: str):
    assert named(answer) == Places()


@pytest.mark.parametrize(
    ("old", "new", "places"),
    [
        ("price) - 1", "price)", ADD),
        ("return value", "return value or 0", ADD),
        ("    @property\n", "", Places(files=(FILE,), modules=ADD.modules, functions=(f"{FILE}::Basket.total",))),
        ("size = 0", "size = 1", CLASS),
        ("    @property", "    def pay(self):\n        return 1\n\n    @property", CLASS),
        ("LIMIT = 10", "LIMIT = 11", ONLY_FILE),
        ("LIMIT = 10", "LIMIT = 10\n\n\ndef more():\n    return 1\n", ONLY_FILE),
        ("\n\n\ndef rounded", "\n\n\n\n\ndef rounded", ONLY_FILE),
        ("def rounded(price):\n    return price + 1\n", "", ROUNDED),
        ("def rounded", "async def rounded", ROUNDED),
        ("\n", "\r\n", ONLY_FILE),
        ("LIMIT", "def (:", ONLY_FILE),
    ],
)
def test_a_change_touches_places(old: str, new: str, places: Places):
    assert change(old, new) == places


def test_files_that_are_new_count_where_nothing_else_does():
    both = places_of_change({"new.py": None, FILE: BASKET}, {"new.py": "def f(): pass", FILE: BASKET + "#\n"})
    assert both.places == ONLY_FILE
    alone = places_of_change({"new.py": None}, {"new.py": "def f(): pass"})
    assert (alone.places, alone.whole_files) == (Places(files=("new.py",)), ("new.py",))


@pytest.mark.parametrize(
    "text", ["-" * 900_000 + "1", "a" + ".a" * 400_000, "(" * 900_000, "lambda:" * 100_000 + "1", "\0", "x" * 3_000_000]
)
def test_a_file_that_python_cannot_read_counts_as_a_whole(text: str):
    found = places_of_change({FILE: BASKET}, {FILE: text})
    assert (found.places, found.whole_files) == (ONLY_FILE, (FILE,))


def test_a_statement_does_not_name_the_places():
    message = (
        f"Fix basket in {FILE}: Basket.add(3) is wrong\n\nrounded(3) adds to the shop, see https://x.org/{FILE} "
        "and test_basket.\n\nSigned-off-by: A <a@b.org>"
    )
    said = statement_of(message, Places(files=(FILE,), modules=ADD.modules, functions=(*ADD.functions,)))
    assert said is not None and said.taken_out == 4
    assert said.text == (
        f"Fix {GAP} in {GAP}: {GAP}(3) is wrong\n\nrounded(3) adds to the {GAP}, see {GAP} and test_basket."
    )
    assert statement_of("Fix Basket.add in shop", ADD) is None
    assert [is_fix(each) for each in ("Fix it", "raises an error", "Add prefixes", "Debugging")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tasks(tmp_path_factory.mktemp("localization"))


def test_tasks_are_made_of_the_fixes_of_a_history(rows: Path):
    tasks = {each.problem_statement: each for each in read_instances(rows)}
    assert list(tasks) == [
        f"{GAP}() fails to leave even prices as they are",
        "The sum of an empty one was wrong",
        f"Fix the price that a thing has when it goes in, in {GAP}\n\nIt was one less.",
    ]
    assert [each.extra["split"] for each in tasks.values()] == ["heldout", "train", "train"]
    assert all("test_basket" not in each.patch and each.base_commit for each in tasks.values())
    assert [len(swe_tasks(find_suite(str(rows), split))) for split in (None, "train", "heldout")] == [3, 2, 1]


def test_a_task_does_not_tell_its_fix(rows: Path):
    for instance in read_instances(rows):
        task = swe_task(instance, find_suite(str(rows))).task.model_dump_json()
        assert "diff --git" not in task and instance.version not in json.loads(task)["instruction"]
        assert "/workspace/repository" in instruction_of(instance)


async def score(instance: Instance, text: str, folder: Path) -> tuple[PatchVerdict, Score]:
    verdict = await LocalizationBackend(folder / "cache").grade(instance, text, logs=folder / "logs", timeout=9)
    return verdict, await build("rewards", "localization")(with_verdict(example_trajectory(), verdict))


async def test_the_fix_is_one_and_nothing_is_zero(rows: Path, tmp_path: Path):
    for instance in read_instances(rows):
        verdict, best = await score(instance, instance.patch, tmp_path)
        assert (verdict.kind, best.reward, best.detail["by"]) == (VerdictKind.RESOLVED, 1.0, "patch")
        for text, by in ((NO_OP, "patch"), ("", "nothing"), ("I have no idea.", "answer")):
            verdict, worst = await score(instance, text, tmp_path)
            assert (verdict.kind, worst.reward, worst.detail["by"]) == (VerdictKind.UNRESOLVED, 0.0, by)


def diff(old: str, new: str) -> str:
    """A patch of the last version but one."""
    text = BASKET
    for _, before, after in EDITS[1:-1]:
        text = text.replace(before, after, 1)
    lines = [each.splitlines(keepends=True) for each in (text, text.replace(old, new))]
    names = f"a/{FILE}", f"b/{FILE}"
    return f"diff --git {' '.join(names)}\n" + "".join(difflib.unified_diff(*lines, *names))


async def test_answers_and_other_patches_are_graded(rows: Path, tmp_path: Path):
    instance = read_instances(rows)[0]
    verdict, right = await score(instance, f"{FILE}::rounded", tmp_path)
    assert (verdict.resolved, right.reward) == (True, 1.0)
    _, file_only = await score(instance, FILE, tmp_path)
    assert file_only.reward == pytest.approx(1 / 3)
    other = diff("return price + 1", "return round(price)")
    _, patched = await score(instance, other, tmp_path)
    assert (patched.reward, patched.detail["by"]) == (1.0, "patch")
    verdict, unapplied = await score(instance, other.replace("price + 1", "nothing"), tmp_path)
    assert (verdict.kind, unapplied.reward) == (VerdictKind.UNAPPLIED, 0.0)
    gone = f"diff --git a/{FILE} b/other.py\nsimilarity index 100%\nrename from {FILE}\nrename to other.py\n"
    _, renamed = await score(instance, gone, tmp_path)
    assert renamed.detail["f1"] == {"file": 1.0, "module": 0.0, "function": 0.0}


async def test_a_repository_that_is_gone_is_no_verdict_on_the_agent(rows: Path, tmp_path: Path):
    instance = read_instances(rows)[0]
    for changes in ({"base_commit": "0" * 40}, {"extra": {"localization": {"git": str(tmp_path)}}}, {"extra": {}}):
        lost = instance.model_copy(update=changes)
        verdict = await LocalizationBackend(tmp_path).grade(lost, "a", logs=tmp_path / "logs", timeout=9)
        assert verdict.kind is VerdictKind.INFRASTRUCTURE and verdict.places is None and verdict.reason


def test_a_patch_counts_where_it_changes_what_was_there(rows: Path):
    fix = read_instances(rows)[0].patch
    assert submission(fix, "an answer") == fix
    assert (submission(NO_OP, "an answer"), submission("", None)) == ("an answer", "")


@needs_bubblewrap
async def test_an_agent_gets_the_files_without_the_history(rows: Path, tmp_path: Path):
    instance = read_instances(rows)[0]
    backend = make_backend("local", cache=tmp_path / "cache", instances=[instance])
    await backend.check()
    checkout = await backend.checkout(instance, tmp_path / "repository")
    await backend.close()
    assert "price + 1" in (checkout.directory / FILE).read_text()
    packed = [path.name for path in (checkout.directory / ".git").rglob("*")]
    assert instance.version not in "".join(packed) and not (checkout.directory / ".git" / "refs" / "remotes").exists()


@needs_bubblewrap
def test_the_quality_gate_lets_them_pass(rows: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["tasks", "check", str(rows)]) == 0
    assert "3 of 3 tasks pass" in capsys.readouterr().out
    assert len(require_checked(rows)) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inflection==0.5.1", "--localization"], "needs a git repository"),
        (["REPOSITORY", "--localization", "--python", "3.12"], "--python: with --localization nothing is installed"),
        (["REPOSITORY@nowhere", "--localization"], "has no commit nowhere"),
        (["REPOSITORY@HEAD~4", "--localization"], "0 of 100 tasks, no more commits are small fixes"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    place = str(make_history(tmp_path))
    words = [each.replace("REPOSITORY", place) for each in words]
    assert cli.main(["tasks", "make", *words, "--out", str(tmp_path / "rows.jsonl")]) != 0
    assert said in capsys.readouterr().err


def test_both_kinds_of_rows_in_one_file_are_refused(rows: Path):
    from openhands_rl_plugin.config.rl import RewardSettings
    from openhands_rl_plugin.core.errors import ConfigError
    from openhands_rl_plugin.evals.runs.suites import graded_by

    places, tests = swe_tasks(find_suite(str(rows))), swe_tasks(find_suite("swe-local"))
    assert graded_by(places, RewardSettings()).name == "localization"
    assert graded_by(tests, RewardSettings()).name == "tests"
    with pytest.raises(ConfigError, match="files of their own"):
        graded_by((*places, *tests), RewardSettings())

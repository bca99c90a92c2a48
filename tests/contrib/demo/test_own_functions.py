"""The demo on the user's own repository: what is made of it, what is held out, what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from broken_repository import commit
from needs import needs_bubblewrap

from openhands_rl_plugin.cli import main
from openhands_rl_plugin.contrib.demo.options import RepairOptions
from openhands_rl_plugin.contrib.demo.story import beside_own, own_functions, repair_tasks
from openhands_rl_plugin.contrib.repair.making import OwnTasks, shown_functions
from openhands_rl_plugin.contrib.repair.rows import repair_instances, spec_of
from openhands_rl_plugin.contrib.repair.suites import RepairBackend
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.tasks.gate import NO_OP, lineage_path
from openhands_rl_plugin.training.loop.loop import LoopListener

NUMBERS = '''def clamp(value, low=0, high=9):
    """Keep a number between two others."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def ordinal(number, long=False):
    """1 -> "1st"."""
    last = number % 10
    if number // 10 % 10 == 1 or not 0 < last < 4:
        ending = "th"
    else:
        ending = ["st", "nd", "rd"][last - 1]
    return str(number) + (" " + ending if long else ending)
'''
WORDS = '''def shorten(text, width=10, mark="..."):
    """The beginning of a text.

    >>> [shorten("a b"), shorten("some more words"), shorten("some more words", 6), shorten("abcd", 2, "")]
    ['a b', 'some mo...', 'som...', 'ab']
    >>> shorten("0123456789"), shorten("0123456789a")
    ('0123456789', '0123456...')
    """
    if len(text) <= width:
        return text
    return text[:width - len(mark)] + mark


def initials(text, dots=True):
    """The first letters.

    >>> initials("ada lovelace"), initials("ada lovelace", False), initials(""), initials("a bc def", dots=False)
    ('A.L.', 'AL', '', 'ABD')
    >>> initials("x"), initials("grace brewster hopper")
    ('X.', 'G.B.H.')
    """
    mark = "." if dots else ""
    found = ""
    for word in text.split():
        found = found + word[0].upper() + mark
    return found
'''
TESTS = """import numbers_of
import pytest


@pytest.mark.parametrize(("value", "wanted"), [(3, 3), (-4, 0), (12, 9), (0, 0), (9, 9)])
def test_clamp(value, wanted):
    assert numbers_of.clamp(value) == wanted


def test_between_others():
    assert numbers_of.clamp(5, 6) == 6 and numbers_of.clamp(7, high=6) == 6


@pytest.mark.parametrize(("number", "wanted"), [(1, "1st"), (2, "2nd"), (13, "13th"), (23, "23rd"), (30, "30th")])
def test_ordinal(number, wanted):
    assert numbers_of.ordinal(number) == wanted


def test_a_long_ordinal():
    assert numbers_of.ordinal(6, True) == "6 th" and numbers_of.ordinal(101, long=True) == "101 st"
"""


class Noted(LoopListener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def noted(self, line: str) -> None:
        self.lines.append(line)


def repository(folder: Path, **files: str) -> Path:
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    commit(folder, "all", **files)
    return folder


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_half_of_the_functions_are_held_out_and_what_is_made_stays(tmp_path: Path) -> None:
    mine = repository(tmp_path / "mine", numbers_of=NUMBERS, words_of=WORDS, test_numbers=TESTS)
    options, noted = RepairOptions(run_directory=tmp_path / "run", repository=mine), Noted()
    own = own_functions(options, noted, anew=True)
    files = [{spec_of(each).path for each in part} for part in (own.training, own.held_out)]
    assert sorted(files) == [{"numbers_of.py"}, {"words_of.py"}], "apart by file"
    assert {spec_of(each).function for each in (*own.training, *own.held_out)} == {
        *("clamp", "ordinal", "shorten", "initials")
    }, "called by tests or by doctests"
    assert min(len(own.training), len(own.held_out)) >= 4
    assert noted.lines[0].startswith("making tasks of the functions of mine:")
    assert "would be more" not in "".join(noted.lines)
    assert noted.lines[-1].endswith("they are apart by files")
    for number, each in enumerate((own.training[0], own.held_out[0])):
        for patch, resolved in ((each.patch, True), (NO_OP, False)):
            logs = tmp_path / f"{number}-{resolved}"
            verdict = await RepairBackend().grade(each, patch, logs=logs, timeout=60)
            assert verdict.resolved == resolved

    commit(mine, "later", words_of="", day=2)
    again = Noted()
    assert own_functions(options, again, anew=False) == own, "a run keeps its commit"
    assert len(again.lines) == 3 and "--fresh makes tasks of that" in again.lines[1]
    with pytest.raises(ConfigError, match=r"of 2 functions; at least 4 tasks .* of 4 functions"):
        own_functions(options, again, anew=True)
    rows = tmp_path / "run" / "tasks" / "own.jsonl"
    rows.write_text(rows.read_text().partition("\n")[0])
    with pytest.raises(ConfigError, match="has changed since it was made: start over with --fresh"):
        own_functions(options, again, anew=False)
    lineage_path(rows).unlink()
    with pytest.raises(ConfigError, match="has lost its tasks: start over with --fresh"):
        own_functions(options, again, anew=False)


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_the_tests_lack_can_be_said_in_the_same_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is bound to the options of a command that made nothing."""
    mine = repository(tmp_path / "mine", numbers_of=NUMBERS, test_numbers=f"import six\n{TESTS}")
    words = ["demo", "--task", "repair", "--repo", str(mine), "--run-dir", str(tmp_path / "run"), "--no-studio"]
    for more in ([], ["--with", "six"]):
        assert main([*words, *more]) == 1
        said = capsys.readouterr().err
        assert f"{2 if more else 0} functions" in said and "at least 4 tasks to train on" in said
        assert ("No module named 'six'); at least" in said) == (not more), "what the tests lack is said"
        assert said.count("\n") == 1


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_task_to_train_on_shows_what_is_held_out(tmp_path: Path) -> None:
    """A function comes with those that it calls. Odd names of modules and arguments are in nobody's way."""
    calls = NUMBERS + (
        "\n\ndef level(value, low=0):\n    value = clamp(value, low)\n    if value > 4:\n        return 2\n"
        "    return 1 if value > 2 else 0\n\n\ndef place(number, **more):\n    text = ordinal(number)\n"
        "    if more:\n        text = text + '!'\n    return text + ' place'\n"
    )
    tests = TESTS + (
        "\n\ndef test_others():\n    assert [numbers_of.level(each) for each in (-2, 1, 3, 5, 12)] == [0, 0, 1, 2, 2]\n"
        "    assert [numbers_of.place(each) for each in (1, 2, 3, 11)][2:] == ['3rd place', '11th place']\n"
        "    assert numbers_of.place(4, **{'class': 1}) == '4th place!'\n"
    )
    files = {"numbers_of": calls, "words_of": WORDS, "test_numbers": tests, "test_broken": "import no_such_module\n"}
    mine = repository(tmp_path / "mine", **files, **{"my-words": WORDS.replace("initials", "others")})
    options, noted = RepairOptions(run_directory=tmp_path / "run", repository=mine), Noted()
    own = own_functions(options, noted, anew=True)
    held_out = {spec_of(each).function for each in own.held_out}
    shown = frozenset().union(*map(shown_functions, own.training))
    assert held_out and held_out.isdisjoint(shown) and "level" in held_out | shown
    assert any("1 file of tests cannot be imported (test_broken.py: " in line for line in noted.lines)


def test_the_repositorys_functions_are_trained_on_first_and_are_nobody_elses(tmp_path: Path) -> None:
    """As long as there are any, every second task; the suite's functions of these names are left out."""
    options = RepairOptions(run_directory=tmp_path)
    suite = repair_tasks(options)
    rows = repair_instances(3, "train")
    mine = OwnTasks(name="mine", commit="c", training=rows[:20], held_out=rows[200:210])
    tasks = beside_own(suite, mine, options)
    own = {f"{each.instance_id}-1" for each in mine.training}
    order = [entry.task.id in own for entry in tasks.training]
    assert order[:40] == [True, False] * 20 and not any(order[40:])
    assert [entry.task.id for entry in tasks.held_out] == [f"{each.instance_id}-1" for each in mine.held_out]
    assert {entry.task.split for entry in tasks.held_out} == {"heldout"}
    names = {spec_of(each).function for each in (*mine.training, *mine.held_out)}
    others = [entry for entry in (*tasks.demonstrations, *tasks.training) if entry.task.id not in own]
    assert len(others) > 900
    shown = [shown_functions(entry.instance) for entry in others if entry.instance is not None]
    assert all(map(names.isdisjoint, shown)), "neither as a target nor beside one"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repo", "."], "--repo is of the repair tasks: add --task repair"),
        (["--with", "six"], "--with is of the repair tasks: add --task repair"),
        (["--task", "repair", "--tests", "t"], "--tests and --with are of a repository: add --repo PATH"),
        (["--task", "repair", "--repo", "nowhere"], "--repo nowhere: there is no such folder"),
        (["--task", "repair", "--repo", "."], "--repo . is no git repository: tasks are made of commits; run"),
    ],
)
def test_mistakes_are_a_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "repair-nowhere").mkdir(parents=True)
    (kept := tmp_path / "runs" / "repair-nowhere" / "state.json").write_text("{}")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert main(["demo", *words, "--no-studio", "--fresh"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}") and said.count("\n") == 1
    assert kept.exists() and len([*(tmp_path / "runs").iterdir()]) == 1, "nothing is deleted or made for it"

"""Git repositories: one with a failing test and the command that mends it; one with tests, and a fix in its history;
one with four modules, and two fixes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.evals.tasks.source import commit_files

REPAIR = "sed -i s/-/+/ sums.py"
FILES = {
    "sums.py": "def add(a, b):\n    return a - b\n",
    "test_sums.py": (
        "import unittest\n\nimport sums\n\n\n"
        "class Sums(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(sums.add(2, 3), 5)\n"
    ),
}


def repository(folder: Path) -> None:
    """A commit with a test that fails."""
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "broken"]):
        subprocess.run([*git, *words], cwd=folder, check=True)


def passes(folder: Path) -> bool:
    tests = [sys.executable, "-B", "-m", "unittest", "-q"]
    return subprocess.run(tests, cwd=folder, capture_output=True, check=False).returncode == 0


CODE = '''"""Numbers with units."""


def parse(text, default="m"):
    """``"3 km"`` -> ``(3, "km")``."""
    number, _, unit = text.strip().partition(" ")
    if not number:
        raise ValueError("no number")
    return int(number), unit or default


def total(texts, unit="m"):
    """The sum of those with that unit."""
    found = 0
    for text in texts:
        number, own = parse(text)
        if own == unit and number > 0:
            found += number
    return found


def shown(number, unit):
    """``(3, "km")`` -> ``"3 km"``."""
    if number == 1:
        return f"one {unit}"
    return str(number) + " " + unit
'''
TESTS = """import pytest

from units import parse, shown, total


@pytest.mark.parametrize(("text", "expected"), [("3 km", (3, "km")), ("5", (5, "m")), (" 1 s ", (1, "s"))])
def test_parse(text, expected):
    assert parse(text) == expected


def test_nothing_to_parse():
    with pytest.raises(ValueError):
        parse("")


@pytest.mark.parametrize(("texts", "expected"), [([], 0), (["3", "4 m"], 7), (["3 s", "4", "-1"], 4)])
def test_total(texts, expected):
    assert total(texts) == expected


def test_total_of_another_unit():
    assert total(["3 s", "4"], unit="s") == 3


def test_shown():
    text = shown(3, "km")
    assert text == "3 km"


def test_one():
    assert shown(1, "km") == "one km"


def test_version(tmp_path):
    (tmp_path / "a").write_text("1")
    assert (tmp_path / "a").read_text() == "1"
"""


def commit(folder: Path, message: str, *, day: int = 1, **files: str) -> None:
    """``files``: module -> text; ``day``: of January 2024."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    when = {**os.environ, "GIT_COMMITTER_DATE": f"2024-01-{day:02} 00:00:00 +0000"}
    subprocess.run(["git", *who, "commit", "--quiet", "-m", message], cwd=folder, check=True, env=when)


def units_repository(folder: Path) -> Path:
    """``folder``, a new repository of three commits; the newest has the tag ``v1.2``."""
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    broken = CODE.replace("own == unit and number > 0", "own == unit")
    commit(folder, "first", units=broken, test_units=TESTS.replace('(["3 s", "4", "-1"], 4)', '(["3 s", "4"], 4)'))
    commit(folder, "fix", units=CODE, test_units=TESTS)
    commit(folder, "words", units=CODE.replace("Numbers with units", "Numbers and units"))
    subprocess.run(["git", "tag", "v1.2"], cwd=folder, check=True)
    return folder


SHAPES = '''def area(width, height):
    """Of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height


def perimeter(width, height):
    """Of a rectangle."""
    return 2 * (width + height)


def scaled(width, height, factor=2):
    """Both sides longer."""
    return width * factor, height * factor
'''
WORDS = '''def initials(text):
    """``"ada lovelace"`` -> ``"AL"``."""
    return "".join(word[0].upper() for word in text.split())


def counted(text, least=1):
    """Words with at least so many letters."""
    found = 0
    for word in text.split():
        if len(word) >= least:
            found += 1
    return found


def joined(words, mark="-"):
    """With a mark between."""
    return mark.join(words)
'''
SUMS = '''def mean(numbers):
    """0 for none."""
    if not numbers:
        return 0
    return sum(numbers) / len(numbers)


def running(numbers):
    """Sums so far."""
    total, found = 0, []
    for number in numbers:
        total += number
        found.append(total)
    return found


def largest(numbers, below=100):
    """Of those below a bound."""
    return max(number for number in numbers if number < below)
'''
DATES = '''def leap(year):
    """Whether a year has 366 days."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days(month, year):
    """Of a month."""
    if month == 2:
        return 29 if leap(year) else 28
    return 30 if month in (4, 6, 9, 11) else 31


def quarter(month):
    """1 to 4."""
    return (month - 1) // 3 + 1
'''
ASSERTIONS = {
    "shapes": [
        "area(2, 3) == 6", "area(1, 5) == 5", "perimeter(2, 3) == 10", "perimeter(1, 1) == 4", "scaled(1, 2) == (2, 4)",
        "scaled(1, 2, 3) == (3, 6)",
    ],
    "words": [
        "initials('ada lovelace') == 'AL'", "counted('a bc d') == 3", "counted('a bc def', 2) == 2",
        "joined(['a', 'b']) == 'a-b'", "joined(['a', 'b'], '+') == 'a+b'",
    ],
    "sums": [
        "mean([1, 3]) == 2", "mean([]) == 0", "running([1, 2, 3]) == [1, 3, 6]", "running([]) == []",
        "largest([1, 5]) == 5", "largest([1, 500]) == 1",
    ],
    "dates": [
        "leap(2024)", "not leap(1900)", "leap(2000)", "days(2, 2024) == 29", "days(2, 2023) == 28", "days(4, 23) == 30",
        "days(1, 2023) == 31", "quarter(1) == 1", "quarter(12) == 4",
    ],
}  # fmt: skip


def tests_of(module: str, *, without: str = "-") -> str:
    names = sorted({line.partition("(")[0].removeprefix("not ") for line in ASSERTIONS[module]})
    lines = [f"from {module} import {', '.join(names)}\n"]
    for at, line in enumerate(ASSERTIONS[module]):
        if not line.startswith(without):
            lines.append(f"\n\ndef test_{module}_{at}():\n    assert {line}\n")
    return "".join(lines)


def gym_repository(folder: Path) -> Path:
    """Three commits, a day after each other: ``mean``, then ``initials`` are mended."""
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    code = {"shapes": SHAPES, "words": WORDS, "sums": SUMS, "dates": DATES}
    broken = {"words": WORDS.replace(".upper()", ""), "sums": SUMS.replace("/ len(numbers)", "// len(numbers) + 1")}
    untested = {"words": "initials", "sums": "mean"}
    tests = {f"test_{module}": tests_of(module, without=untested.get(module, "-")) for module in code}
    commit(folder, "first", **{**code, **broken, **tests})
    commit(folder, "mean", day=2, sums=SUMS, test_sums=tests_of("sums"))
    commit(folder, "initials", day=3, words=WORDS, test_words=tests_of("words"))
    return folder


def commit_of(files: Mapping[str, str], who: str = "repair") -> str:
    """The commit of a repository of these files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            write_file(Path(folder, "work", name), text, parents=True)
        return commit_files(Path(folder, "work", ".git"), Path(folder, "work"), "start", who=who)

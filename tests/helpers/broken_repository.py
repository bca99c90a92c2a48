"""Git repositories: one with a failing test and the command that mends it; one with tests, and a fix in its history."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def commit(folder: Path, message: str, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run(["git", *who, "commit", "--quiet", "-m", message], cwd=folder, check=True)


def units_repository(folder: Path) -> Path:
    """``folder``, a new repository of three commits; the newest has the tag ``v1.2``."""
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    broken = CODE.replace("own == unit and number > 0", "own == unit")
    commit(folder, "first", units=broken, test_units=TESTS.replace('(["3 s", "4", "-1"], 4)', '(["3 s", "4"], 4)'))
    commit(folder, "fix", units=CODE, test_units=TESTS)
    commit(folder, "words", units=CODE.replace("Numbers with units", "Numbers and units"))
    subprocess.run(["git", "tag", "v1.2"], cwd=folder, check=True)
    return folder

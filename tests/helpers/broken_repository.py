"""A git repository with a test that fails, and the command that mends it."""

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

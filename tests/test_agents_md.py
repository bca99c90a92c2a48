"""AGENTS.md answers ten questions by a file and a name: both have to be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "openhands_rl_plugin"
TEXT = (PACKAGE / "AGENTS.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(r"^\| ([^|]+\?) \| `([^`]+)` \| `([^`]+)` \|$", TEXT, re.MULTILINE)


def test_there_are_ten_questions() -> None:
    assert len(QUESTIONS) == 10


@pytest.mark.parametrize(("question", "file", "name"), QUESTIONS, ids=[question for question, _, _ in QUESTIONS])
def test_a_question_leads_to_its_file(question: str, file: str, name: str) -> None:
    assert name in (PACKAGE / file).read_text(encoding="utf-8"), question


def test_every_path_that_is_named_exists() -> None:
    """Paths in backticks, below the package or the repository; ``NAME`` stands for a file to come."""
    named = {path for path in re.findall(r"`([a-z_0-9]+/[\w/.]*?)(?:[:.][a-z_A-Z]+)?`", TEXT) if "NAME" not in path}
    roots = (PACKAGE, PACKAGE.parent)
    missing = [
        path
        for path in sorted(named)
        if not any((root / f"{path}{end}").exists() for root in roots for end in ("", ".py", ".md"))
    ]
    assert not missing

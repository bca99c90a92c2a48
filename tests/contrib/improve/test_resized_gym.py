"""Other numbers of tasks than an earlier call made: they are made anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from openhands_rl_plugin.apps.loop.checks import claim
from openhands_rl_plugin.contrib.improve.gym import WantedTasks, resize
from openhands_rl_plugin.core.types import JsonObject


def identity(tasks: int, **more: object) -> JsonObject:
    return {"repository": "r", **WantedTasks(tasks=tasks, held_out=8).model_dump(mode="json"), **more}


@pytest.mark.parametrize(
    ("survey", "now", "anew"),
    [
        (True, identity(16), False),
        (True, identity(32), True),
        (True, identity(16, seed=5), False),
        (False, identity(16, seed=5), True),
    ],
    ids=["the same", "more", "another seed", "before a survey"],
)
def test_what_is_made_anew(survey: bool, now: JsonObject, anew: bool, tmp_path: Path) -> None:
    claim(tmp_path / "tasks", identity(16))
    (tmp_path / "tasks/made.jsonl").touch()
    if survey:
        (tmp_path / "tasks/survey.json").touch()
    assert resize(tmp_path / "tasks", now) is anew
    assert (tmp_path / "tasks/made.jsonl").exists() is not anew

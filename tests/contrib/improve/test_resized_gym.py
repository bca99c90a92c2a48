"""Other numbers of tasks than an earlier call made: what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openhands_rl_plugin.apps.loop.checks import claim
from openhands_rl_plugin.contrib.improve.gym import WantedTasks, resize
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import JsonObject

ALL = {"survey.json", "repository.json", "made.jsonl", "made.lineage.json", "gate", "tried.txt", "gym.json"}


def identity(tasks: int, held_out: int = 8, **more: object) -> JsonObject:
    return {"repository": "r", **WantedTasks(tasks=tasks, held_out=held_out).model_dump(mode="json"), **more}


def made(folder: Path, *, without: str = "") -> Path:
    """What a call with 16 and 8 tasks left."""
    claim(folder, identity(16))
    for name in ALL - {without, "gate"}:
        (folder / name).write_text(name)
    (folder / "gate").mkdir()
    (folder / "gate/a.checked.json").write_text("{}")
    (folder / ".made.jsonl.journal").write_text("journal")
    return folder


def resized(folder: Path, now: JsonObject) -> tuple[bool, set[str]]:
    options = WantedTasks.model_validate({name: now[name] for name in WantedTasks.model_fields})
    anew = resize(folder, now, options)
    claim(folder, now)
    assert json.loads((folder / "options.json").read_text()) == now
    return anew, {file.name for file in folder.iterdir()} & ALL


def test_the_same_numbers_change_nothing(tmp_path: Path) -> None:
    assert resized(made(tmp_path), identity(16)) == (False, ALL)


def test_fewer_are_chosen_among_those_that_were_made(tmp_path: Path) -> None:
    assert resized(made(tmp_path), identity(10, 12)) == (False, ALL - {"gym.json"})


@pytest.mark.parametrize(("without", "tasks"), [("", 32), ("made.lineage.json", 8)], ids=["more", "half made"])
def test_more_are_made_anew_and_the_survey_stays(without: str, tasks: int, tmp_path: Path) -> None:
    found = resized(made(tmp_path, without=without), identity(tasks))
    assert found == (True, {"survey.json", "repository.json"})
    assert not (tmp_path / ".made.jsonl.journal").exists()


def test_nothing_is_kept_of_what_was_refused_before_a_survey(tmp_path: Path) -> None:
    made(tmp_path, without="survey.json")
    anew, left = resized(tmp_path, identity(16, seed=5, python="3.13"))
    assert not anew and "repository.json" not in left, "tests may have been mended in a newer commit"


def test_other_options_are_another_run(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(ConfigError, match="seed: 1, now 5"):
        resized(tmp_path, identity(16, seed=5))

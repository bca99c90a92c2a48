"""Episodes that a trainer plays as processes: their options, another try, their limits and the Python they run in."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ScriptedModel, says, serve

import openhands_rl_plugin
from openhands_rl_plugin.apps.rollout import episode_program
from openhands_rl_plugin.apps.rollout.episode_program import (
    VARIABLE,
    EpisodeProgram,
    checked_interpreter,
)
from openhands_rl_plugin.apps.rollout.rollout import PlayedRollout
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SEARCH = "Thought:\nI look.\n\nAction:\nsearch[socks]"
SHOP = {"native_tool_calling": False, "max_turns": 1}


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with serve() as server:
        server.policies["policy"] = lambda body: says(SEARCH)
        yield server


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For tests that name another Python, which is asked once a process."""
    checked_interpreter.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    checked_interpreter.cache_clear()


def program(given: dict[str, Any], **settings: Any) -> EpisodeProgram:
    return EpisodeProgram(given, where="own.options", trainer="Trainer", fixed=frozenset({"temperature"}), **settings)


def stand_in(path: Path, text: str) -> Path:
    """A Python that says that it has OpenHands, and is ``text`` as ``cli.rollout``."""
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *rollout*) ;; *) exec {checked_interpreter()} "$@";; esac\n{text}\n', encoding="utf-8"
    )
    path.chmod(0o700)
    return path


async def test_an_episode_has_its_ids_and_is_kept_where_asked(model: ScriptedModel, tmp_path: Path):
    own = program(SHOP, store=str(tmp_path / "kept"))
    row = json.dumps({"id": "mine", "environment": "webshop", "data": {"idx": 5}})
    named = {"base_model": "base", "run_id": "run", "group_id": "group", "sample": 2}
    played = await own.play(row, model.url, "policy", temperature=0.5, **named)
    assert isinstance(played, PlayedRollout) and played.reward == 0.0 and played.segments
    async with FileTrajectoryStorage(tmp_path / "kept") as storage:
        ((kept, _),) = [found async for found in storage.find()]
    assert (kept.task.id, kept.group_id) == ("mine", "group")
    assert {each["temperature"] for each in model.requests["policy"]} == {0.5}


@pytest.mark.slow
async def test_what_fails_of_the_infrastructure_is_played_again_under_another_name(
    model: ScriptedModel, tmp_path: Path, python: pytest.MonkeyPatch
):
    python.setattr(episode_program, "_AWAY", 0.1)
    asked = tmp_path / "asked"
    real = checked_interpreter()
    killed_once = f'echo "$*" >> {asked}; [ $(wc -l < {asked}) -gt 1 ] || kill -9 $$; exec {real} "$@"'
    python.setenv(VARIABLE, str(stand_in(tmp_path / "python", killed_once)))
    checked_interpreter.cache_clear()
    named = {"run_id": "run", "group_id": "group", "sample": 0}
    own = program(SHOP, store=str(tmp_path / "kept"))
    by_id = await own.play("webshop-3", model.url, "policy", **named)
    assert isinstance(by_id, PlayedRollout) and by_id.task_id == "webshop-3" and by_id.segments
    assert {each["temperature"] for each in model.requests["policy"]} == {1.0}
    groups = [re.search(r"--group-id (\S+)", each) for each in asked.read_text().splitlines()]
    assert [each and each[1] for each in groups] == ["group", "group/again-1"]
    refused = await own.play("webshop-99999", model.url, "policy", **named)
    assert isinstance(refused, str) and refused.startswith("configuration: webshop has no task 99999")
    assert len(asked.read_text().splitlines()) == 3, "what would fail again is not played again"


async def test_an_episode_ends_at_its_limit_and_when_it_is_given_up(python: pytest.MonkeyPatch, tmp_path: Path):
    note = tmp_path / "pid"
    python.setenv(VARIABLE, str(stand_in(tmp_path / "slow", f"sleep 600 & echo $! > {note}; wait")))
    python.setattr(episode_program, "GRACE", 0.0)
    checked_interpreter.cache_clear()
    own = program({"timeout": 1.5}, tries=1)
    assert await own.play("a", "http://127.0.0.1:1/v1", "m") == (
        "infrastructure: the episode's program did not end within 1.5 s"
    )
    assert gone(int(note.read_text()))
    note.unlink()
    own = program({"timeout": 600.0})
    waiting = asyncio.create_task(own.play("a", "http://127.0.0.1:1/v1", "m"))
    while not note.exists() or not note.read_text():
        await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert gone(int(note.read_text())), "and its children with it"


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_what_cannot_be_played_is_refused_before_anything_starts(python: pytest.MonkeyPatch, tmp_path: Path):
    for given, settings, said in (
        ({"turns": 3}, {}, "own.options.turns is none of"),
        ({"temperature": 1.0}, {}, "own.options.temperature is set by Trainer"),
        ({"max_turns": "none"}, {}, "own.options.max_turns: "),
        ({}, {"tries": 0}, "own.tries has to be 1 or more"),
    ):
        with pytest.raises(ConfigError, match=said):
            program(given, **settings)
    ours = openhands_rl_plugin.__version__
    for number, (text, said) in enumerate(
        (
            ("exit 1", "is no Python that runs"),
            ("echo Hello", "is no Python that runs"),
            ("echo '[null, null, null]'", "has no openhands_rl_plugin: make one with"),
            (f"""echo '["{ours}", null, null]'""", "has no OpenHands: make one with"),
            ("""echo '["0.0.1", "1", null]'""", f"has openhands_rl_plugin 0.0.1, and this Python {ours}"),
        )
    ):
        named = tmp_path / f"python-{number}"
        named.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        named.chmod(0o700)
        python.setenv(VARIABLE, str(named))
        checked_interpreter.cache_clear()
        with pytest.raises(ConfigError, match=said):
            program({})

"""Episodes that a trainer rolls out as processes: what they return, their limits and the Python they run in."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_model import ScriptedModel, reply, serve

from openhands_rl_plugin.apps.rollout import rollout
from openhands_rl_plugin.apps.rollout.rollout import VARIABLE, PlayedRollout, roll_out
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SEARCH = "Thought:\nI look.\n\nAction:\nsearch[socks]"
SHOP = {"model": "policy", "native_tool_calling": False, "max_turns": 1}


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with serve() as server:
        server.policies["policy"] = lambda body: reply(SEARCH)
        yield server


def program(path: Path, text: str) -> str:
    """A program in the place of the Python with OpenHands."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o700)
    return str(path)


async def test_an_episode_has_its_ids_and_is_kept_where_asked(model: ScriptedModel, tmp_path: Path):
    row = json.dumps({"id": "mine", "environment": "webshop", "data": {"idx": 5}})
    named = {"base_model": "base", "run_id": "run", "group_id": "group", "sample": 2, "temperature": 0.5}
    found = await roll_out(row, {**SHOP, "base_url": model.url, **named}, store=tmp_path / "kept")
    assert isinstance(found, PlayedRollout) and found.reward == 0.0 and found.segments
    async with FileTrajectoryStorage(tmp_path / "kept") as storage:
        ((kept, _),) = [each async for each in storage.find()]
    assert (kept.task.id, kept.group_id) == ("mine", "group")
    assert {each["temperature"] for each in model.requests["policy"]} == {0.5}


async def test_an_episode_ends_at_its_limit_and_when_it_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    note = tmp_path / "pid"
    monkeypatch.setenv(VARIABLE, program(tmp_path / "slow", f"sleep 600 & echo $! > {note}; wait"))
    monkeypatch.setattr(rollout, "_GRACE", 0.0)
    assert await roll_out("a", {"timeout": 1.5}) == "infrastructure: the episode's program did not end within 1.5 s"
    assert gone(int(note.read_text()))
    note.unlink()
    waiting = asyncio.create_task(roll_out("a", {"timeout": 600.0}))
    while not note.exists() or not note.read_text():
        time.sleep(0.05)  # Nothing else happens, so that the program runs before its start is over here.
        await asyncio.sleep(0)
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


async def test_why_there_is_no_episode_is_one_line(tmp_path: Path):
    for text, why in (
        ("echo Hello", "infrastructure: .* ended with exit code 0: Hello"),
        ("echo 'No module named x' >&2; exit 1", "infrastructure: .* ended with exit code 1: No module named x"),
        (f'exec {sys.executable} "$@" --turns 3', "infrastructure: .* exit code 2: .*--turns"),
        (f'exec {sys.executable} "$@"', "configuration: which endpoint"),
    ):
        found = await roll_out("webshop-3", {}, python=program(tmp_path / "python", text))
        assert isinstance(found, str) and re.match(why, found), found

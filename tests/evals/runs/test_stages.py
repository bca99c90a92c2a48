"""Stages of episodes: workspaces are made ahead of play, and no more than there is place for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evaluation.performance.hosts.prepared import waited
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.evals.runs.stages import Stage, Stages


@pytest.mark.parametrize("prepared", [0, 2])
async def test_workspaces_are_made_ahead_of_play(prepared: int, tmp_path: Path):
    """While one is played there are so many others, and not one more."""
    made, playing, release = 0, asyncio.Event(), asyncio.Event()

    async def setup() -> None:
        nonlocal made
        made += 1

    async def play() -> None:
        playing.set()
        await release.wait()

    episodes = asyncio.create_task(waited(tmp_path, 6, Stages(playing=1, grading=1, prepared=prepared), setup, play))
    await playing.wait()
    while len(list((tmp_path / "scratch").glob("*/*"))) < 1 + prepared:
        await asyncio.sleep(0.01)
    assert made == 1 + prepared
    release.set()
    assert len(await episodes) == 6 and made == 6
    assert list((tmp_path / "scratch").iterdir()) == []


async def test_a_workspace_that_takes_too_long_is_a_failure_of_the_infrastructure(tmp_path: Path):
    async def never() -> None:
        await asyncio.Event().wait()

    (failed,) = await waited(tmp_path, 1, Stages(playing=1, grading=1, setup_timeout=0.01), never, never)
    assert failed.failure is not None and failed.failure.kind is FailureKind.INFRASTRUCTURE
    assert "not there after 0.01 s" in failed.failure.message


async def test_each_episode_hears_of_its_own_stages():
    shared, heard = Stages(playing=1, grading=1), list[Stage]()
    own = shared.telling(heard.append)
    async with own.place():
        async with own.set_up():
            pass
        async with own.play():
            pass
    async with own.grade(), shared.place(), shared.play():
        pass
    assert heard == [*Stage]

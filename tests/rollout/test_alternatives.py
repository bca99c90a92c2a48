"""Answers that are taken in forks of one state: which are equal, what is noted, and where the episode goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.core.acted import is_replayed
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import Environment, LLMEngine, TrajectoryStorage
from openhands_rl_plugin.core.records import PrefixNote, prefix_of
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Limits,
    Message,
    Observation,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.rollout.alternatives import other_answer, outcome_of, outcomes
from openhands_rl_plugin.rollout.in_process import SessionRunner
from openhands_rl_plugin.rollout.prefix import path_before
from openhands_rl_plugin.rollout.strategies.react import StandardReActStrategy
from openhands_rl_plugin.testing import GridEnvironment, ScriptedEngine
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

TASK = Task(id="walk", environment="grid", limits=Limits(max_turns=6))
REQUEST = EpisodeRequest(task=TASK, run_id="run", group_id="run/walk")
WALK = ("right", "left", "right", "right", "down", "down")


class Rigid(Environment):
    """A grid without forks."""

    def __init__(self) -> None:
        self.grid = GridEnvironment()
        self.reset, self.step = self.grid.reset, self.grid.step
        self.evidence, self.close = self.grid.evidence, self.grid.close


def session(
    engine: LLMEngine, environment: type = GridEnvironment, storage: TrajectoryStorage | None = None
) -> SessionRunner:
    return SessionRunner(
        make_environment=lambda _: environment(),
        make_strategy=lambda _: StandardReActStrategy(),
        make_engine=lambda _: engine,
        strategy_spec=StrategySpec(name="StandardReAct"),
        base_model="base",
        storage=storage,
    )


async def played(request: EpisodeRequest, script: Sequence[str], environment: type = GridEnvironment) -> Trajectory:
    return await session(ScriptedEngine(script), environment).run(request)


def play(request: EpisodeRequest, script: Sequence[str], environment: type = GridEnvironment) -> Trajectory:
    return asyncio.run(played(request, script, environment))


def tried(turns: int, words: Sequence[str], then: Sequence[str] = ("right",) * 6) -> Trajectory:
    """An episode that replays ``turns`` of ``WALK`` and takes each of the words in a fork."""
    source = play(REQUEST, WALK)
    path = path_before(source, turns, good=True)
    place = PrefixNote(trajectory=source.id, turns=turns + 1, of=len(WALK), good=True)
    candidates = tuple(other_answer(path, Message(role="assistant", content=word), place) for word in words)
    return play(REQUEST.model_copy(update={"prefix": path, "candidates": candidates, "group_id": "tried"}), then)


WORDS = st.sampled_from(["up", "down", "left", "right", "I go up", "Down!", "right.", "fly", "swim", "..left"])


@settings(max_examples=25, deadline=None)
@given(turns=st.integers(0, 5), words=st.lists(WORDS, min_size=2, max_size=5))
def test_two_answers_are_equal_where_they_lead_to_the_same(turns: int, words: list[str]) -> None:
    at = {0: (0, 0), 1: (1, 0), 2: (0, 0), 3: (1, 0), 4: (2, 0), 5: (2, 1)}[turns]

    def leads_to(word: str) -> tuple[object, ...]:
        move = GridEnvironment.MOVES.get(word.lower().split()[-1].strip(".!"))
        return ("invalid",) if move is None else tuple(min(max(a + b, 0), 2) for a, b in zip(at, move, strict=True))

    found = list(outcomes(tried(turns, words)))
    assert [message.content for message, *_ in found] == words
    for one, (_, outcome, ended) in zip(words, found, strict=True):
        assert ended == (leads_to(one) == (2, 2))
        for other, (_, another, _) in zip(words, found, strict=True):
            assert (outcome == another) == (leads_to(one) == leads_to(other)), (one, other)


def test_the_episode_goes_on_with_the_first_and_nothing_that_was_given_counts_as_sampled() -> None:
    episode = tried(3, ["I go right", "up", "down"], then=("down", "down"))
    said = [episode.nodes[at].message.content for at in episode.acted()]
    assert said == ["right", "left", "right", "I go right", "down", "down"] and episode.episode_return == 1
    given_ones = [node for node in episode.nodes if node.sampled and is_replayed(node)]
    assert [node.message.content for node in given_ones] == ["right", "left", "right", "I go right", "up", "down"]
    assert [node.simulated for node in given_ones] == [False] * 4 + [True, True]
    note = prefix_of(episode)
    assert note is not None and "instead" not in note.in_words()
    last = PrefixNote.model_validate(given_ones[-1].metadata["prefix"])
    assert last.in_words().endswith("with another answer in the last of them") and last.turns == 4


class PowerCut(BaseException):
    """The process ends here."""


class Cut:
    """An engine that ends the process at its second call."""

    def __init__(self) -> None:
        self.engine, self.calls = ScriptedEngine(["down"]), 0

    async def complete(self, messages: Sequence[Message], **asked: object) -> list[Completion]:
        self.calls += 1
        if self.calls > 1:
            raise PowerCut
        return await self.engine.complete(messages)


async def test_a_killed_episode_tries_nothing_again(tmp_path: Path) -> None:
    source = await played(REQUEST, WALK)
    path = path_before(source, 3, good=True)
    place = PrefixNote(trajectory=source.id, turns=4, of=len(WALK), good=True)
    candidates = tuple(other_answer(path, Message(role="assistant", content=word), place) for word in ("right", "up"))
    asked = REQUEST.model_copy(update={"prefix": path, "candidates": candidates, "group_id": "tried"})
    whole = await played(asked, ("down", "down"))
    async with FileTrajectoryStorage(tmp_path) as storage:
        with pytest.raises(PowerCut):
            await session(Cut(), storage=storage).run(asked)
        resumed = await session(ScriptedEngine(["down"]), storage=storage).run(asked)
    assert resumed.messages() == whole.messages() and list(outcomes(resumed)) == list(outcomes(whole))


def test_an_environment_without_forks_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot fork"):
        source = play(REQUEST, WALK)
        path = path_before(source, 0, good=True)
        place = PrefixNote(trajectory=source.id, turns=1, of=len(WALK), good=True)
        candidate = other_answer(path, Message(role="assistant", content="up"), place)
        play(REQUEST.model_copy(update={"prefix": path, "candidates": (candidate,)}), WALK, Rigid)


def test_how_long_a_command_took_is_no_other_outcome_and_a_changed_file_is() -> None:
    def heard(text: str) -> Observation:
        return Observation(messages=(Message(role="tool", content=text, tool_call_id=text[-1], name="run"),))

    patch = {"git_patch": "+1"}
    assert outcome_of(heard("1 passed in 0.12s a"), patch) != outcome_of(heard("1 failed in 0.12s a"), patch)
    first = Observation(messages=(Message(role="tool", content="1 passed in 0.12s", tool_call_id="x", name="run"),))
    second = Observation(messages=(Message(role="tool", content="1 passed in 3.4s", tool_call_id="y", name="run"),))
    assert outcome_of(first, patch) == outcome_of(second, patch)
    assert outcome_of(first, patch) != outcome_of(first, {"git_patch": "+2"})
    assert outcome_of(first, patch) != outcome_of(first.model_copy(update={"terminated": True}), patch)

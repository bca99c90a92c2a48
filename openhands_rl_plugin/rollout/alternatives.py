"""Answers that are tried beside each other: each is taken in a fork of its own, of one and the same state.

A request names them (``EpisodeRequest.candidates``); they are tried after its prefix. Two answers of different wording
have the same outcome where the fork heard the same, earned the same, ended or not in the same way, and where it stands
in the same state afterwards: the environment's evidence, which in a workspace is the patch. So equal outcomes are
judged by execution, and not by their text. The episode goes on with the first of the answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from openhands_rl_plugin.core.acted import PREFIX
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, EpisodeError, boundary
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine, Strategy
from openhands_rl_plugin.core.records import PrefixNote
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    FailureKind,
    JsonObject,
    Message,
    Node,
    Observation,
    Trajectory,
)
from openhands_rl_plugin.rollout.prefix import ReadsAnswers, after_prefix, timeless
from openhands_rl_plugin.rollout.strategies.annotations import note, notes
from openhands_rl_plugin.rollout.strategies.forks import in_step_time

OUTCOME, ENDED = "outcome", "ended"
"""Keys of what is noted on a candidate's node: its outcome, and how the episode ended with it, if it did."""
_STEP_TIMEOUT = 60.0


def strategy_for(request: EpisodeRequest, strategy: Strategy) -> Strategy:
    """``strategy`` behind what the request wants first: a prefix to replay, and answers to try."""
    if request.candidates:
        strategy = AlternativesStrategy(strategy, request.candidates, sum(node.sampled for node in request.prefix))
    return after_prefix(strategy, request.prefix)


def other_answer(path: tuple[Node, ...], said: Message, place: PrefixNote) -> Node:
    """An answer at the end of the path that its episode does not sample; ``place`` is that of the recorded one."""
    told = place.model_copy(update={"instead": True}).model_dump()
    return Node(parent=len(path) - 1, message=said, sampled=True, metadata={PREFIX: told})


def outcomes(trajectory: Trajectory) -> Iterator[tuple[Message, str, bool]]:
    """The tried answers of an episode that could be taken: each with its outcome, and whether it ended the episode."""
    for node in trajectory.nodes:
        if isinstance(found := notes(node).get(OUTCOME), str):
            yield node.message, found, ENDED in notes(node)


class AlternativesStrategy:
    """After ``turns`` turns it takes every candidate in a fork, notes its outcome and commits the first one; all later
    turns, also those of a resumed episode, are another strategy's."""

    forks = 1

    def __init__(self, strategy: Strategy, candidates: tuple[Node, ...], turns: int) -> None:
        self._strategy = strategy
        self._candidates = candidates
        self._turns = turns
        self._tried = False

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """The first candidate that can be executed; later, what the other strategy decides.

        Raises ``ConfigError`` where the environment cannot fork, ``CaughtFailure`` where no candidate can be executed.
        """
        if self._tried or tree.turns > self._turns:
            return await self._strategy.decide(tree, engine, world)
        self._tried = True
        if world is None:
            raise ConfigError(
                "answers are compared in forks of the environment, and this one cannot fork (a workspace needs "
                "bubblewrap): set [rl.loop] pivots = 0"
            )
        tried = [await self._take(tree, engine, world, candidate) for candidate in self._candidates]
        first = next((at for at in tried if at is not None), None)
        if first is None:
            raise CaughtFailure(
                Failure(
                    kind=FailureKind.ENVIRONMENT,
                    message=f"none of {len(self._candidates)} answers could be taken in a fork",
                    boundary="alternatives",
                )
            )
        return first

    async def _take(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable, candidate: Node) -> int | None:
        """The node of the answer with its outcome; ``None`` where the host or a fork cannot execute it."""
        try:
            if isinstance(engine, ReadsAnswers):
                engine.read_again(candidate.message)
            with boundary(FailureKind.ENVIRONMENT, "alternatives"):
                async with in_step_time(world, _STEP_TIMEOUT, [candidate.message]):
                    fork = await world.fork()
                    try:
                        observation = await fork.step(candidate.message)
                        evidence = await fork.evidence()
                    finally:
                        await fork.close()
        except EpisodeError:
            return None
        at = tree.propose(Completion(message=candidate.message, metadata=candidate.metadata))
        node = tree.nodes[at]
        node.reward, node.simulated = observation.reward, True
        note(node)[OUTCOME] = outcome_of(observation, evidence)
        if observation.terminated or observation.truncated:
            note(node)[ENDED] = "terminated" if observation.terminated else "truncated"
        below = at
        for message in observation.messages:
            below = tree.append(message, parent=below)
        return at


def outcome_of(observation: Observation, evidence: JsonObject) -> str:
    """A name of what an answer led to: equal for two answers that cannot be told apart by what follows from them."""
    heard = [
        (each.role, each.content, [(call.name, call.arguments) for call in each.tool_calls])
        for each in map(timeless, observation.messages)
    ]
    told = (heard, observation.reward, observation.terminated, observation.truncated, evidence)
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

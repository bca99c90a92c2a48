"""Pivots: reinforcement on single decisions of an iteration's episodes: ``[rl.loop] pivots``, ``pivot_updates``.

A whole episode is a dear sample: its one reward is shared by all its turns, and most of these decide nothing. A pivot
is a turn whose answers differ in what they earn (PivotRL, Yi et al. 2026, arXiv 2603.21383). After each iteration

1. the policy answers anew, ``samples_per_task`` times, in states that the iteration's episodes went through; states
   of groups with a signal come first;
2. each new wording is tried in a fork of its state, in a session that replays the episode up to there; wordings with
   one outcome (``rollout.alternatives``) are one action, with one value: the mean reward of the stored episodes that
   took it, and of new ones, up to ``EPISODES_PER_OUTCOME``, that begin with it;
3. states whose answers have values with a standard deviation of at least ``LEAST_SPREAD`` are the pivots.

Each update trains on a group of answers to each pivot, with their values as rewards: only that turn's tokens have a
loss. The first update has the answers of 1; later ones sample new answers, with the model alone: an outcome that is
known costs no environment, and a new wording is tried once. Everything is stored under names that follow from the run,
so a killed one goes on as it began.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import batched
from statistics import pstdev

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import EpisodeRunner
from openhands_rl_plugin.core.records import HELD_OUT_SPLITS, TrajectoryFilter
from openhands_rl_plugin.core.types import EpisodeRequest, Message, Node, Trajectory
from openhands_rl_plugin.rollout.alternatives import outcomes
from openhands_rl_plugin.rollout.many import play_requests
from openhands_rl_plugin.rollout.rescoring import rescore, stored_rewards
from openhands_rl_plugin.rollout.strategies.annotations import action_key
from openhands_rl_plugin.training.credit.advantages import EQUAL
from openhands_rl_plugin.training.loop.decisions import Decision, DecisionValues, SingleAnswers, decisions_of
from openhands_rl_plugin.training.loop.plan import LoopPlan
from openhands_rl_plugin.training.loop.stages import LoopParts, iteration_name

EPISODES_PER_OUTCOME = 4
"""One reward of 0 or 1 says little of an action, and its value is used in several updates."""
LEAST_SPREAD = 0.05
"""Of the values in a group: less is the noise of a mean of so few rewards of 0 or 1."""
TRIES = 2
"""States that are looked at for each pivot that is wanted."""

Advance = Callable[[str, int, int], None]
"""Told an activity, and how much of it is done."""


@dataclass(frozen=True)
class PivotGroups:
    """The answers to the pivots of an update, and the value of each; ``metrics`` count all that was looked at."""

    answers: tuple[Trajectory, ...]
    values: tuple[float | None, ...]
    metrics: dict[str, float]


@dataclass
class _Iteration:
    """What is known of the decisions of an iteration, after so many ``updates``."""

    values: DecisionValues = field(default_factory=DecisionValues)
    pivots: list[Decision] = field(default_factory=list)
    updates: int = 0


class Pivots:
    """Finds the pivots of a run's iterations, and gives the groups of each update. ``advance`` is told what is done."""

    def __init__(self, plan: LoopPlan, parts: LoopParts) -> None:
        self._plan = plan
        self._parts = parts
        self._iterations: dict[int, _Iteration] = {}

    async def groups(self, iteration: int, update: int, served: str, advance: Advance) -> PivotGroups:
        """The groups of an update, sampled from the ``served`` model as far as they are not stored.

        Raises ``StorageError``, and ``ConfigError`` where the environment cannot fork.
        """
        known = self._iterations.get(iteration)
        if known is None or known.updates != update:
            known = self._iterations[iteration] = _Iteration()
            for earlier in range(update):  # of a killed process: all of it is stored
                await self._update(known, iteration, earlier, served, advance)
        return await self._update(known, iteration, update, served, advance)

    async def _update(
        self, known: _Iteration, iteration: int, update: int, served: str, advance: Advance
    ) -> PivotGroups:
        group = _Update(self._plan, self._parts, pivot_stage(iteration, update), served, known.values, advance)
        looked_at = known.pivots
        if update == 0:
            looked_at = await self._candidates(iteration)
            for some in batched(looked_at[: TRIES * self._plan.pivots], max(1, self._plan.pivots)):
                spread = await group.look_at(some)
                known.pivots += [each for each, wide in zip(some, spread, strict=True) if wide]
                if len(known.pivots) >= self._plan.pivots:
                    break
            known.pivots = known.pivots[: self._plan.pivots]
        else:
            await group.look_at(known.pivots)
        known.updates = update + 1
        return group.groups(known.pivots)

    async def _candidates(self, iteration: int) -> list[Decision]:
        """The states of the iteration's episodes in the order in which they are looked at."""
        run_id = f"{self._plan.run_id}/{iteration_name(iteration)}"
        where = TrajectoryFilter(run_id=run_id, failed=False)
        played = [each async for each, _ in self._parts.storage.find(where)]
        played = sorted((each for each in played if each.task.split not in HELD_OUT_SPLITS), key=lambda each: each.id)
        rewards = await stored_rewards(self._parts.storage, self._parts.objective, played)
        outcome = await stored_rewards(self._parts.storage, self._parts.reward, played)
        by_group: defaultdict[str, list[float]] = defaultdict(list)
        judged: list[tuple[Trajectory, float, bool]] = []
        for each, reward, result in zip(played, rewards, outcome, strict=True):
            if reward is not None:
                judged.append((each, reward, result is not None and self._plan.succeeded(each, result)))
                by_group[each.task.id].append(reward)
        found = decisions_of(judged)
        random.Random(f"{self._plan.seed}/{run_id}").shuffle(found)
        flat = {task for task, earned in by_group.items() if max(earned) - min(earned) <= EQUAL}
        return sorted(found, key=lambda each: each.task.id in flat)


class _Update:
    """The answers of one update, and what they are worth."""

    def __init__(
        self,
        plan: LoopPlan,
        parts: LoopParts,
        stage: str,
        served: str,
        values: DecisionValues,
        advance: Advance,
    ) -> None:
        if parts.engine is None:
            raise ConfigError("a loop with pivots needs the model server of [rl.serving]: set [rl.loop] pivots = 0")
        self._plan = plan
        self._parts = parts
        self._engine = parts.engine
        self._run_id = f"{plan.run_id}/{stage}"
        self._served = served
        self._values = values
        self._advance = advance
        self._answers: dict[str, list[Trajectory]] = {}
        self._tried = self._episodes = 0

    async def look_at(self, decisions: Sequence[Decision]) -> list[bool]:
        """Sample a group for each, value its answers; whether the values of each group differ."""
        by_group = {each.group(self._run_id): each for each in decisions}
        requests = [
            self._request(each, self._run_id, sample, each.path).model_copy(update={"sampling": each.sampling})
            for each in decisions
            for sample in range(self._plan.samples_per_task)
        ]
        runner = SingleAnswers(self._engine, self._plan.base_model, by_group)
        for answer in await self._play("answers", requests, runner):
            self._answers.setdefault(by_group[answer.group_id].name, []).append(answer)
        await self._try(decisions)
        await self._value(decisions)
        return [self._spread(each) >= LEAST_SPREAD for each in decisions]

    def groups(self, pivots: Sequence[Decision]) -> PivotGroups:
        """The answers to the pivots, and the counts of all that was looked at."""
        answers = [answer for each in pivots for answer in self._answers[each.name]]
        values = {answer.id: self._valued(each.name, answer) for each in pivots for answer in self._answers[each.name]}
        everything = [(name, answer) for name, group in self._answers.items() for answer in group]
        said = {(name, action_key(answer.messages()[-1])) for name, answer in everything if answer.failure is None}
        known = {(at[0], self._values.outcomes[at]) for at in said if at in self._values.outcomes}
        metrics = {
            "decisions": len(self._answers),
            "pivots": len(pivots),
            "answers": len(everything),
            "answers_failed": sum(answer.failure is not None for _, answer in everything),
            "answers_unvalued": sum(self._valued(*at) is None for at in everything),
            "wordings": len(said),
            "outcomes": len(known),
            "answers_tried": self._tried,
            "valuing_episodes": self._episodes,
        }
        counts = {name: float(count) for name, count in metrics.items()}
        return PivotGroups(tuple(answers), tuple(values[answer.id] for answer in answers), counts)

    async def _try(self, decisions: Sequence[Decision]) -> None:
        """Try new wordings in forks, one episode for each decision, which goes on with the first of them."""
        new: dict[str, tuple[Decision, list[Node]]] = {}
        for each in decisions:
            said = self._said(each)
            if any(self._values.outcome(each.name, message) is None for message in said):
                said += [message for message, _ in each.taken]
            wordings: dict[tuple[object, ...], Message] = {}
            for message in said:
                wordings.setdefault(action_key(message), message)
            unknown = [each.other(one) for one in wordings.values() if self._values.outcome(each.name, one) is None]
            if unknown:
                new[each.name] = (each, unknown)
        run_id = f"{self._run_id}/tried"
        requests = [
            self._request(each, run_id, 0, each.path).model_copy(update={"candidates": tuple(unknown)})
            for each, unknown in new.values()
        ]
        played = await self._play("answers tried", requests, self._parts.runner)
        for (each, unknown), trajectory in zip(new.values(), played, strict=True):
            fresh = not any(self._values.outcome(each.name, message) for message, _ in each.taken)
            for message, outcome, ended in outcomes(trajectory):
                self._values.tried(each.name, message, outcome, ended=ended)
            if fresh:
                for message, reward in each.taken:
                    self._values.earned(each.name, message, reward)
            self._tried += len(unknown)
        for (each, _), trajectory, reward in zip(new.values(), played, await self._judged(run_id, played), strict=True):
            first = next((message for message, *_ in outcomes(trajectory)), None)
            if reward is not None and first is not None:
                self._values.earned(each.name, first, reward)

    async def _value(self, decisions: Sequence[Decision]) -> None:
        """Play episodes that begin with an answer of each outcome of which too little is known."""
        run_id = f"{self._run_id}/valued"
        begun: list[tuple[Decision, Message]] = []
        requests: list[EpisodeRequest] = []
        for each in decisions:
            said = self._said(each)
            first = {
                found: one for one in reversed(said) if (found := self._values.outcome(each.name, one)) is not None
            }
            for outcome, message in sorted(first.items()):
                missing = self._values.missing(each.name, outcome, EPISODES_PER_OUTCOME)
                prefix = (*each.path, each.other(message))
                asked = [self._request(each, run_id, sample, prefix, f"/{outcome}") for sample in range(missing)]
                requests += asked
                begun += [(each, message)] * missing
        played = await self._play("answers valued", requests, self._parts.runner)
        rewards = await self._judged(run_id, played)
        for (each, message), reward in zip(begun, rewards, strict=True):
            if reward is not None:
                self._values.earned(each.name, message, reward)

    async def _play(
        self, activity: str, requests: Sequence[EpisodeRequest], runner: EpisodeRunner
    ) -> tuple[Trajectory, ...]:
        done = 0

        def count(_: Trajectory) -> None:
            nonlocal done
            done += 1
            self._advance(activity, done, len(requests))

        played = await play_requests(
            requests, runner, self._parts.storage, count, concurrency=self._plan.concurrency, plain_starts=False
        )
        self._episodes += len(played) if runner is self._parts.runner else 0
        return played

    def _request(
        self, decision: Decision, run_id: str, sample: int, prefix: tuple[Node, ...], outcome: str = ""
    ) -> EpisodeRequest:
        group_id = f"{decision.group(run_id)}{outcome}"
        return EpisodeRequest(
            task=decision.task,
            run_id=run_id,
            group_id=group_id,
            sample=sample,
            seed=random.Random(f"{self._plan.seed}/{group_id}/{sample}").randrange(2**31),
            served_model=self._served,
            sampling=self._plan.sampling,
            prefix=prefix,
        )

    async def _judged(self, run_id: str, played: Sequence[Trajectory]) -> list[float | None]:
        await rescore(self._parts.storage, self._parts.objective, TrajectoryFilter(run_id=run_id))
        return await stored_rewards(self._parts.storage, self._parts.objective, played)

    def _said(self, decision: Decision) -> list[Message]:
        """The answers of the group, as far as they did not fail."""
        return [answer.messages()[-1] for answer in self._answers[decision.name] if answer.failure is None]

    def _valued(self, name: str, answer: Trajectory) -> float | None:
        return None if answer.failure is not None else self._values.value(name, answer.messages()[-1])

    def _spread(self, decision: Decision) -> float:
        values = [self._valued(decision.name, answer) for answer in self._answers[decision.name]]
        known = [value for value in values if value is not None]
        return pstdev(known) if known else 0.0


def pivot_stage(iteration: int, update: int) -> str:
    """``2, 0`` -> ``"pivots-002-0"``."""
    return f"pivots-{iteration:03d}-{update}"

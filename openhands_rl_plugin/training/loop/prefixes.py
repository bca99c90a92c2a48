"""Which prefix a group of a loop begins with: ``[rl.loop] prefix_sampling``.

A group whose rewards are all equal has no signal. Prefix sampling (Zhu et al. 2026, arXiv 2605.05112) begins the next
group of such a task elsewhere: of a task that nobody solved from a part of a success, of one that all solved from a
part of a failure. How far is one number for each task, the ``share``: positive of a success, negative of a failure, 0
for a plain start. After a group that

- nobody solved it grows towards 1: ``(share + 1) / 2`` from 0 on, ``share / 2`` below 0;
- all solved it falls towards -1 in the same way;
- was solved by some it stays.

So a task that the policy learns comes back to a plain start, as in a reverse curriculum (Florensa et al. 2017, arXiv
1707.05300). The cut is after that share of the source's turns, at least one and never the last. The source is drawn
from the episodes of that task with the seed of the run and the group's name: those of this run if there are any,
others of the storage (demonstrations, earlier runs, imports) if not. Everything follows from what is stored, and the
name of a group says its prefix; so a killed run goes on as it began.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from openhands_rl_plugin.core.judgements import asked_in_common
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import HELD_OUT_SPLITS, TrajectoryFilter, TrajectoryOrder, prefix_of
from openhands_rl_plugin.core.types import Node, Task, Trajectory
from openhands_rl_plugin.rollout.prefix import beginning_of, can_begin_others, has_differed, prefix_nodes
from openhands_rl_plugin.rollout.rescoring import rescore, stored_rewards
from openhands_rl_plugin.training.credit.advantages import EQUAL
from openhands_rl_plugin.training.loop.plan import LoopPlan

_NEWEST = 128
"""The episodes of a task that are looked at: as many as 16 groups of 8 have."""


class _Judged(NamedTuple):
    trajectory: Trajectory
    solved: bool
    objective: float | None


class PrefixSampler:
    """Chooses the prefixes of a run's groups from its storage.

    ``reward`` says what is a success, ``objective`` what is trained on.
    """

    def __init__(self, plan: LoopPlan, storage: TrajectoryStorage, reward: Reward, objective: Reward) -> None:
        self._plan = plan
        self._storage = storage
        self._reward = reward
        self._objective = objective

    async def choose(self, task: Task, run_id: str, group_id: str) -> tuple[Node, ...]:
        """What the group of that name begins with; empty for a plain start. Raises ``StorageError``."""
        if self._plan.prefix_sampling == "none":
            return ()
        begun = await self._begun(task, run_id, group_id)
        found = [each async for each, _ in self._storage.find(self._of(task))]
        asked = asked_in_common(task)
        episodes = [e for e in found if asked_in_common(e.task) == asked and e.task.split not in HELD_OUT_SPLITS]
        by_id = {each.id: each for each in episodes}
        if begun is not None and begun[0] in by_id:
            source, turns = by_id[begun[0]], begun[1]
            return prefix_nodes(source, turns, good=any(each.solved for each in await self._judged([source])))
        if begun is not None and not begun[0]:
            return ()
        earlier = [each for each in episodes if self._is_own(each) and not _belongs(each, group_id)]
        share = next_share(await self._judged(earlier))
        return await self._draw(episodes, share, group_id) if share else ()

    async def differed(self, run_id: str, group_ids: Sequence[str]) -> int:
        """How many episodes of these groups (named without a prefix) had a plain start after a replay that differed."""
        found = self._storage.find(TrajectoryFilter(run_id=run_id, failed=True))
        return sum([has_differed(each) and any(_belongs(each, name) for name in group_ids) async for each, _ in found])

    async def _begun(self, task: Task, run_id: str, group_id: str) -> tuple[str, int] | None:
        """Source and turns of what a killed process began, an empty source for a plain start, ``None`` for nothing."""
        where = TrajectoryFilter(run_id=run_id, task_id=task.id, finished=None)
        names = {each.group_id async for each in self._storage.summaries(where)}
        prefixes = (beginning_of(name, group_id) for name in sorted(names))
        return next((each for each in prefixes if each is not None), ("", 0) if group_id in names else None)

    async def _draw(self, episodes: Sequence[Trajectory], share: float, group_id: str) -> tuple[Node, ...]:
        judged = await self._judged([each for each in episodes if can_begin_others(each)])
        fitting = [each.trajectory for each in judged if each.solved is (share > 0)]
        candidates = [each for each in fitting if self._is_own(each)] or fitting
        if not candidates:
            return ()
        order = sorted(candidates, key=lambda each: each.id)
        source = random.Random(f"{self._plan.seed}/{group_id}").choice(order)
        turns = cut_after(share, len(source.acted()))
        return prefix_nodes(source, turns, good=share > 0) if turns else ()

    async def _judged(self, episodes: Sequence[Trajectory]) -> list[_Judged]:
        """Those with a reward. Rewards of this run are stored; of others only the outcome is asked for."""
        where = TrajectoryFilter(ids=tuple(each.id for each in episodes))
        await rescore(self._storage, self._reward, where)
        rewards = await stored_rewards(self._storage, self._reward, episodes)
        objectives = await stored_rewards(self._storage, self._objective, episodes)
        return [
            _Judged(each, self._plan.succeeded(each, reward), objective)
            for each, reward, objective in zip(episodes, rewards, objectives, strict=True)
            if reward is not None
        ]

    def _of(self, task: Task) -> TrajectoryFilter:
        return TrajectoryFilter(
            task_id=task.id,
            environment=task.environment,
            failed=False,
            sort=TrajectoryOrder.FINISHED,
            descending=True,
            limit=_NEWEST,
        )

    def _is_own(self, trajectory: Trajectory) -> bool:
        """Whether an iteration of this run rolled it out."""
        run, _, stage = trajectory.run_id.rpartition("/")
        return run == self._plan.run_id and (stage == "rollouts" or stage.startswith("iteration-"))


def next_share(earlier: Sequence[_Judged]) -> float:
    """The share of the next prefix after the last group of a task."""
    sizes = Counter(each.trajectory.group_id for each in earlier)
    whole = [each for each in earlier if sizes[each.trajectory.group_id] > 1]
    if not whole:
        return 0.0  # a single attempt cannot have a signal
    last = max(whole, key=lambda each: each.trajectory.times.finished).trajectory.group_id
    group = [each for each in whole if each.trajectory.group_id == last]
    note = prefix_of(group[0].trajectory)
    share = note.share if note is not None else 0.0
    objectives = [each.objective for each in group if each.objective is not None]
    solved = {each.solved for each in group}
    if len(solved) > 1 or (objectives and max(objectives) - min(objectives) > EQUAL):
        return share
    towards = -1 if solved == {True} else 1
    return share / 2 if share * towards < 0 else (share + towards) / 2


def cut_after(share: float, turns: int) -> int:
    """How many of the ``turns`` of a source are replayed; 0 is a plain start. A half is rounded towards it."""
    return min(turns - 1, math.ceil(abs(share) * turns - 0.5))


def _belongs(trajectory: Trajectory, group_id: str) -> bool:
    return trajectory.group_id == group_id or beginning_of(trajectory.group_id, group_id) is not None

"""``/api/compare``: two episodes turn by turn, or two policies or runs, task by task."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.config.success import success_rule
from openhands_rl_plugin.contrib.studio.replies import columns, number, reply
from openhands_rl_plugin.contrib.studio.sources import EpisodeShelf, Opened, StudioSources
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectorySummary
from openhands_rl_plugin.core.statistics import paired_difference
from openhands_rl_plugin.core.transcript import transcript_nodes
from openhands_rl_plugin.core.types import JsonObject, Trajectory
from openhands_rl_plugin.evals.report.figures import MCNEMAR, PERMUTATION, mcnemar, sign_permutation

_RESAMPLES = 2000
_MOST_TASKS = 2000
_MOST_EPISODES = 50_000

_Tasks = dict[tuple[str, str], list[tuple[str, float]]]
"""(environment, task) -> the ids of its episodes, each with whether it succeeded."""


class CompareResource:
    """``?a=&b=``: ids of episodes; with ``of=sets`` two versions of adapters, such as ``shop@7``, or two runs."""

    def __init__(self, sources: StudioSources, shelf: EpisodeShelf) -> None:
        self._sources = sources
        self._shelf = shelf

    async def get(self, request: Request) -> Response:
        """The comparison of either kind. Raises ``HTTPException`` 400 and 404."""
        one, other = (request.query_params.get(name, "") for name in ("a", "b"))
        if not one or not other:
            raise HTTPException(400, "give both sides: a= and b=")
        if request.query_params.get("of") == "sets":
            storage = self._sources.store(request)
            return reply(request, tasks_compared(await self._tasks(storage, one), await self._tasks(storage, other)))
        first, second = await self._shelf.open(request, one), await self._shelf.open(request, other)
        return reply(request, episodes_compared(first, second))

    async def _tasks(self, storage: TrajectoryStorage, text: str) -> _Tasks:
        adapter, at, version = text.rpartition("@")
        named = {"adapter": adapter, "policy_version": int(version)} if at and version.isdecimal() else {"run_id": text}
        where = TrajectoryFilter(failed=False, limit=_MOST_EPISODES).model_copy(update=named)
        found: _Tasks = defaultdict(list)
        async for each in storage.summaries(where):
            if (success := _succeeded(each)) is not None:
                found[each.environment, each.task_id].append((each.id, success))
        return found


def episodes_compared(first: Opened, second: Opened) -> JsonObject:
    """Rows of two nodes that stand beside each other; ``same`` where they say the same."""
    sides = [transcript_nodes(each.trajectory) for each in (first, second)]
    said = [[_said(each.trajectory, at) for at in side] for each, side in zip((first, second), sides, strict=True)]
    rows: dict[str, list[JsonValue]] = {"a": [], "b": [], "same": []}
    for kind, low, high, other_low, other_high in SequenceMatcher(a=said[0], b=said[1], autojunk=False).get_opcodes():
        for at in range(max(high - low, other_high - other_low)):
            rows["a"].append(sides[0][low + at] if low + at < high else None)
            rows["b"].append(sides[1][other_low + at] if other_low + at < other_high else None)
            rows["same"].append(1 if kind == "equal" else None)
    task, other = first.trajectory.task, second.trajectory.task
    return {
        "a": first.trajectory.id,
        "b": second.trajectory.id,
        "same_task": (task.environment, task.id) == (other.environment, other.id),
        "first_difference": next((at for at, same in enumerate(rows["same"]) if same is None), None),
        "rows": dict(columns(rows)),
    }


def _said(trajectory: Trajectory, at: int) -> str:
    message = trajectory.nodes[at].message
    return f"{message.role}\0{message.content}\0{[(call.name, call.arguments) for call in message.tool_calls]}"


def _succeeded(summary: TrajectorySummary) -> float | None:
    reward = summary.judged
    if reward is None or not math.isfinite(reward):
        return None
    return float(success_rule(summary.environment).holds(reward, summary.stop))


def tasks_compared(first: _Tasks, second: _Tasks) -> JsonObject:
    """Success over the tasks that both have; the p-value as in ``openhands-rl compare``."""
    shared = sorted(first.keys() & second.keys())
    rates = [[_mean(side[task]) for task in shared] for side in (first, second)]
    differences = [after - before for before, after in zip(*rates, strict=True)]
    gained, lost = sum(each > 1e-12 for each in differences), sum(each < -1e-12 for each in differences)
    single = all(len(side[task]) == 1 for side in (first, second) for task in shared)
    body: JsonObject = {
        "tasks": len(shared),
        "only_a": len(first) - len(shared),
        "only_b": len(second) - len(shared),
        "gained": gained,
        "lost": lost,
    }
    if not shared:
        return body | {"rows": {}}
    estimate = paired_difference(*rates, resamples=_RESAMPLES)
    # What changed comes first: that is what is looked at.
    order = sorted(range(len(shared)), key=lambda at: (-abs(differences[at]), shared[at]))[:_MOST_TASKS]
    rows: dict[str, list[JsonValue]] = {
        "environment": [shared[at][0] for at in order],
        "task": [shared[at][1] for at in order],
        "a": [rates[0][at] for at in order],
        "b": [rates[1][at] for at in order],
        "a_id": [_shown(first, shared[at]) for at in order],
        "b_id": [_shown(second, shared[at]) for at in order],
    }
    return body | {
        "rate_a": number(math.fsum(rates[0]) / len(shared)),
        "rate_b": number(math.fsum(rates[1]) / len(shared)),
        "difference": {name: number(value) for name, value in estimate.model_dump().items()},
        "p": mcnemar(gained, lost) if single else sign_permutation(differences),
        "test": MCNEMAR if single else PERMUTATION,
        "rows": dict(columns(rows)),
    }


def _mean(attempts: Sequence[tuple[str, float]]) -> float:
    return math.fsum(success for _, success in attempts) / len(attempts)


def _shown(side: Mapping[tuple[str, str], Sequence[tuple[str, float]]], task: tuple[str, str]) -> str:
    return side[task][0][0]

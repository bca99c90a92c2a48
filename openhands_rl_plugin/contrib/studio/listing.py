"""``/api/episodes``, ``/api/facets``, ``/api/compare`` and ``/api/labels``: lists, comparisons, and what people say."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Self

from pydantic import Field, JsonValue, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import columns, number, reply, whole
from openhands_rl_plugin.contrib.studio.sources import EpisodeShelf, Opened, StudioSources, read_episode
from openhands_rl_plugin.core.errors import ConfigError, unknown_name
from openhands_rl_plugin.core.judgements import ALIKE, OPINIONS, opinions_of, standing, verdict_word
from openhands_rl_plugin.core.messages import transcript_nodes
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter, TrajectoryOrder, TrajectorySummary
from openhands_rl_plugin.core.types import Bounded, Frozen, JsonObject, Trajectory
from openhands_rl_plugin.rollout.scoring import add_label, check_judged, withdraw

MOST_ROWS = 1000
_ROWS = 100
_VALUES = 20
_BINS = 40
_MOST_COUNTED = 20_000
_LONGEST = 10_000

_FIELDS: Mapping[str, str] = {
    **{name: f"{name}_id" for name in ("run", "group", "task")},
    **{name: name for name in ("environment", "split", "strategy", "adapter", "stop", "contains")},
    "version": "policy_version",
    "failure": "failure_kind",
    "min_reward": "reward_at_least",
    "max_reward": "reward_at_most",
}
"""Parameter of a request -> the field of ``TrajectoryFilter``."""
_FACETS = ("stop", "failure", "adapter", "version", "task", "run", "split", "strategy", "environment")


def filter_of(request: Request) -> TrajectoryFilter:
    """The filter that the parameters give, of finished and unfinished episodes. Raises ``ValidationError``."""
    given = {field: value for name, field in _FIELDS.items() if (value := request.query_params.get(name))}
    return TrajectoryFilter.model_validate({"finished": None, **given})


class ListResource:
    """The episodes of a store that a filter finds, and how two of them differ."""

    def __init__(self, sources: StudioSources, shelf: EpisodeShelf) -> None:
        self._sources = sources
        self._shelf = shelf

    async def page(self, request: Request) -> Response:
        """``revision, total, offset, rows``. Raises ``HTTPException`` 400."""
        storage = self._sources.store(request)
        sort, descending = _order(request)
        limit = whole(request, "limit", _ROWS, least=1, most=MOST_ROWS)
        offset = whole(request, "offset", 0, most=2**53)
        revision = await storage.revision()
        where = filter_of(request)
        if request.query_params.get("unlabelled"):
            ids = [each.id async for each in storage.summaries(where)]
            known = {label.trajectory_id for label in standing(await storage.labels(ids))}
            where = where.model_copy(update={"ids": tuple(each for each in ids if each not in known)})
        page = {"sort": sort, "descending": descending, "limit": limit, "offset": offset}
        where = where.model_copy(update=page)
        total = await storage.count(where)
        found = [each async for each in storage.summaries(where)]
        ids = [each.id for each in found]
        labels, opinions = await storage.labels(ids), await opinions_of(storage, ids)
        body: JsonObject = {
            "revision": revision,
            "total": total,
            "offset": offset,
            "rows": rows_of(found, labels, opinions),
        }
        return reply(request, body, revision=f"{revision} {request.url.query}")

    async def facets(self, request: Request) -> Response:
        """``facets: {NAME: [{value, count}]}``, ``rewards``, of the newest episodes."""
        newest = {"descending": True, "limit": _MOST_COUNTED}
        where = filter_of(request).model_copy(update=newest)
        found = [each async for each in self._sources.store(request).summaries(where)]
        facets: JsonObject = {}
        for name in _FACETS:
            counts = Counter(str(value) for each in found if (value := _value(each, name)) not in (None, ""))
            facets[name] = [{"value": value, "count": count} for value, count in counts.most_common(_VALUES)]
        return reply(request, {"facets": facets, "rewards": _histogram([each.judged for each in found])})

    async def compared(self, request: Request) -> Response:
        """``?a=&b=``: ids of episodes. Raises ``HTTPException`` 404."""
        one, other = (request.query_params.get(name, "") for name in ("a", "b"))
        first, second = await self._shelf.open(request, one), await self._shelf.open(request, other)
        return reply(request, episodes_compared(first, second))


def _histogram(rewards: Sequence[float | None]) -> JsonObject:
    """Counts in bins of one width between ``low`` and ``high``; ``unknown`` have no reward."""
    known = [reward for reward in rewards if reward is not None and reward == reward]
    low, high = min(known, default=None), max(known, default=None)
    counts: list[JsonValue] = []
    if low is not None and high is not None:
        width = (high - low) / _BINS or 1.0
        bins = Counter(min(int((reward - low) / width), _BINS - 1) for reward in known)
        counts = [bins[at] for at in range(_BINS)]
    return {"low": low, "high": high, "counts": counts, "unknown": len(rewards) - len(known)}


def _value(summary: TrajectorySummary, name: str) -> object:
    match name:
        case "adapter":
            return summary.policy.adapter
        case "version":
            return summary.policy.version
        case "failure":
            return summary.failure and summary.failure.value
        case _:
            return getattr(summary, _FIELDS[name])


def _order(request: Request) -> tuple[TrajectoryOrder, bool]:
    """``?sort=-tokens``, by default the newest first."""
    order = request.query_params.get("sort") or "-stored"
    name = order.removeprefix("-")
    if name not in list(TrajectoryOrder):
        raise HTTPException(400, unknown_name("order", name[:80], [each.value for each in TrajectoryOrder]))
    return TrajectoryOrder(name), order != name


def rows_of(
    found: Sequence[TrajectorySummary], labels: Sequence[Label], opinions: Mapping[str, Mapping[str, float]]
) -> JsonObject:
    """Summaries by columns; ``labels``: those that hold, by kind or as ``good`` and ``bad``; ``opinions``: by id."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for label in standing(labels):
        for about in {label.trajectory_id, label.other} - {None}:
            kinds[str(about)].append(verdict_word(label) or label.kind.value)
    same = ("id", "environment", "split", "strategy", "nodes", "turns")
    rows = {
        **{name: [getattr(each, name) for each in found] for name in same},
        **{name: [getattr(each, f"{name}_id") for each in found] for name in ("run", "group", "task")},
        **{name: [number(opinions.get(each.id, {}).get(name)) for each in found] for name in OPINIONS},
        "model": [each.policy.base_model for each in found],
        "adapter": [each.policy.adapter for each in found],
        "version": [each.policy.version for each in found],
        "stop": [each.stop.value for each in found],
        "failed": [None if each.failure is None else each.failure.value for each in found],
        "reward": [number(each.reward) for each in found],
        "return": [number(each.episode_return) for each in found],
        "tokens": [each.usage.prompt_tokens + each.usage.completion_tokens for each in found],
        "seconds": [round(each.times.finished - each.times.started, 3) for each in found],
        "started": [each.times.started for each in found],
        "finished": [each.times.finished for each in found],
        "labels": [kinds.get(each.id) for each in found],
    }
    return columns(rows)


def episodes_compared(first: Opened, second: Opened) -> JsonObject:
    """Rows of two aligned nodes; ``same``: whether their contents are equal."""
    sides = [transcript_nodes(each.trajectory) for each in (first, second)]
    both = zip((first, second), sides, strict=True)
    contents = [[_content(each.trajectory, at) for at in side] for each, side in both]
    rows: dict[str, list[int | None]] = {"a": [], "b": [], "same": []}
    matcher = SequenceMatcher(a=contents[0], b=contents[1], autojunk=False)
    for kind, low, high, other_low, other_high in matcher.get_opcodes():
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
        "rows": columns(rows),
    }


def _content(trajectory: Trajectory, at: int) -> str:
    message = trajectory.nodes[at].message
    return f"{message.role}\0{message.content}\0{[(call.name, call.arguments) for call in message.tool_calls]}"


class LabelRequest(Frozen):
    """Body of a request to label. ``withdraws``: the id of a label of ``episode`` to withdraw, without other fields."""

    episode: str = Field(min_length=1, max_length=1000)
    kind: LabelKind | None = None
    value: Bounded | None = None
    text: str = Field(default="", max_length=_LONGEST)
    node: int | None = Field(default=None, ge=0)
    tokens: tuple[int, int] | None = None
    other: str | None = Field(default=None, max_length=1000)
    withdraws: str | None = Field(default=None, max_length=200)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.withdraws is not None:
            return self
        if self.kind is None:
            raise ValueError("kind is missing: verdict, preference, comment or tag")
        if self.kind is LabelKind.VERDICT and self.value is None:
            raise ValueError("a verdict needs a value: 1 solved, 0 not, or any number")
        if self.kind is LabelKind.PREFERENCE and (
            self.value not in (0.0, ALIKE, 1.0) or self.other in (None, self.episode)
        ):
            raise ValueError(
                "a preference needs another episode, and as its value 1 (better), 0 (worse) or 0.5 (alike)"
            )
        if self.kind in (LabelKind.COMMENT, LabelKind.TAG) and not self.text.strip():
            raise ValueError(f"a {self.kind.value} needs a text")
        if self.tokens is not None and (self.node is None or not 0 <= self.tokens[0] < self.tokens[1]):
            raise ValueError("tokens are a range [first, end) of a node's")
        return self


class LabelResource:
    """The labels of a store."""

    def __init__(self, sources: StudioSources, author: str) -> None:
        self._sources = sources
        self._author = author

    async def post(self, request: Request) -> Response:
        """Append one; 201 with it and those of its episode that hold. Raises ``HTTPException`` 400 and 404."""
        asked = LabelRequest.model_validate_json(await request.body())
        storage = await self._sources.holding(request, asked.episode)
        if asked.withdraws is not None:
            found = standing(await storage.labels([asked.episode]))
            label = next((each for each in found if each.id == asked.withdraws), None)
            if label is None:
                raise HTTPException(404, "the episode has no label of that id that holds")
            made = await withdraw(storage, label, author=self._author)
        else:
            await self._check(storage, asked)
            fields = asked.model_dump(exclude={"episode", "kind", "withdraws"})
            assert asked.kind is not None, "it was validated"
            made = await add_label(storage, asked.episode, asked.kind, author=self._author, **fields)
        holding = standing(await storage.labels([asked.episode]))
        body = {"label": made.model_dump(mode="json"), "labels": [each.model_dump(mode="json") for each in holding]}
        response = reply(request, body)
        response.status_code = 201
        return response

    @staticmethod
    async def _check(storage: TrajectoryStorage, asked: LabelRequest) -> None:
        trajectory = (await read_episode(storage, asked.episode)).trajectory
        if asked.node is not None:
            if asked.node >= len(trajectory.nodes):
                raise HTTPException(
                    400, f"the episode has {len(trajectory.nodes)} nodes, so there is no node {asked.node}"
                )
            tokens = trajectory.nodes[asked.node].tokens
            if asked.tokens is not None and (tokens is None or asked.tokens[1] > len(tokens.sampled_ids)):
                raise HTTPException(400, "the node has not so many sampled tokens")
        if asked.kind in (LabelKind.VERDICT, LabelKind.PREFERENCE):
            compared = [asked.other or ""] if asked.kind is LabelKind.PREFERENCE else []
            try:
                check_judged(trajectory, *[(await read_episode(storage, each)).trajectory for each in compared])
            except ConfigError as error:
                raise HTTPException(400, str(error)) from error

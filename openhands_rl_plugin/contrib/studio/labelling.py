"""``/api/labels``: what people said of episodes, and one more. Nothing else is ever written."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import reply
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.judgements import ALIKE, asked_in_common, labels_of, standing
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter
from openhands_rl_plugin.core.types import Frozen, StopReason, Trajectory
from openhands_rl_plugin.rollout.verdicts import add_label, labelled, withdraw

_LONGEST = 10_000


class LabelRequest(Frozen):
    """What a page sends. ``withdraws``: the id of a label of ``episode`` that holds no more, and nothing else."""

    episode: str = Field(min_length=1, max_length=1000)
    kind: LabelKind | None = None
    value: float | None = Field(default=None, allow_inf_nan=False, ge=-1e9, le=1e9)
    text: str = Field(default="", max_length=_LONGEST)
    node: int | None = Field(default=None, ge=0)
    tokens: tuple[int, int] | None = None
    other: str | None = Field(default=None, max_length=1000)
    withdraws: str | None = Field(default=None, max_length=200)

    @field_validator("kind", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        return LabelKind(value) if value in list(LabelKind) else value

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

    async def get(self, request: Request) -> Response:
        """``labels`` that hold, oldest first; ``?episode=`` those of one."""
        storage, episode = self._sources.store(request), request.query_params.get("episode")
        if episode:
            storage = await self._sources.holding(request, episode)
            found = await labels_of(storage, [episode])
        else:
            every = storage.summaries(TrajectoryFilter(finished=None))
            found = await labels_of(storage, [each.id async for each in every])
        return reply(request, {"labels": [label.model_dump(mode="json") for label in standing(found)]})

    async def post(self, request: Request) -> Response:
        """Append one; 201 with it and those of its episode that hold. Raises ``HTTPException`` 400 and 404."""
        said = LabelRequest.model_validate_json(await request.body())
        storage = await self._sources.holding(request, said.episode)
        labelled(storage)
        if said.withdraws is not None:
            made = await self._withdraw(storage, said.episode, said.withdraws)
        else:
            await self._check(storage, said)
            fields = said.model_dump(exclude={"episode", "kind", "withdraws"})
            assert said.kind is not None, "it was validated"
            made = await add_label(storage, said.episode, said.kind, author=self._author, **fields)
        holding = standing(await labels_of(storage, [said.episode]))
        body = {"label": made.model_dump(mode="json"), "labels": [each.model_dump(mode="json") for each in holding]}
        response = reply(request, body)
        response.status_code = 201
        return response

    async def _withdraw(self, storage: TrajectoryStorage, episode: str, identity: str) -> Label:
        found = standing(await labels_of(storage, [episode]))
        label = next((each for each in found if each.id == identity), None)
        if label is None:
            raise HTTPException(404, "the episode has no label of that id that holds")
        return await withdraw(storage, label, author=self._author)

    async def _check(self, storage: TrajectoryStorage, said: LabelRequest) -> None:
        trajectory = await _episode(storage, said.episode)
        if said.node is not None:
            if said.node >= len(trajectory.nodes):
                raise HTTPException(
                    400, f"the episode has {len(trajectory.nodes)} nodes, so there is no node {said.node}"
                )
            tokens = trajectory.nodes[said.node].tokens
            if said.tokens is not None and (tokens is None or said.tokens[1] > len(tokens.sampled_ids)):
                raise HTTPException(400, "the node has not so many sampled tokens")
        if said.kind in (LabelKind.VERDICT, LabelKind.PREFERENCE):
            _check_counts(trajectory)
        if said.kind is LabelKind.PREFERENCE:
            other = await _episode(storage, said.other or "")
            _check_counts(other)
            if asked_in_common(trajectory.task) != asked_in_common(other.task):
                raise HTTPException(400, "the two are of two tasks: only attempts at one task can be compared")


async def _episode(storage: TrajectoryStorage, identity: str) -> Trajectory:
    async for trajectory, _ in storage.find(TrajectoryFilter(ids=(identity,), finished=None)):
        return trajectory
    raise HTTPException(404, f"the store has no episode {identity[:80]!r}")


def _check_counts(trajectory: Trajectory) -> None:
    if trajectory.stop is StopReason.UNFINISHED:
        raise HTTPException(400, f"{trajectory.id[:80]} has not ended yet: judge it when it has")
    if trajectory.failure is not None:
        raise HTTPException(400, f"{trajectory.id[:80]} failed ({trajectory.failure.kind}), so that it would not count")

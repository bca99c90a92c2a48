"""A session over HTTP that a strategy decides: ``POST /session`` opens it with a task, a strategy and limits.

It is a ``Session`` whose host is a client: nothing is forked, so a strategy compares what the model proposes. What the
client executed, condensed or left out shows in its next prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openhands_rl_plugin.config.build import make_strategy, strategy_spec
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import (
    SIDE,
    EpisodeRequest,
    JsonObject,
    Limits,
    SamplingParams,
    StopReason,
    StrategySpec,
)
from openhands_rl_plugin.rollout.strategies.base import SearchStrategy
from openhands_rl_plugin.session.client_episode import SideRequests
from openhands_rl_plugin.session.conversation import ClientConversation
from openhands_rl_plugin.session.requests import ClientRequest
from openhands_rl_plugin.session.sampled_texts import SampledCalls
from openhands_rl_plugin.session.session import Session
from openhands_rl_plugin.session.token_id_text import Json, dump_object
from openhands_rl_plugin.session.turns import EpisodeOver
from openhands_rl_plugin.session.upstream import Upstream


class OpenRequest(BaseModel):
    """Body of ``POST /session``. ``session``: its name, by default a new one. ``limits``: fields of ``Limits``, the
    others are those of ``[rl]``; so are ``strategy`` and ``sampling`` where they are left out."""

    model_config = ConfigDict(extra="forbid")

    session: str = Field(default="", max_length=200)
    task: str = ""
    strategy: StrategySpec | None = None
    limits: Annotated[JsonObject, Field(default_factory=dict)]
    sampling: SamplingParams = SamplingParams()
    seed: int = Field(default=0, ge=0, lt=2**31)


class SearchedEpisode:
    """One episode of a strategy. ``request`` has its name and run; ``restores``: sampled calls are put back."""

    def __init__(
        self,
        storage: TrajectoryStorage,
        request: EpisodeRequest,
        opened: OpenRequest,
        settings: RLSettings,
        base_model: str,
        *,
        restores: bool,
    ) -> None:
        """Raises ``ConfigError`` for a strategy or limits that do not exist."""
        spec = opened.strategy or strategy_spec(settings)
        try:
            named = {"rollout_strategy": spec.name, "strategy": spec.options}
            settings = RLSettings.model_validate({**settings.model_dump(exclude_unset=True), **named})
            known = settings.limits().model_copy(update={"max_prompt_length": None})
            limits = Limits.model_validate({**known.model_dump(), **opened.limits})
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise ConfigError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
        task = request.task.model_copy(update={"instruction": opened.task, "limits": limits})
        request = request.model_copy(update={"task": task, "sampling": opened.sampling, "seed": opened.seed})
        self._storage = storage
        self._base_model = base_model
        strategy = make_strategy(settings)
        if isinstance(strategy, SearchStrategy):
            strategy.check_world(None)
        self._session = Session(
            request,
            settings,
            strategy=strategy,
            strategy_spec=spec,
            base_model=base_model,
            environment_mode=False,
        )
        self._session.follows = ClientConversation
        self._session.calls = SampledCalls() if restores else None
        self._sides = SideRequests(self._session.tree)
        self._begun = False

    @property
    def nodes(self) -> int:
        """How many messages the episode has."""
        return len(self._session.tree.nodes)

    async def complete(self, call: ClientRequest, model: str, upstream: Upstream) -> Json:
        """The answer of the strategy, which is stored. Raises as ``Session.complete``."""
        session = self._session
        if not self._begun:
            session.base_model = self._base_model or model
            session.keep_in(self._storage, asyncio.get_running_loop())
            self._begun = True
        session.connect(upstream)
        body = {**call.document, "messages": list(call.messages), "model": model}
        body.pop("n", None)
        work = session.aside(body, SIDE, upstream) if self._sides.begins(call) else session.complete(body)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background().loop))
        except EpisodeOver as over:
            session.stop = over.stop
            raise

    async def end(self, stop: StopReason, *, finished: float, evidence: JsonObject) -> str | None:
        """Close the episode and return its id, or ``None`` when nothing was recorded. Raises ``StorageError``."""
        if not self.nodes:
            return None
        self._session.end_here(self._session.stop or stop)
        trajectory = self._session.freeze(evidence=evidence)
        await self._session.end(trajectory)
        return trajectory.id


def events_of(document: Json, *, usage: bool) -> Iterator[bytes]:
    """A chat completion as a stream would have brought it, in whole parts."""
    frame = {name: document.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in document["choices"]:
        said = dict(choice["message"])
        if calls := said.get("tool_calls"):
            said["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        for delta, finish in ((said, None), ({}, choice.get("finish_reason"))):
            part = {"index": choice.get("index", 0), "delta": delta, "finish_reason": finish}
            yield b"data: %s\n\n" % dump_object({**frame, "choices": [part]})
    if usage:
        yield b"data: %s\n\n" % dump_object({**frame, "choices": [], "usage": document.get("usage")})
    yield b"data: [DONE]\n\n"

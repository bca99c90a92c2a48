"""Opens a session over HTTP that a strategy decides: ``POST /session``, with a task, a strategy and limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openhands_rl_plugin.config.build import make_strategy, strategy_spec
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import EpisodeRequest, JsonObject, Limits, SamplingParams, StrategySpec
from openhands_rl_plugin.rollout.strategies.base import SearchStrategy
from openhands_rl_plugin.session.client_sessions import ClientSession
from openhands_rl_plugin.session.wire import Json, dump_object


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


def opened_session(
    storage: TrajectoryStorage,
    request: EpisodeRequest,
    opened: OpenRequest,
    settings: RLSettings,
    base_model: str,
    *,
    restores: bool,
) -> ClientSession:
    """The session that ``opened`` asks for. ``request`` has its name and run; ``restores`` as in ``ClientSession``.

    Raises ``ConfigError`` for a strategy or limits that do not exist.
    """
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
    strategy = make_strategy(settings)
    if isinstance(strategy, SearchStrategy):
        strategy.check_world(None)
    return ClientSession(
        storage, request, settings, base_model, restores=restores, strategy=strategy, strategy_spec=spec
    )


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

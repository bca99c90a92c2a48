"""The model behind a session: a server, or an engine in this process. It takes a request and returns the answer."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from openhands_rl_plugin.config.build import make_engine
from openhands_rl_plugin.config.rl import AUTO, RLSettings
from openhands_rl_plugin.core.errors import EpisodeError, ModelError
from openhands_rl_plugin.core.messages import reasoning_in, sampling_in, to_message, to_wire, usage_to_wire
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.models.engines.client import ALL_FIELDS, HttpUpstream, ServerError
from openhands_rl_plugin.models.engines.extensions import ExtensionTable
from openhands_rl_plugin.models.engines.openai_wire import PROMPT_IDS, SAMPLED_IDS, Json, dump_object


class Upstream(Protocol):
    """A source of answers. ``fields``: the extensions that it may be asked for."""

    fields: tuple[str, ...]
    extensions: ExtensionTable

    async def send(self, body: Json) -> bytes:
        """The body of the answer. Raises ``ServerError``."""
        ...


class EngineUpstream:
    """An ``Upstream`` over an ``LLMEngine``, which is used on the loop of ``background``."""

    fields = ()

    def __init__(self, engine: LLMEngine) -> None:
        self.extensions = ExtensionTable()
        self._engine = engine

    async def send(self, body: Json) -> bytes:
        """As ``Upstream.send``."""
        messages, tools = [to_message(message) for message in body["messages"]], body.get("tools") or ()
        try:
            [completion] = await self._engine.complete(messages, tools=tools, n=1, sampling=sampling_in(body))
        except EpisodeError as error:
            raise ServerError(400 if isinstance(error, ModelError) else 503, str(error)) from error
        said, tokens = to_wire(completion.message), completion.tokens
        if thought := reasoning_in(completion.metadata):
            said["reasoning_content"] = thought
        choice: dict[str, Any] = {"index": 0, "finish_reason": completion.finish_reason or "stop", "message": said}
        answer: dict[str, Any] = {
            "id": f"rl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "model": completion.policy.served_name if completion.policy else body["model"],
            "choices": [choice],
            "usage": usage_to_wire(completion.usage),
        }
        if tokens is not None:
            answer[PROMPT_IDS], choice[SAMPLED_IDS] = list(tokens.prompt_ids), list(tokens.sampled_ids)
            choice["logprobs"] = {"content": [{"token": "", "logprob": each} for each in tokens.logprobs]}
        return dump_object(answer)


_given: list[LLMEngine] = []
_made: dict[str, LLMEngine] = {}
_lock = threading.Lock()


@contextmanager
def sampling_from(engine: LLMEngine) -> Iterator[None]:
    """Until the end of the block, V1's episodes that begin in this process are sampled from ``engine``: a
    ``TransformersEngine``, say, for a model in this process. It is used on the loop of ``core.concurrency``."""
    _given.append(engine)
    try:
        yield
    finally:
        _given.remove(engine)


def upstream_in(settings: RLSettings, *, model: str, base_model: str) -> Upstream | None:
    """What samples in the place of the host's own model, for the served name ``model``; ``None`` for nothing.

    Engines are shared by the sessions of a process. Raises ``ConfigError``.
    """
    serving, url = settings.serving, settings.serving.base_url
    if _given:
        return EngineUpstream(_given[-1])
    if url and settings.engine in (AUTO, "openai") and not settings.engine_options:
        return HttpUpstream(url, serving.api_key(), serving.request_timeout, fields=ALL_FIELDS)
    if settings.engine == AUTO:
        return None
    key = "\0".join((model, base_model, settings.engine, str(settings.engine_options), serving.model_dump_json()))
    with _lock:
        if key not in _made:
            _made[key] = make_engine(settings, model=model, base_model=base_model, base_url=url)
        return EngineUpstream(_made[key])

"""Assembles a streamed chat completion: yields its text as it arrives, and returns the complete response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from openhands_rl_plugin.core.errors import InfrastructureError, ModelError
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.models.engines.openai_wire import Text

_DONE = "[DONE]"


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _FunctionDelta(_Wire):
    name: Text | None = None
    arguments: Text | None = None


class _CallDelta(_Wire):
    index: Annotated[int, Field(ge=0, lt=1024)] = 0
    id: Text | None = None
    function: _FunctionDelta = _FunctionDelta()


class _Delta(_Wire):
    content: Text | None = None
    tool_calls: tuple[_CallDelta, ...] | None = None


class _Logprobs(_Wire):
    content: tuple[JsonObject, ...] | None = None


class _Choice(_Wire):
    index: int = 0
    delta: _Delta = _Delta()
    finish_reason: Text | None = None
    logprobs: _Logprobs | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class _Error(_Wire):
    message: Text = ""
    code: int | str | None = None


class _Chunk(_Wire):
    id: Text = ""
    model: Text | None = None
    choices: tuple[_Choice, ...] = ()
    usage: JsonObject | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    error: _Error | None = None


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class StreamedAnswer:
    """Parses the bytes of an event stream with one choice."""

    _rest: bytes = b""
    _done: bool = False
    _id: str = ""
    _model: str | None = None
    _content: list[str] = field(default_factory=list)
    _calls: dict[int, _Call] = field(default_factory=dict)
    _finish_reason: str | None = None
    _logprobs: list[JsonObject] = field(default_factory=list)
    _prompt_ids: tuple[int, ...] | None = None
    _sampled_ids: list[int] | None = None
    _usage: JsonObject | None = None

    def feed(self, data: bytes) -> Iterator[str]:
        """The text of all events that ``data`` completes. Raises ``ModelError`` and ``InfrastructureError``.

        Only line feeds end lines: JSON text may contain other characters that ``splitlines`` would split at.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.strip().partition(b":")
            if name == b"data" and (text := self._take(value.strip().decode("utf-8", errors="replace"))):
                yield text

    def whole(self) -> bytes:
        """The response as if it had not been streamed. Raises ``InfrastructureError`` when the stream is incomplete."""
        if not self._done and self._finish_reason is None:
            raise InfrastructureError("the stream of the model server ended before its answer did")
        calls: list[JsonValue] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for _, call in sorted(self._calls.items())
        ]
        message: JsonObject = {"role": "assistant", "content": "".join(self._content) or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        choice: JsonObject = {"index": 0, "message": message, "finish_reason": self._finish_reason}
        if self._logprobs:
            choice["logprobs"] = {"content": list(self._logprobs)}
        answer: JsonObject = {"id": self._id, "model": self._model, "choices": [choice], "usage": self._usage}
        if self._prompt_ids is not None and self._all_ids():
            choice["token_ids"] = list(self._sampled_ids or ())
            answer["prompt_token_ids"] = list(self._prompt_ids)
        return json.dumps(answer).encode()

    def _take(self, data: str) -> str:
        if self._done or not data:
            return ""
        if data == _DONE:
            self._done = True
            return ""
        try:
            chunk = _Chunk.model_validate(json.loads(data))
        except (ValidationError, ValueError, RecursionError) as error:
            shown = " ".join(data[:200].split())
            raise ModelError(f"the model server's stream is not a chat completion (check base_url): {shown}") from error
        if chunk.error is not None:
            raise InfrastructureError(f"the model server sent an error in its stream: {chunk.error.message[:300]}")
        self._id = self._id or chunk.id
        self._model = self._model or chunk.model
        self._usage = chunk.usage or self._usage
        self._prompt_ids = chunk.prompt_token_ids or self._prompt_ids
        return "".join(self._add(choice) for choice in chunk.choices if choice.index == 0)

    def _add(self, choice: _Choice) -> str:
        self._finish_reason = choice.finish_reason or self._finish_reason
        self._prompt_ids = choice.prompt_token_ids or self._prompt_ids
        if choice.token_ids is not None:
            self._sampled_ids = [*(self._sampled_ids or ()), *choice.token_ids]
        if choice.logprobs is not None:
            self._logprobs.extend(choice.logprobs.content or ())
        for delta in choice.delta.tool_calls or ():
            call = self._calls.setdefault(delta.index, _Call())
            call.id = call.id or delta.id or ""
            call.name = call.name or delta.function.name or ""
            call.arguments += delta.function.arguments or ""
        if choice.delta.content:
            self._content.append(choice.delta.content)
        return choice.delta.content or ""

    def _all_ids(self) -> bool:
        """Whether every sampled token has its id; a server that buffers text may omit some."""
        counted = (self._usage or {}).get("completion_tokens")
        return self._sampled_ids is not None and counted in (None, len(self._sampled_ids))

"""Puts the chunks of a streamed chat completion together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from openhands_rl_plugin.core.messages import REASONING_NAMES, finish_in, is_json_object, listed, reasoning_in, text_in


class ServerEvent(NamedTuple):
    """One event: all of its bytes, up to and including the empty line, and its data, empty for a comment."""

    raw: bytes
    data: bytes


class EventStreamReader:
    """Splits a stream into events, wherever the network cuts it. ``rest``: the bytes of an event that is not complete.

    Only line feeds end lines: JSON text may contain other characters that ``splitlines`` would split at.
    """

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[ServerEvent]:
        """The events that ``data`` completes."""
        text, start, found = self.rest + data, 0, list[ServerEvent]()
        for blank in _BLANK_LINE.finditer(text):
            raw, start = text[start : blank.end()], blank.end()
            found.append(ServerEvent(raw, b"\n".join(_DATA.findall(raw))))
        self.rest = text[start:]
        return found


_BLANK_LINE = re.compile(rb"\n\r?\n|\A\r?\n")
_DATA = re.compile(rb"(?m)^data: ?([^\r\n]*)")

Json = dict[str, Any]

_IDS, _PROMPT_IDS = "token_ids", "prompt_token_ids"
_ELSEWHERE = "provider_specific_fields"  # where litellm puts fields that are not part of OpenAI's format
_MOST_CHOICES = 1024
_READ = frozenset({"role", "content", "tool_calls", "function_call", _ELSEWHERE, *REASONING_NAMES})


class ChunkAssembler:
    """The completion that the chunks so far are parts of."""

    def __init__(self) -> None:
        self._about: Json = {}
        self._choices: dict[int, _ChoiceParts] = {}
        self._prompt_ids: list[int] | str | None = None

    @property
    def finished(self) -> int:
        """How many choices have a finish reason."""
        return sum(choice.about.get("finish_reason") is not None for choice in self._choices.values())

    @property
    def lost_ids(self) -> bool:
        """Whether the server left out the ids of some sampled tokens, as those that hold text back may do."""
        usage = self._about.get("usage")
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        ids = [choice.ids for choice in self._choices.values()]
        if counted is None or None in ids:
            return any(each is not None for each in ids) and None in ids
        return sum(map(len, filter(None, ids))) != counted

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk. Raises ``ValueError`` when it is none."""
        choices = chunk.get("choices") or ()
        if not isinstance(choices, list | tuple):
            raise ValueError("its choices are no list")
        self._prompt_ids = self._prompt_ids or array_in(_PROMPT_IDS, chunk)
        for name, value in chunk.items():
            known = bool(value) if name == "usage" else value is not None and name not in self._about
            if known and name not in ("choices", _PROMPT_IDS):
                self._about[name] = value
        for choice in choices:
            index = (choice.get("index") or 0) if isinstance(choice, dict) else None
            if type(index) is not int or not 0 <= index < _MOST_CHOICES:
                raise ValueError("a choice has no valid index")
            self._prompt_ids = self._prompt_ids or array_in(_PROMPT_IDS, choice)
            self._choices.setdefault(index, _ChoiceParts()).add(choice)

    def document(self) -> Json:
        """The completion as if it had not been streamed; without token ids where some are lost."""
        with_ids = self._prompt_ids is not None and not self.lost_ids
        choices = [
            {"index": index, **choice.whole(with_ids=with_ids)} for index, choice in sorted(self._choices.items())
        ]
        document = {**self._about, "object": "chat.completion", "choices": choices}
        return {**document, _PROMPT_IDS: self._prompt_ids} if with_ids else document


class _ChoiceParts:
    def __init__(self) -> None:
        self.about: Json = {}
        self.ids: list[int] | None = None
        self._texts: dict[str, list[str]] = {}
        self._message: Json = {}
        self._calls: list[_Call] = []
        self._logprobs: list[Any] | None = None

    def add(self, choice: Json) -> None:
        for name, value in choice.items():
            value = finish_in(choice) if name == "finish_reason" else value
            if name not in ("index", "delta", "logprobs", _ELSEWHERE, _IDS, _PROMPT_IDS) and value is not None:
                self.about[name] = value
        if isinstance(ids := array_in(_IDS, choice), list):
            self.ids = self.ids or []
            self.ids.extend(ids)
        if isinstance(logprobs := choice.get("logprobs"), dict) and isinstance(found := logprobs.get("content"), list):
            self._logprobs = self._logprobs or []
            self._logprobs.extend(found)
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise ValueError("a delta is no object")
        calls = listed(delta)
        for call in calls:
            self._add_call(call)
        for name, text in (("content", text_in(delta, calls)), ("reasoning_content", reasoning_in(delta))):
            if text:
                self._texts.setdefault(name, []).append(text)
        for name, value in delta.items():
            if name in _READ or not value:
                continue
            if isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
            else:
                known = self._message.get(name)
                self._message[name] = known + value if isinstance(known, list) and isinstance(value, list) else value

    def whole(self, *, with_ids: bool) -> Json:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in sorted(self._calls, key=lambda call: call.index)
        ]
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        content = texts.pop("content", "") or (None if calls else "")
        message = {"role": "assistant", "content": content, **self._message}
        message |= {name: text for name, text in texts.items() if text}
        if calls:
            message["tool_calls"] = calls
        choice = {"message": message, "finish_reason": None, **self.about}
        if self._logprobs is not None:
            choice["logprobs"] = {"content": self._logprobs}
        return {**choice, _IDS: self.ids} if with_ids and self.ids is not None else choice

    def _add_call(self, given: Any) -> None:
        """Add a piece of a call, or a whole one: one with a name of its own and with another id, or after a whole one,
        is another call, also where its index is missing or is 0 again."""
        function = (given.get("function") or {}) if isinstance(given, dict) else None
        at = given.get("index") if isinstance(given, dict) else None
        if not isinstance(function, dict) or not (at is None or (type(at) is int and 0 <= at < _MOST_CHOICES)):
            raise ValueError("a tool call has no valid index")
        name, arguments, identity = function.get("name") or "", function.get("arguments"), str(given.get("id") or "")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        if not isinstance(name, str) or not isinstance(arguments, str | None):
            raise ValueError("a tool call has fields that are no text")
        same = [call for call in self._calls if at is None or call.index == at]
        if identity and at is None:
            same = [call for call in same if call.id == identity] or ([] if name else same)
        call = same[-1] if same else None
        if call is None or call.is_followed_by(name, arguments or "", identity):
            call = _Call(len(self._calls) if at is None else at)
            self._calls.append(call)
        call.id, call.name, call.arguments = (
            call.id or identity,
            call.name or name,
            call.arguments + (arguments or ""),
        )


@dataclass(slots=True)
class _Call:
    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def is_followed_by(self, name: str, arguments: str, identity: str) -> bool:
        """Whether a piece with a name is a call of its own, not the next piece of this one."""
        if not name or not self.name:
            return False
        other = identity != self.id if identity and self.id else name != self.name
        return other or (bool(arguments.strip()) and is_json_object(self.arguments))


def array_in(name: str, *holders: Mapping[str, Any]) -> list[int] | str | None:
    """The first array of ids called ``name``, or the text of one, in the objects that ``places_of_ids`` finds."""
    found = (place.get(name) for holder in holders for place in places_of_ids(holder))
    return next((ids for ids in found if isinstance(ids, list | str)), None)


def places_of_ids(holder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The objects of a response, a choice or a chunk that may have token ids."""
    inner = [each for name in ("message", "delta") if isinstance(each := holder.get(name), dict)]
    for place in (holder, holder.get(_ELSEWHERE), *(each.get(_ELSEWHERE) for each in inner)):
        if isinstance(place, dict):
            yield place

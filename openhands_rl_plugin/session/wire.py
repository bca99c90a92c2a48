"""What clients send and get: the requests and streams of three protocols.

Chat completions are OpenAI's protocol, in which vLLM and others report token ids. The others are without token ids and
read as chat completions: what is recorded of them can be imitated only. They are Anthropic's Messages API (``POST
/v1/messages``), which Claude Code speaks, as in https://docs.anthropic.com/en/api/messages and
/en/docs/build-with-claude/streaming, and OpenAI's Responses API (``POST /v1/responses``), which Codex and OpenHands
with GPT-5 speak, as in https://platform.openai.com/docs/api-reference/responses and /responses-streaming.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from openhands_rl_plugin.core.messages import (
    REASONING_NAMES,
    WireMessage,
    error_in,
    finish_in,
    is_json_object,
    listed,
    reasoning_in,
    sampling_in,
    text_in,
)
from openhands_rl_plugin.core.types import JsonObject, SamplingParams
from openhands_rl_plugin.models.engines.client import EXTENSIONS, LOGPROBS, TOKEN_IDS, Attempts, ServerEvent
from openhands_rl_plugin.models.engines.openai_wire import (
    DEEPEST,
    DONE,
    ELSEWHERE,
    IDS,
    PROMPT_IDS,
    SAMPLED_IDS,
    ChatAnswer,
    Json,
    Unrecordable,
    chat_answer,
    dump_object,
    event,
    parse_object,
    prompt_ids_in,
    reading,
    without,
)

STREAM_OPTIONS = "stream_options"
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(slots=True)
class ClientRequest:
    """One request for a completion. ``body`` is the client's text, ``document`` the parsed object.

    ``messages``, ``tools`` and ``settings`` (the sampling parameters) are in the format of chat completions, whatever
    the protocol. ``added``: the fields to send with it, if they are accepted; ``hidden``: what only these bring into
    the answer. ``unknown_before``: why it is not known what comes before ``messages``.

    Since it was sent it has ``attempts``, and ``started``, a time of ``perf_counter``.
    """

    body: bytes
    document: Json
    messages: Sequence[WireMessage]
    tools: tuple[JsonObject, ...]
    settings: Json
    added: Json = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    unknown_before: str = ""
    protocol: WireProtocol = field(init=False)
    attempts: Attempts = field(init=False)
    started: float = 0.0

    @property
    def model(self) -> str:
        return str(self.document.get("model") or "")

    @property
    def streams(self) -> bool:
        return self.document.get("stream") is True

    @property
    def wants_usage(self) -> bool:
        """Whether the stream must end with the token usage."""
        options = self.document.get(STREAM_OPTIONS)
        return isinstance(options, dict) and options.get("include_usage") is True

    def wants(self, extension: str) -> bool:
        """Whether the client itself requested a field that the gateway may add, such as ``logprobs``."""
        return bool(self.document.get(extension))

    @property
    def sampling(self) -> SamplingParams:
        """The parameters with those that were filled in for it; none where a value is not valid."""
        sent = {**self.settings, **self.sent_with}
        try:
            return SamplingParams.model_validate(dict(sampling_in(sent)))
        except (ValidationError, TypeError):
            return SamplingParams()

    @property
    def sent_with(self) -> Json:
        """The fields that it is sent with, or was."""
        return self.added if self.attempts.extended else {}

    def why_missing(self, name: str, *, lost_ids: bool) -> str:
        """Why the answer came without what the field ``name`` asks for."""
        if self.protocol is not CHAT:
            return f"POST /v1/{self.protocol.path} reports none"
        if self.document.get(name) is not None and not self.wants(name):
            return f"the client turned {name} off"
        if lost_ids and name == TOKEN_IDS:
            return "the stream left some token ids out"
        return self.attempts.why_missing(name)


def client_request(
    body: bytes, document: Json, messages: Any, tools: Any, settings: Json, **about: Any
) -> ClientRequest:
    """A request whose ``messages`` and ``tools`` can be recorded. Raises ``Unrecordable``, ``ValueError`` and others.

    A message is read when it is new to its session; what is no message is refused then.
    """
    if not isinstance(messages, list) or not messages or any(each["role"] not in _ROLES for each in messages):
        raise Unrecordable("the request has no messages, or one of an unknown role")
    if not all(isinstance(tool, dict) for tool in tools or ()):
        raise Unrecordable("a tool of the request is not an object")
    kept = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    return ClientRequest(body, document, kept, tuple(tools or ()), settings, **about)


def upstream_body(call: ClientRequest, model: str) -> bytes:
    """The body for the model server: the client's request, with the fields that are added, and for ``model``."""
    changes = call.sent_with | ({"model": model} if model != call.model else {})
    return dump_object({**call.document, **changes}) if changes else call.body


def put_back(call: ClientRequest, messages: Sequence[WireMessage]) -> None:
    """Send the messages of a chat completion's request in the form that they were sampled in, ``messages``."""
    if all(one is other for one, other in zip(call.messages, messages, strict=True)):
        return
    # Those that stay are sent as they came: recorded messages have a system message for a developer's.
    sent = zip(call.document["messages"], call.messages, messages, strict=True)
    call.document["messages"] = [given if one is other else other for given, one, other in sent]
    call.body, call.messages = dump_object(call.document), messages


_IN_PARTS = frozenset({"index", "delta", ELSEWHERE, PROMPT_IDS})
_READ = frozenset({"role", "content", "tool_calls", "function_call", ELSEWHERE, *REASONING_NAMES})


def _whole(message: Json) -> Json:
    calls = sorted(message["tool_calls"], key=lambda call: call["index"])
    whole = {**message, "content": message.get("content") or (None if calls else "")}
    whole["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return whole


def _join(whole: Json, part: Json, *, texts: bool = True) -> None:
    """Add a part to what came before: lists, objects, and ``texts`` go on; other values are replaced."""
    for name, value in part.items():
        match whole.get(name), value:
            case _, None | "":
                pass
            case str(before), str() if texts:
                whole[name] = before + value
            case list(before), list():
                before += value
            case dict(before), dict():
                _join(before, value, texts=texts)
            case _:
                whole[name] = [*value] if isinstance(value, list) else {**value} if isinstance(value, dict) else value


def _join_call(calls: list[Json], part: Any) -> None:
    """Add a piece of a call, or a whole one: one with a name of its own and with another id, or after a whole one, is
    another call, also where its index is missing or is 0 again."""
    function, at, identity = part.get("function") or {}, part.get("index"), str(part.get("id") or "")
    name, arguments = function.get("name") or "", function.get("arguments") or ""
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    if not isinstance(at, int | None):
        raise ValueError("a tool call has no valid index")
    call: Json | None = next((each for each in reversed(calls) if at is None or each["index"] == at), None)
    if call is not None and name and (before := call["function"])["name"]:
        other = identity != call["id"] if identity and call["id"] else name != before["name"]
        if other or (arguments.strip() and is_json_object(before["arguments"])):
            call = None
    if call is None:
        empty = {"name": "", "arguments": ""}
        call = {"index": len(calls) if at is None else at, "id": "", "type": "function", "function": empty}
        calls.append(call)
    known = call["function"]
    call["id"], known["name"] = call["id"] or identity, known["name"] or name
    known["arguments"] += arguments


class AnswerStream:
    """A streamed chat completion, event by event, of which the client gets what it asked for. Those of the other
    protocols read other events.

    ``ending``: the answer is complete, and the client must not see the end before the answer is stored.
    ``done``: no event comes after this one.
    """

    def __init__(self, call: ClientRequest) -> None:
        self.problem = ""
        self.ending = self.done = False
        self._hidden = call.hidden | ({"usage"} if STREAM_OPTIONS in call.added else frozenset())
        self._wanted = call.document.get("n") or 1
        self._about: Json = {}
        self._choices: dict[int, Json] = {}
        self._prompt_ids: Any = None

    def feed(self, received: ServerEvent) -> bytes:
        """Take an event; returns what the client gets of it."""
        if received.data == DONE:
            self.ending = self.done = True
        if received.data in (b"", DONE):
            return received.raw
        data = parse_object(received.data)
        try:
            if data is None or error_in(data) is not None:
                raise ValueError(f"an event of the stream is {'no JSON object' if data is None else 'an error'}")
            self.take(data)
        except (ValueError, TypeError, LookupError, AttributeError) as problem:
            self.problem = self.problem or str(problem) or "an event of the stream has an unknown format"
        shown = without(data, self._hidden)
        if shown == data:
            return received.raw
        return event(dump_object(shown)) if shown.get("choices") or shown.get("usage") else b""

    def whole(self) -> ChatAnswer:
        """The answer as a chat completion. Raises ``Unrecordable`` when the events are none, or not all."""
        if self.problem or not self.ending:
            raise Unrecordable(self.problem or "the stream ended before its answer did")
        return reading("the response", self.read)

    def take(self, data: Json) -> None:
        """Read an event. Raises ``ValueError`` and others for one of an unknown format."""
        for name, value in data.items():
            known = bool(value) if name == "usage" else value is not None and name not in self._about
            if known and name not in ("choices", PROMPT_IDS):
                self._about[name] = value
        for choice in data.get("choices") or ():
            index = choice.get("index") or 0
            if type(index) is not int:
                raise ValueError("a choice has no valid index")
            self._prompt_ids = self._prompt_ids or prompt_ids_in(data, choice)
            new = {"index": index, "message": {"role": "assistant", "tool_calls": []}, "finish_reason": None}
            whole, delta = self._choices.setdefault(index, new), choice.get("delta") or {}
            others = {name: value for name, value in choice.items() if name not in _IN_PARTS}
            _join(whole, {**others, "finish_reason": finish_in(choice)}, texts=False)
            calls = listed(delta)
            message = {name: value for name, value in delta.items() if name not in _READ}
            message |= {"content": text_in(delta, calls), "reasoning_content": reasoning_in(delta)}
            _join(whole["message"], message)
            for call in calls:
                _join_call(whole["message"]["tool_calls"], call)
        self.ending = sum(each["finish_reason"] is not None for each in self._choices.values()) >= self._wanted

    def read(self) -> ChatAnswer:
        """The response of all events. Raises ``Unrecordable``, and others as ``take``."""
        choices = [{**each, "message": _whole(each["message"])} for _, each in sorted(self._choices.items())]
        document = {**self._about, "object": "chat.completion", "choices": choices, PROMPT_IDS: self._prompt_ids}
        lost = self._lost_ids()
        hidden = frozenset(IDS if self._prompt_ids is None or lost else ())
        return ChatAnswer(without(document, hidden), lost_ids=lost)

    def _lost_ids(self) -> bool:
        """Whether the server left out the ids of some sampled tokens, as those that hold text back may do."""
        ids, counted = [choice.get(SAMPLED_IDS) for choice in self._choices.values()], self._about.get("usage")
        counted = counted.get("completion_tokens") if isinstance(counted, dict) else None
        if counted is None or None in ids:
            return any(each is not None for each in ids) and None in ids
        return sum(map(len, filter(None, ids))) != counted


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """One protocol. ``path`` is below ``/v1``.

    ``request`` and ``response`` read JSON of the protocol, and may raise what ``AnswerStream.take`` does.
    """

    path: str
    request: Callable[[bytes, Json], ClientRequest]
    response: Callable[[bytes], ChatAnswer]
    stream: Callable[[ClientRequest], AnswerStream]

    def parse(self, body: bytes) -> ClientRequest:
        """A client's request. Raises ``Unrecordable``."""
        document = parse_object(body)
        if document is None:
            raise Unrecordable(f"the request is not a JSON object, or has more than {DEEPEST} levels")
        call = reading("the request", self.request, body, document)
        call.protocol = self
        return call

    def answer(self, body: bytes) -> ChatAnswer:
        """A whole response. Raises ``Unrecordable``."""
        return reading("the response", self.response, body)

    def error_event(self, error: Json) -> bytes:
        """An error in a stream that has begun, as clients of all protocols read it: OpenAI's by the field ``error``."""
        about = {"code": str(error.get("code")), "message": error.get("message"), "param": None, "sequence_number": 0}
        data = dump_object({"type": "error", **about, "error": error})
        return event(data) + event(DONE) if self is CHAT else event(data, "error")


def _request(body: bytes, document: Json) -> ClientRequest:
    call = client_request(body, document, document.get("messages"), document.get("tools"), document)
    given = {name for name, value in document.items() if value is not None}
    call.added = {name: value for name, value in {**EXTENSIONS, **_NEUTRAL}.items() if name not in given}
    options = document.get(STREAM_OPTIONS)
    # Options that are no object are the server's to refuse.
    if call.streams and not call.wants_usage and isinstance(options, dict | None):
        call.added[STREAM_OPTIONS] = {**(options or {}), "include_usage": True}
    hidden = (*(() if call.wants(TOKEN_IDS) else IDS), *(() if call.wants(LOGPROBS) else (LOGPROBS,)))
    call.hidden = frozenset(hidden)
    return call


CHAT = WireProtocol("chat/completions", _request, chat_answer, AnswerStream)

# Claude Code's first system block differs from request to request, and is no part of the prompt.
_ATTRIBUTION = "x-anthropic-billing-header:"
# Where a streamed tool's input is kept as the model wrote it.
_EXACT = "partial_json"
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "tool_choice", "parallel_tool_calls")
# What chat completions call the reasons of other protocols; one that is not here keeps its name.
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
    "max_output_tokens": "length",
}


def _content(content: Any) -> Any:
    """Content with its texts as chat completions have them; of other parts, such as images, only the type."""
    if not isinstance(content, list):
        return content if content is not None else ""
    texts = [part.get("text", part.get("refusal")) for part in content]
    return [
        {"type": part.get("type")} if text is None else {"type": "text", "text": text}
        for part, text in zip(content, texts, strict=True)
    ]


def _model_message(items: Sequence[Json]) -> Json:
    """What the model wrote in blocks of a message, or in items of a response, as one message.

    Calls of the server's own tools, which no client answers, are left out.
    """
    texts, thoughts, calls = [], [], []
    for item in items:
        match item.get("type") or "message":
            case "text":
                texts.append(item["text"])
            case "message":
                content = _content(item.get("content"))
                texts += [content] if isinstance(content, str) else [part["text"] for part in content]
            case "thinking":
                thoughts.append(item["thinking"])
            case "reasoning":
                thoughts += [part["text"] for part in item.get("content") or item.get("summary") or ()]
            case "tool_use":
                arguments = item.get(_EXACT) or json.dumps(item.get("input") or {}, ensure_ascii=False)
                calls.append(_call(item.get("id"), item.get("name"), arguments))
            case kind if "call_id" in item:
                arguments = item.get("arguments", item.get("input"))
                arguments = json.dumps(item.get("action")) if arguments is None else arguments
                calls.append(_call(item["call_id"], item.get("name") or kind.removesuffix("_call"), arguments))
    text = "".join(texts)
    message: Json = {"role": "assistant", "content": text or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if thought := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = thought
    return message


def _call(identity: Any, name: Any, arguments: Any) -> Json:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: Json) -> JsonObject:
    """A function of the client as a tool of chat completions; a tool of the server's own (web search) as it is."""
    schema = tool.get("input_schema", tool.get("parameters"))
    if schema is None:
        return tool
    named = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**named, "parameters": schema}}


def _as_completion(given: Json, message: Json, reason: Any, *names: str) -> ChatAnswer:
    """A chat completion with one choice, which stopped for this ``reason`` of another protocol."""
    usage = given.get("usage") or {}
    count = {name: value for name, value in usage.items() if type(value) is int}
    # Anthropic's ``input_tokens`` are those that no cache had or took.
    cached = count.get("cache_read_input_tokens", 0)
    counts = {
        "prompt_tokens": count.get("input_tokens", 0) + cached + count.get("cache_creation_input_tokens", 0),
        "completion_tokens": count.get("output_tokens", 0),
        "prompt_tokens_details": usage.get("input_tokens_details") or {"cached_tokens": cached},
    }
    if details := usage.get("output_tokens_details"):
        counts["completion_tokens_details"] = details
    choice = {"index": 0, "message": message, "finish_reason": _FINISH_REASONS.get(reason, reason)}
    about = {name: given[name] for name in ("id", "model", *names) if given.get(name)}
    return ChatAnswer({**about, "choices": [choice], "usage": counts})


def _messages_request(body: bytes, document: Json) -> ClientRequest:
    system = document.get("system") or []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    blocks = [block for block in blocks if not str(block.get("text")).startswith(_ATTRIBUTION)]
    messages: list[Json] = [{"role": "system", "content": _content(blocks)}] if blocks else []
    for message in document["messages"]:
        messages += _from_blocks(message["role"], message.get("content"))
    settings = {name: document[name] for name in _PARAMETERS if name in document}
    settings["stop"] = document.get("stop_sequences")
    return client_request(body, document, messages, [*map(_tool, document.get("tools") or ())], settings)


def _from_blocks(role: str, content: Any) -> list[Json]:
    """One message as those of chat completions: each tool result is a message of its own."""
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    if role == "assistant":
        return [_model_message(content)]
    messages: list[Json] = []
    for block in content:
        if block.get("type") == "tool_result":
            result = {"tool_call_id": block.get("tool_use_id"), "content": _content(block.get("content"))}
            messages.append({"role": "tool", **result})
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += _content([block])
        else:
            messages.append({"role": role, "content": _content([block])})
    return messages


def _message(message: Json) -> ChatAnswer:
    answer, reason = _model_message(message["content"]), message.get("stop_reason")
    return _as_completion(message, answer, reason, "stop_reason", "stop_sequence")


class MessageStream(AnswerStream):
    """A streamed message."""

    def __init__(self, call: ClientRequest) -> None:
        super().__init__(call)
        self._message: Json = {}
        self._blocks: dict[int, Json] = {}
        self._texts: dict[tuple[int, str], list[str]] = {}

    def take(self, data: Json) -> None:
        """As ``AnswerStream.take``."""
        match data.get("type"):
            case "message_start":
                self._message = dict(data["message"])
            case "content_block_start":
                self._blocks[data["index"]] = dict(data["content_block"])
            case "content_block_delta":
                block = self._blocks[data["index"]]
                for name in data["delta"].keys() & {"text", "thinking", _EXACT}:
                    block[name] = block.get(name) or ""
                    self._texts.setdefault((data["index"], name), []).append("" + data["delta"][name])
            case "message_delta":
                self._message |= data["delta"]
                self._message["usage"] = {**(self._message.get("usage") or {}), **(data.get("usage") or {})}
                self.ending |= bool(self._message.get("stop_reason"))
            case "message_stop":
                self.ending = self.done = True

    def read(self) -> ChatAnswer:
        """As ``AnswerStream.read``."""
        for (index, name), parts in self._texts.items():
            self._blocks[index][name] += "".join(parts)
        return _message({**self._message, "content": [block for _, block in sorted(self._blocks.items())]})


def _responses_request(body: bytes, document: Json) -> ClientRequest:
    given = document.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    own = [item for item in items if item.get("type") != "item_reference"]
    instructions = document.get("instructions")
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    for is_models, group in groupby(own, _is_of_model):
        # What the model wrote in a row (reasoning, text, calls) is one message.
        run = [*group]
        messages += [_model_message(run)] if is_models else map(_observed, run)
    settings = {name: document[name] for name in _PARAMETERS if name in document}
    settings["max_tokens"] = document.get("max_output_tokens")
    settings["reasoning_effort"] = (document.get("reasoning") or {}).get("effort")
    is_held = document.get("conversation") or document.get("previous_response_id") or len(own) < len(items)
    return client_request(
        body,
        document,
        messages,
        [*map(_tool, document.get("tools") or ())],
        settings,
        unknown_before="the request refers to what the model server holds" if is_held else "",
    )


def _is_of_model(item: Json) -> bool:
    """Whether the model wrote it."""
    kind = item.get("type") or "message"
    return item.get("role") == "assistant" if kind == "message" else not kind.endswith("_output")


def _observed(item: Json) -> Json:
    """A message to the model."""
    if (item.get("type") or "message") == "message":
        return {"role": item.get("role"), "content": _content(item.get("content"))}
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}


def _response(response: Json) -> ChatAnswer:
    output, status = response.get("output"), response.get("status", "completed")
    if status not in ("completed", "incomplete") or not output:
        raise Unrecordable(f"the response is {status!s:.20}, or has no output")
    answer = _model_message(output)
    reason = (response.get("incomplete_details") or {}).get("reason")
    finish = reason or ("tool_calls" if "tool_calls" in answer else "stop")
    return _as_completion(response, answer, finish, "created_at", "status", "incomplete_details", "service_tier")


class ResponseStream(AnswerStream):
    """A streamed response."""

    def __init__(self, call: ClientRequest) -> None:
        super().__init__(call)
        self._items: dict[int, Json] = {}
        self._response: Json = {}

    def take(self, data: Json) -> None:
        """As ``AnswerStream.take``."""
        match data.get("type"):
            case "response.output_item.done":
                self._items[data.get("output_index", len(self._items))] = data["item"]
            case "response.completed" | "response.incomplete" | "response.failed":
                self._response = data["response"]
                self.ending = self.done = True

    def read(self) -> ChatAnswer:
        """As ``AnswerStream.read``."""
        # Some servers leave the output out of the last event.
        items = [item for _, item in sorted(self._items.items())]
        return _response({**self._response, "output": self._response.get("output") or items})


MESSAGES = WireProtocol("messages", _messages_request, lambda body: _message(parse_object(body) or {}), MessageStream)
RESPONSES = WireProtocol(
    "responses", _responses_request, lambda body: _response(parse_object(body) or {}), ResponseStream
)

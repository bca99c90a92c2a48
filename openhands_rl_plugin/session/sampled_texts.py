"""The answers in a conversation as the model sampled them, also where the host writes them anew.

``SampledCalls`` has the calls by the API, whose arguments V1 repairs: it replays ``"[1, 2]"`` as ``[1, 2]``, for the
model another text than it sampled. ``SampledTexts`` has calls that are text:
OpenHands reads such a call and replays it written anew: with an empty line before it, with line breaks around values of
several lines, without the white space around it, with a closing tag that a stop word had cut. For the model that is
another text than it sampled, so each turn would be a sequence of its own. The sampled text is sent instead, where it
is the same call, and every prompt extends the one before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from openhands_rl_plugin.core.messages import WireMessage, is_json_object, text_of
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, ToolCall

_STOP, _CLOSED = "</function", "</function>"
"""Where OpenHands asks the server to stop, and what stands there in the prompts that follow."""
_CALL = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)


class SampledTexts:
    """What was sampled in one episode as text."""

    def __init__(self) -> None:
        self._texts: dict[Message, str] = {}

    def add(self, completion: Completion) -> None:
        """Remember an answer. One with calls by the API is none of text."""
        answer = completion.message
        if answer.content and not answer.tool_calls:
            text = answer.content
            if completion.finish_reason == "stop" and not text.rstrip().endswith(_CLOSED):
                # The stop word cut the closing tag.
                text = text.removesuffix(_STOP) + _CLOSED if _is_cut(text, completion.metadata) else text
            self._texts[answer] = text

    def put_back(self, prompt: Sequence[WireMessage], path: Sequence[Message]) -> list[WireMessage]:
        """The prompt, in the host's form, with the answers as they were sampled. ``path`` is the same conversation as
        the tree has it; a prompt of another length stays as it is."""
        if len(prompt) != len(path):
            return [*prompt]
        return [
            message
            if (text := self.text(message, answer)) is None
            else {**message, "content": _in_form_of(message.get("content"), text)}
            for message, answer in zip(prompt, path, strict=True)
        ]

    def text(self, form: WireMessage, answer: Message) -> str | None:
        """What is sent for ``answer``, which the host repeats as ``form``; ``None``: the host's own form."""
        known = self._texts.get(answer)
        if known is None or form["role"] != "assistant" or form.get("tool_calls"):
            return None
        return known if read_text(known) == read_text(text_of(form.get("content")) or "") else None


class SampledCalls:
    """The tool calls of a conversation as they were sampled.

    Where the arguments are no JSON object, the host's form stays: servers refuse such a history.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, list[ToolCall]] = {}

    def add(self, message: Message) -> None:
        """Remember the calls of an answer that is executed."""
        for call in message.tool_calls:
            self._by_id.setdefault(call.id, []).append(call)

    def put_back(self, prompt: Sequence[WireMessage], later: Sequence[Message] = ()) -> list[WireMessage]:
        """The prompt with the calls as they were sampled, also those of the messages ``later``, which are not added.

        Servers may use an id again, so the newest comes first.
        """
        known = {id: [*calls] for id, calls in self._by_id.items()} if later else self._by_id
        for call in (call for message in later for call in message.tool_calls):
            known.setdefault(call.id, []).append(call)
        seen: dict[str, int] = {}
        return [_with_sampled(message, known, seen) for message in reversed(prompt)][::-1]


def _with_sampled(message: WireMessage, known: Mapping[str, list[ToolCall]], seen: dict[str, int]) -> WireMessage:
    given = message.get("tool_calls")
    if message["role"] != "assistant" or not given:
        return message
    calls = [_as_sampled(call, known, seen) for call in reversed(given)][::-1]
    return message if all(map(is_, calls, given)) else {**message, "tool_calls": calls}


def _as_sampled(call: Any, known: Mapping[str, list[ToolCall]], seen: dict[str, int]) -> Any:
    if not (id := call.get("id")):
        return call
    sampled, sent = known.get(id, ()), call["function"]
    at = seen[id] = seen.get(id, 0) + 1
    if any((own.name, own.arguments) == (sent["name"], sent["arguments"]) for own in sampled) or at > len(sampled):
        return call
    own = sampled[-at]
    if not is_json_object(own.arguments):
        return call
    return {**call, "function": {**sent, "name": own.name, "arguments": own.arguments}}


def read_text(text: str) -> tuple[object, ...]:
    """What the text of an answer says, apart from what hosts change: the text before its call, the call's name and
    arguments, and whatever belongs to no call."""
    call = _CALL.search(text)
    if call is None:
        return (text.strip(),)
    arguments = [(name, _plain(value.strip())) for name, value in _PARAMETER.findall(call[2])]
    after = _PARAMETER.sub("", call[2]) + text[call.end() :]
    return text[: call.start()].strip(), call[1], arguments, after.strip()


def _plain(value: str) -> str:
    """A list or an object in one form: hosts read it, and write it with other white space."""
    if value[:1] not in ("[", "{"):
        return value
    try:
        return json.dumps(json.loads(value))
    except ValueError:
        return value


def _in_form_of(content: Any, text: str) -> Any:
    """A text, or a list of parts as some requests have them; the last one has the mark of the prompt cache."""
    return [{**content[-1], "type": "text", "text": text}] if isinstance(content, list) and content else text


def _is_cut(text: str, metadata: JsonObject) -> bool:
    """Whether the stop word ended it, as servers say in ``stop_reason`` (SGLang: ``matched_stop``); of others that is
    what an open call means."""
    response: Any = metadata["response"]
    choice = response["choices"][0]
    for place in (choice, choice.get("provider_specific_fields") or {}):
        for name in ("stop_reason", "matched_stop"):
            if name in place:
                return place[name] == _STOP
    return _CALL.search(text) is not None

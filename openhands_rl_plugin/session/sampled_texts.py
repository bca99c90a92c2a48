"""The answers in a conversation as the model sampled them, also where the host writes them anew.

V1 repairs the arguments of calls by the API: it replays ``"[1, 2]"`` as ``[1, 2]``, for the model another text than it
sampled. Calls that are text OpenHands reads and replays written anew: with an empty line before them, with line breaks
around values of several lines, without the white space around them, with a closing tag that a stop word had cut. For
the model that is another text, too, so each turn would be a sequence of its own. What was sampled is sent instead,
where it is the same call, and every prompt extends the one before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from openhands_rl_plugin.core.messages import WireMessage, is_json_object, text_of
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, ToolCall

_STOP, _CLOSED = "</function", "</function>"
"""Where OpenHands asks the server to stop, and what stands there in the prompts that follow."""
_CALL = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>(.*?)</parameter>", re.DOTALL)


class SampledTexts:
    """What was sampled in one episode."""

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
        return [self.sent(message, answer) or message for message, answer in zip(prompt, path, strict=True)]

    def sent(self, form: WireMessage, answer: Message) -> WireMessage | None:
        """What is sent for ``answer``, which the host repeats as ``form``; ``None``: the host's own form."""
        given = form.get("tool_calls") or []
        if form["role"] != "assistant" or [call.get("id") for call in given] != [each.id for each in answer.tool_calls]:
            return None
        if given:
            calls = list(map(_as_sampled, given, answer.tool_calls))
            return None if calls == given else {**form, "tool_calls": calls}
        known = self._texts.get(answer)
        if known is None or read_text(known) != read_text(text_of(form.get("content")) or ""):
            return None
        return {**form, "content": _in_form_of(form.get("content"), known)}


def _as_sampled(call: Any, sampled: ToolCall) -> Any:
    """Arguments that are no JSON object keep the host's form: servers refuse such a history."""
    if not is_json_object(sampled.arguments):
        return call
    return {**call, "function": {**call["function"], "name": sampled.name, "arguments": sampled.arguments}}


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

"""A conversation as text by a tokenizer's own chat template, and the families of models with their ways to call tools.

Serving and training render here, and as vLLM does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary, unknown_name
from openhands_rl_plugin.core.messages import WireMessage, calls_in, reasoning_in, text_in, text_of
from openhands_rl_plugin.core.templates.parsing import (
    BARE,
    TAGGED,
    CallForm,
    ParsedAnswer,
    RenderError,
    parse_calls,
    render_tool_call,
)
from openhands_rl_plugin.core.types import FailureKind, JsonObject

_TAKES_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+\w+\s*(?:\.\s*content\b|\[\s*['\"]content['\"]\s*\])")


class TemplateTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that renders conversations."""

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
        """The template's text: that given or named, else ``tool_use`` with tools, else ``default`` or the only one."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Render a conversation; with ``tokenize=False`` the result is text."""
        ...


def chat_text(
    tokenizer: TemplateTokenizer,
    messages: Sequence[WireMessage],
    tools: Sequence[JsonObject] = (),
    *,
    cue: bool,
    template: str | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The prompt of a conversation; ``cue``: with what opens an answer of the model.

    ``template``: a text in the place of the tokenizer's own, or the name of one of several. ``options`` are keywords of
    the template. Arguments of calls are given as objects, and as text to a template that takes no objects. Calls are
    written into the content where a template has no calls, because it would drop them. Raises ``RenderError``.
    """
    offered = [_offered(tool) for tool in tools] or None
    try:
        with boundary(FailureKind.MODEL, "chat template"):
            chosen = tokenizer.get_chat_template(template, offered)

            def render(*, objects: bool) -> str:
                shown = [_shown(message, chosen, objects=objects) for message in messages]
                return tokenizer.apply_chat_template(
                    shown,
                    tools=offered,
                    chat_template=chosen,
                    add_generation_prompt=cue,
                    tokenize=False,
                    **options,
                )

            try:
                return render(objects=True)
            except TypeError:  # it joins the arguments and a text
                return render(objects=False)
    except CaughtFailure as caught:
        raise RenderError(caught.failure.message) from caught


def _offered(tool: JsonObject) -> JsonObject:
    """The tool with the fields, and in the order, that vLLM's own model of it has."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    first = {name: function.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": {**first, **function}}


def _shown(wire: WireMessage, template: str, *, objects: bool) -> dict[str, Any]:
    """A message as templates take it."""
    calls, given = calls_in(wire), wire.get("content")
    content = text_in(wire, calls) or ""
    shown: dict[str, Any] = {"role": wire["role"], "content": content}
    if calls and "tool_calls" not in template:
        written = [render_tool_call(call) for call in calls]
        shown["content"] = "\n".join([content, *written] if content else written)
    elif calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _object(call.arguments) if objects else call.arguments},
            }
            for call in calls
        ]
    if wire["role"] != "tool" and _TAKES_PARTS.search(template):
        given = given if shown["content"] == (text_of(given) or "") else shown["content"] or None
        parts = given if isinstance(given, list | tuple) else [given] if given is not None else []
        shown["content"] = [{"type": "text", "text": text} for part in parts if (text := text_of([part])) is not None]
    if wire["role"] == "assistant" and (reasoning := reasoning_in(wire)) is not None:
        shown["reasoning"] = shown["reasoning_content"] = reasoning
    return shown | {name: wire[name] for name in ("name", "tool_call_id") if wire.get(name) is not None}


def _object(arguments: str) -> JsonValue:
    """The object in the text; text that holds none is returned unchanged."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else {} if value is None else arguments


_LISTED = "# Tools\n\nThese functions can be called:\n"
_AN_EXAMPLE = "\n\nA call looks like this:\n"
_TAGGED_CALL = '<tool_call>\n{"name": "function-name", "arguments": {"parameter": "value"}}\n</tool_call>'
_BARE_CALL = '{"name": "function-name", "parameters": {"parameter": "value"}}'
# Of Qwen's own templates.
_QWEN_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>\n"
)
_QWEN_FOOT = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_TAGS, _OBJECTS = ("<tool_call", "</tool_call"), ("{", "<|python_tag|>")


@dataclass(frozen=True)
class ChatTemplate:
    """One family. ``stop``: strings that end a completion. ``openings``: what a call in the text begins with.

    ``head`` and ``foot`` stand around the tools in the system message.
    """

    stop: tuple[str, ...]
    form: CallForm = TAGGED
    openings: tuple[str, ...] = _TAGS
    head: str = _LISTED
    foot: str = _AN_EXAMPLE + _TAGGED_CALL

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        """The text and the calls of a completion; ``tools`` were offered. Never raises."""
        ended = next((one for one in self.stop if text.endswith(one)), "")
        return parse_calls(text.removesuffix(ended), tools, self.form)

    def system(self, text: str, tools: Sequence[JsonObject]) -> str:
        """The content of the system message that begins with ``text`` and lists ``tools``."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return "\n\n".join(part for part in (text, f"{self.head}{listed}{self.foot}" if tools else "") if part)


_CHATML, _LLAMA = ("<|im_end|>", "<|endoftext|>"), ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_QWEN = ChatTemplate(_CHATML, head=_QWEN_HEAD, foot=_QWEN_FOOT)
_LLAMA_3 = ChatTemplate(_LLAMA, BARE, _OBJECTS, foot=_AN_EXAMPLE + _BARE_CALL)

TEMPLATES: dict[str, ChatTemplate] = {
    "hermes": ChatTemplate(("<|im_end|>", "<|end_of_text|>")),
    "llama3": _LLAMA_3,
    "llama3.1": _LLAMA_3,
    "qwen2.5": _QWEN,
    "qwen3": _QWEN,
    "qwen3-no-thinking": _QWEN,
    "qwen3-instruct": _QWEN,
    "smollm2": ChatTemplate(_CHATML),
}


def template_for(name: str) -> ChatTemplate:
    """The template of a family. Raises ``ConfigError`` for a name that no family has."""
    if (template := TEMPLATES.get(name.lower())) is None:
        raise ConfigError(unknown_name("chat template", name, TEMPLATES))
    return template

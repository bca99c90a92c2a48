"""How families of models call tools in the text of a completion, and list tools in the system message."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from openhands_rl_plugin.core.errors import ConfigError, unknown_name
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.templates.chat import TemplateTokenizer, chat_text
from openhands_rl_plugin.core.templates.json_calls import parse_bare_json, parse_tool_call_json
from openhands_rl_plugin.core.templates.parsing import ParsedAnswer
from openhands_rl_plugin.core.types import JsonObject, Message

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

    ``head`` and ``foot`` stand around the tools in the system message. ``options`` are keywords of the tokenizer's
    template.
    """

    stop: tuple[str, ...]
    read: Callable[[str, Sequence[JsonObject]], ParsedAnswer] = parse_tool_call_json
    openings: tuple[str, ...] = _TAGS
    head: str = _LISTED
    foot: str = _AN_EXAMPLE + _TAGGED_CALL
    options: Mapping[str, bool] = field(default_factory=dict[str, bool])

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        """The text and the calls of a completion; with ``tools``, calls that do not keep to them are problems.

        Never raises.
        """
        return self.read(next((text.removesuffix(one) for one in self.stop if text.endswith(one)), text), tools)

    def system(self, text: str, tools: Sequence[JsonObject]) -> str:
        """The content of the system message that begins with ``text`` and lists ``tools``."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return "\n\n".join(part for part in (text, f"{self.head}{listed}{self.foot}" if tools else "") if part)

    def render(
        self,
        tokenizer: TemplateTokenizer,
        messages: Sequence[Message],
        tools: Sequence[JsonObject] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt, by the tokenizer's own template. Raises ``RenderError`` for what that cannot express."""
        wire = [to_wire(message) for message in messages]
        return chat_text(tokenizer, wire, tools, cue=add_generation_prompt, options=self.options)


_CHATML, _LLAMA = ("<|im_end|>", "<|endoftext|>"), ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_QWEN = ChatTemplate(_CHATML, head=_QWEN_HEAD, foot=_QWEN_FOOT)
_LLAMA_3 = ChatTemplate(_LLAMA, parse_bare_json, _OBJECTS, foot=_AN_EXAMPLE + _BARE_CALL)

TEMPLATES: dict[str, ChatTemplate] = {
    "hermes": ChatTemplate(("<|im_end|>", "<|end_of_text|>")),
    "llama3": _LLAMA_3,
    "llama3.1": _LLAMA_3,
    "qwen2.5": _QWEN,
    "qwen3": _QWEN,
    "qwen3-no-thinking": ChatTemplate(_CHATML, head=_QWEN_HEAD, foot=_QWEN_FOOT, options={"enable_thinking": False}),
    "qwen3-instruct": _QWEN,
    "smollm2": ChatTemplate(_CHATML),
}


def template_for(name: str) -> ChatTemplate:
    """The template of a family. Raises ``ConfigError`` for a name that no family has."""
    if (template := TEMPLATES.get(name.lower())) is None:
        raise ConfigError(unknown_name("chat template", name, TEMPLATES))
    return template

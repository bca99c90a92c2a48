"""The templates of SmolLM2 and Hermes: ChatML, with tools in Hermes' own form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.base import arguments_text, refuse_empty, to_json, with_calls, without_stop
from openhands_rl_plugin.core.templates.parsed import ParsedAnswer
from openhands_rl_plugin.core.templates.tool_call_json import parse_tool_call_json
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall

_OPENED = "<|im_start|>assistant\n"
_SMOL_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_HERMES_HEAD = (
    "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags. "
    "You may call one or more functions to assist with the user query. Don't make assumptions about what values to "
    "plug into functions. Here are the available tools: <tools> "
)
_HERMES_FOOT = (
    " </tools>Use the following pydantic model json schema for each tool call you will make: "
    '{"properties": {"name": {"title": "Name", "type": "string"}, "arguments": {"title": "Arguments", "type": '
    '"object"}}, "required": ["name", "arguments"], "title": "FunctionCall", "type": "object"}}\n'
    "For each function call return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags as follows:\n<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</tool_call>'
)
_PYTHON = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"}
_NO_TYPE = "Union[]"
"""The template's text for a schema without a type (and for the items of a list, which it looks up wrongly)."""


@dataclass(frozen=True)
class SmolLM2:
    """SmolLM2: the template knows no tools; calls are written into the content, or they would be lost."""

    stop: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        refuse_empty(messages)
        system = "" if messages[0].role == "system" else f"<|im_start|>system\n{_SMOL_SYSTEM}<|im_end|>\n"
        return system + _plain(messages) + (_OPENED if add_generation_prompt else "")

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_tool_call_json(without_stop(text, self.stop), tools)


@dataclass(frozen=True)
class Hermes:
    """Hermes 2 Pro and Hermes 3: with tools their ``tool_use`` template (which leaves out what is said beside calls),
    without tools plain ChatML.
    """

    beginning: str = "<|begin_of_text|>"
    stop: tuple[str, ...] = ("<|im_end|>", "<|end_of_text|>")

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        refuse_empty(messages)
        opened = _OPENED if add_generation_prompt else ""
        if not tools:
            return self.beginning + _plain(messages) + opened
        offered = "\n".join(_hermes_tool(tool) for tool in tools)
        system = f"{self.beginning}<|im_start|>system\n{_HERMES_HEAD}{offered}{_HERMES_FOOT}<|im_end|>\n"
        return "".join([system, *(_hermes_message(messages, at) for at in range(len(messages))), opened])

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_tool_call_json(without_stop(text, self.stop), tools)


def _plain(messages: Sequence[Message]) -> str:
    return "".join(f"<|im_start|>{message.role}\n{with_calls(message)}<|im_end|>\n" for message in messages)


def _hermes_message(messages: Sequence[Message], at: int) -> str:
    message = messages[at]
    if message.role == "tool":
        return "".join(_hermes_response(messages, at))
    if message.role == "assistant" and message.tool_calls:
        return f"<|im_start|>assistant{''.join(_hermes_call(call) for call in message.tool_calls)}<|im_end|>\n"
    return f"<|im_start|>{message.role}\n{message.content or ''}<|im_end|>\n"


def _hermes_call(call: ToolCall) -> str:
    return f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {arguments_text(call)}}}\n</tool_call>'


def _hermes_response(messages: Sequence[Message], at: int) -> Iterator[str]:
    """One result; several in a row share one turn, which the template ends without a line break."""
    if at > 0 and messages[at - 1].role != "tool":
        yield "<|im_start|>tool\n"
    is_last = at == len(messages) - 1
    yield f"<tool_response>\n{messages[at].content}\n</tool_response>"
    if not is_last:
        yield "\n"
    if is_last or messages[at + 1].role != "tool":
        yield "<|im_end|>"


def _hermes_tool(tool: JsonObject) -> str:
    """A tool as a signature, its documentation and its schema, with the template's missing line breaks."""
    function = _object(tool.get("function")) or tool
    parameters = _object(function.get("parameters"))
    properties = _object(parameters.get("properties"))
    name = str(function.get("name", ""))
    signature = ", ".join(f"{key}: {_python_type(schema)}" for key, schema in properties.items())
    documentation = "".join(
        f"        {key}({_python_type(schema)}): {str(_object(schema).get('description', '')).strip()}"
        for key, schema in properties.items()
    )
    return (
        f'{{"type": "function", "function": {{"name": "{name}", "description": "{name}({signature}) - '
        f"{function.get('description', '')}\n\n{'    Args:\n' if properties else ''}{documentation}"
        f'", "parameters": {to_json(parameters) if properties else "{}"}}}'
    )


def _python_type(schema: JsonValue) -> str:
    spec = _object(schema)
    kind = spec.get("type")
    match kind:
        case str() if kind in _PYTHON:
            return _PYTHON[kind]
        case "array":
            return f"list[{_NO_TYPE}]"
        case "object" if "additionalProperties" in spec:
            return f"dict[str, {_python_type(spec['additionalProperties'])}]"
        case "object":
            return "dict"
        case list():
            return f"Union[{','.join(_python_type({'type': one}) for one in kind)}]"
        case None if "type" not in spec:
            return _NO_TYPE
        case _:
            return "Any"


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}

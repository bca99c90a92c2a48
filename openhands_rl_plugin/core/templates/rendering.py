"""The interface of a model family's template, and the pieces that the families share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import ConfigError, unknown_name
from openhands_rl_plugin.core.templates.json_calls import parse_bare_json, parse_tool_call_json, render_tool_call
from openhands_rl_plugin.core.templates.parsing import ParsedAnswer, RenderError
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall


class ChatTemplate(Protocol):
    """How one family of models reads a conversation and writes its answer.

    ``stop``: strings that end an answer. The text is that of the family's own Hugging Face chat template, with null
    content as empty where that template would refuse it.
    """

    @property
    def stop(self) -> tuple[str, ...]: ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text. Raises ``RenderError`` for messages that the family cannot express."""
        ...

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        """Take an answer apart; with ``tools``, calls that do not keep to them are problems. Never raises."""
        ...


def to_json(value: object, indent: int | None = None) -> str:
    """JSON as the ``tojson`` filter of Hugging Face's templates prints it: nothing escaped, nothing sorted."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def arguments_object(call: ToolCall) -> str:
    """The arguments for templates that take an object: formatted again; text that is no object as a string."""
    text = call.arguments or "{}"
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return to_json(text)
    return to_json(value if isinstance(value, dict) else text)


def arguments_text(call: ToolCall) -> str:
    """The arguments as templates print them that take text: exactly as the model wrote them."""
    return call.arguments or "{}"


def with_calls(message: Message) -> str:
    """Content and calls as one text, for templates that know no calls and would drop them."""
    written = [render_tool_call(call) for call in message.tool_calls]
    return "\n".join([message.content, *written] if message.content else written)


def without_stop(text: str, stop: Sequence[str]) -> str:
    """The answer without a stop string at its end."""
    return next((text.removesuffix(one) for one in stop if text.endswith(one)), text)


def refuse_empty(messages: Sequence[Message]) -> None:
    """A conversation needs a message."""
    if not messages:
        raise RenderError("a conversation without messages cannot be rendered; give at least one")


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


_LLAMA_STOP = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

_BEGINNING = "<|begin_of_text|>"
_LLAMA_OPENED = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_LLAMA_TOOLS_HEAD = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    'answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument '
    "name and its value}.Do not use variables.\n\n"
)


@dataclass(frozen=True)
class Llama3:
    """Llama 3: the template knows no tools; calls are written into the content, or they would be lost."""

    stop: tuple[str, ...] = _LLAMA_STOP

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        refuse_empty(messages)
        turns = (
            _turn(message.role, with_calls(message).strip() if message.tool_calls else _trimmed(message))
            for message in messages
        )
        return _BEGINNING + "".join(turns) + (_LLAMA_OPENED if add_generation_prompt else "")

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_bare_json(without_stop(text, self.stop), tools)


@dataclass(frozen=True)
class Llama31:
    """Llama 3.1: tools stand in the first message after the system's; one call a turn, without text beside it.

    ``today`` is the date in the system message; the template's own is fixed, so that prompts do not change overnight.
    """

    today: str = "26 Jul 2024"
    stop: tuple[str, ...] = _LLAMA_STOP

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        refuse_empty(messages)
        rest = list(messages)
        system = _trimmed(rest.pop(0)) if messages[0].role == "system" else ""
        environment = "Environment: ipython\n" if tools else ""
        dates = f"Cutting Knowledge Date: December 2023\nToday Date: {self.today}\n\n"
        parts = [_BEGINNING, _turn("system", f"{environment}{dates}{system}")]
        if tools:
            if not rest:
                raise RenderError("Llama 3.1 shows tools in the first message after the system's; add one")
            offered = "".join(f"{to_json(tool, indent=4)}\n\n" for tool in tools)
            parts.append(_turn("user", f"{_LLAMA_TOOLS_HEAD}{offered}{_trimmed(rest.pop(0))}"))
        parts += [_message(message) for message in rest]
        return "".join(parts) + (_LLAMA_OPENED if add_generation_prompt else "")

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_bare_json(without_stop(text, self.stop), tools)


def _message(message: Message) -> str:
    if message.tool_calls:
        call, *others = message.tool_calls
        if others:
            raise RenderError("Llama 3.1 writes one call a turn; split the message into one for each call")
        return _turn("assistant", f'{{"name": "{call.name}", "parameters": {arguments_object(call)}}}')
    if message.role == "tool":
        return _turn("ipython", str(None) if message.content is None else to_json(message.content))
    return _turn(message.role, _trimmed(message))


def _trimmed(message: Message) -> str:
    """The content without white space around it; the template prints null as Python does."""
    return str(message.content).strip()


def _turn(role: str, content: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"


_QWEN_STOP = ("<|im_end|>", "<|endoftext|>")

_DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_QWEN_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOT = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_QWEN_OPENED = "<|im_start|>assistant\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Qwen25:
    """Qwen2.5: arguments are formatted again as JSON, so a model's own spacing is not kept."""

    stop: tuple[str, ...] = _QWEN_STOP

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        refuse_empty(messages)
        first = messages[0]
        system = (first.content or "") if first.role == "system" else _DEFAULT_SYSTEM
        parts = [f"<|im_start|>system\n{system}", f"\n\n{_tools(tools)}" if tools else "", "<|im_end|>\n"]
        for at, message in enumerate(messages):
            if message.role == "tool":
                parts += _tool_response(messages, at, str(message.content))
            elif message.role == "assistant" and message.tool_calls:
                content = f"\n{message.content}" if message.content else ""
                calls = "".join(f"\n{_call(call, arguments_object)}" for call in message.tool_calls)
                parts.append(f"<|im_start|>assistant{content}{calls}<|im_end|>\n")
            elif message.role != "system" or at > 0:
                parts.append(f"<|im_start|>{message.role}\n{message.content or ''}<|im_end|>\n")
        return "".join(parts) + (_QWEN_OPENED if add_generation_prompt else "")

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_tool_call_json(without_stop(text, self.stop), tools)


@dataclass(frozen=True)
class Qwen3Instruct:
    """Qwen3 of 2507 without thoughts: content and arguments are written as they are."""

    stop: tuple[str, ...] = _QWEN_STOP

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        opened = _QWEN_OPENED if add_generation_prompt else ""
        return _qwen3(messages, tools, _as_it_is) + opened

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_tool_call_json(without_stop(text, self.stop), tools)


@dataclass(frozen=True)
class Qwen3:
    """Qwen3 with thoughts: those of turns before the last question are left out.

    With ``thinking`` off an answer begins behind an empty thought.
    """

    thinking: bool = True
    stop: tuple[str, ...] = _QWEN_STOP

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        question = _last_question(messages)

        def spoken(messages: Sequence[Message], at: int) -> _Spoken:
            return _with_thought(messages[at].content or "", at > question, at == len(messages) - 1)

        text = _qwen3(messages, tools, spoken)
        if not add_generation_prompt:
            return text
        return text + _QWEN_OPENED + ("" if self.thinking else _NO_THOUGHT)

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_tool_call_json(without_stop(text, self.stop), tools)


class _Spoken(NamedTuple):
    """An assistant's content as it is written, and the part of it outside of thoughts."""

    written: str
    content: str


_Speaking = Callable[[Sequence[Message], int], _Spoken]


def _as_it_is(messages: Sequence[Message], at: int) -> _Spoken:
    content = messages[at].content or ""
    return _Spoken(content, content)


def _with_thought(content: str, is_current: bool, is_last: bool) -> _Spoken:
    """Keep the thought of a current turn, if it has one or is the last message, and leave out that of another."""
    thought = ""
    if "</think>" in content:
        before = content.split("</think>")[0]
        thought = before.rstrip("\n").split("<think>")[-1].lstrip("\n")
        content = content.split("</think>")[-1].lstrip("\n")
    if is_current and (is_last or thought):
        inside = thought.strip("\n")
        return _Spoken(f"<think>\n{inside}\n</think>\n\n" + content.lstrip("\n"), content)
    return _Spoken(content, content)


def _last_question(messages: Sequence[Message]) -> int:
    """The index of the last message of the user that is no tool's answer; the last index when there is none."""
    for at in range(len(messages) - 1, -1, -1):
        content = messages[at].content
        if messages[at].role != "user" or content is None:
            continue
        if not (content.startswith("<tool_response>") and content.endswith("</tool_response>")):
            return at
    return len(messages) - 1


def _qwen3(messages: Sequence[Message], tools: Sequence[JsonObject], spoken: _Speaking) -> str:
    refuse_empty(messages)
    system = (messages[0].content or "") if messages[0].role == "system" else None
    parts: list[str] = []
    if tools:
        head = "" if system is None else f"{system}\n\n"
        parts.append(f"<|im_start|>system\n{head}{_tools(tools)}<|im_end|>\n")
    elif system is not None:
        parts.append(f"<|im_start|>system\n{system}<|im_end|>\n")
    for at, message in enumerate(messages):
        if message.role == "tool":
            parts += _tool_response(messages, at, message.content or "")
        elif message.role == "assistant":
            written, content = spoken(messages, at)
            calls = "\n".join(_call(call, arguments_text) for call in message.tool_calls)
            between = "\n" if calls and content else ""
            parts.append(f"<|im_start|>assistant\n{written}{between}{calls}<|im_end|>\n")
        elif message.role == "user" or at > 0:
            parts.append(f"<|im_start|>{message.role}\n{message.content or ''}<|im_end|>\n")
    return "".join(parts)


def _tools(tools: Sequence[JsonObject]) -> str:
    return _QWEN_TOOLS_HEAD + "".join(f"\n{to_json(tool)}" for tool in tools) + _TOOLS_FOOT


def _call(call: ToolCall, arguments: Callable[[ToolCall], str]) -> str:
    # The name is not escaped: so do the templates.
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments(call)}}}\n</tool_call>'


def _tool_response(messages: Sequence[Message], at: int, content: str) -> Iterator[str]:
    """One result; several in a row share one turn of the user."""
    if at == 0 or messages[at - 1].role != "tool":
        yield "<|im_start|>user"
    yield f"\n<tool_response>\n{content}\n</tool_response>"
    if at == len(messages) - 1 or messages[at + 1].role != "tool":
        yield "<|im_end|>\n"


TEMPLATES: dict[str, ChatTemplate] = {
    "hermes": Hermes(),
    "llama3": Llama3(),
    "llama3.1": Llama31(),
    "qwen2.5": Qwen25(),
    "qwen3": Qwen3(),
    "qwen3-no-thinking": Qwen3(thinking=False),
    "qwen3-instruct": Qwen3Instruct(),
    "smollm2": SmolLM2(),
}


def template_for(name: str) -> ChatTemplate:
    """The template of a family. Raises ConfigError for a name that no family has."""
    if (template := TEMPLATES.get(name.lower())) is None:
        raise ConfigError(unknown_name("chat template", name, TEMPLATES))
    return template

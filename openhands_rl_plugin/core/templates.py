"""Conversations as text: chat templates, calls in the text of an answer, SWE-Gym's text form, and a verifier's log.

Serving and training render by a tokenizer's own chat template, as vLLM does.

Calls in a text are JSON objects between ``<tool_call>`` tags or bare, or OpenHands' ``<function=NAME>``. Of a family of
models strict JSON is a call; what is not is a problem, whose message is for the model. The calls of OpenHands, of
SWE-Gym's rows and of the V1 SDK have a ``<parameter=NAME>value</parameter>`` for each argument, and end with
``</function>``. Nothing here raises on a model's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched, groupby, takewhile
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import JsonValue
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary, unknown_name
from openhands_rl_plugin.core.messages import (
    SpokenMessage,
    WireMessage,
    calls_in,
    reasoning_in,
    reasoning_with,
    text_in,
    text_of,
)
from openhands_rl_plugin.core.types import FailureKind, JsonObject, Message, ToolCall, Trajectory


class RenderError(RLError):
    """A call or a conversation cannot be written in the wanted form."""


class ParsedAnswer(NamedTuple):
    """An answer taken apart. Every call that the model began is in ``calls`` or has a message in ``problems``.

    ``before`` is all text ahead of the first of them (with the thought, as the model wrote it) and ``after`` all other
    text that belongs to none. ``thought`` is what stood in ``<think>``.
    """

    before: str
    calls: tuple[ToolCall, ...] = ()
    after: str = ""
    problems: tuple[str, ...] = ()
    thought: str = ""


@dataclass(frozen=True)
class CallForm:
    """How a family writes calls. ``begin`` and ``resume`` are patterns: of what a call begins with, and of where the
    text goes on behind a malformed one. ``end`` stands behind the object; ``example`` is for a model's eyes.
    """

    begin: str
    resume: str
    end: str
    example: str


TAGGED = CallForm(
    r"<tool_call>|<tool_?c?a?l?l?\Z",  # the end may cut it
    r"</tool_call>|(?=<tool_call>|</?think>)",
    "</tool_call>",
    'Write <tool_call>{"name": "...", "arguments": {...}}</tool_call> with strict JSON in it',
)
BARE = CallForm(
    r'<\|python_tag\|>|(?=\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?+["\']name["\']\s*+:)',
    r"(?=<\|python_tag\|>|</?think>)",
    "",
    'Write {"name": "...", "parameters": {...}} in strict JSON and nothing else',
)


def _members(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    if len(members := dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return members


_DECODER = json.JSONDecoder(object_pairs_hook=_members)
_SPACE = re.compile(r"\s*+")
_MEMBER = re.compile(r'\s*+[{,]\s*+("(?:[^"\\]|\\.)*+")\s*+:\s*+', re.DOTALL)
_FENCED = re.compile(r"\s*+```(?:json)?\s*+(?=\{)", re.IGNORECASE)
_ARGUMENTS = ("arguments", "parameters")


def render_tool_call(call: ToolCall) -> str:
    """The call between tags; its arguments stay as they are."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments}}}\n</tool_call>'


def parse_calls(text: str, tools: Sequence[JsonObject] = (), form: CallForm = TAGGED) -> ParsedAnswer:
    """Take an answer apart. One without tags that is a fenced object, naming one of ``tools``, is its call."""
    begin = re.compile(f"</?think>|{form.begin}", re.IGNORECASE)
    last_arguments = max(text.rfind(quote + name + quote) for name in _ARGUMENTS for quote in "\"'")
    found: list[tuple[int, int, ToolCall | str]] = []
    thoughts: list[str] = []
    at = thought_until = 0
    thinking: int | None = None
    while tag := begin.search(text, at):
        start, at = tag.span()
        if tag[0].lower() == "<think>":
            thinking = at if thinking is None else thinking
        elif tag[0].lower() == "</think>":
            if thinking is None and not thoughts:
                thinking, found = 0, []  # the prompt opened this thought
            thoughts += [] if thinking is None else [text[thinking:start]]
            thinking, thought_until = None, at
        elif thinking is not None or (not tag[0] and last_arguments < at and text[:start].strip()):
            at += not tag[0]  # it is no call
        else:
            at, call = _read(text, at, form, bare=not tag[0])
            found += [(start, at, call)] if call else []
    if thinking is not None:
        thoughts.append(text[thinking:])
        thought_until = len(text)
    if tools and not found and form is TAGGED and (fence := _FENCED.match(text)):
        end, call = _read(text, fence.end(), BARE, bare=True)
        offered = [function_of(tool).get("name") for tool in tools]
        if isinstance(call, ToolCall) and text[end:].strip() == "```" and call.name in offered:
            found = [(0, len(text), call)]
    problems = [each for *_, each in found if isinstance(each, str)]
    # A model that only thought of a call did not mean its thought to be the answer.
    if not found and not text[thought_until:].strip() and re.search(form.begin, "\n".join(thoughts), re.IGNORECASE):
        problems.append("The call was not executed: it stands inside <think>. Write calls after </think>.")
    edges = [0, *(edge for start, end, _ in found for edge in (start, end)), len(text)]
    before, *others = (text[one:other] for one, other in batched(edges, 2))
    calls = tuple(each for *_, each in found if isinstance(each, ToolCall))
    return ParsedAnswer(before, calls, "".join(others), tuple(problems), "\n".join(map(str.strip, thoughts)))


def _read(text: str, at: int, form: CallForm, *, bare: bool) -> tuple[int, ToolCall | str | None]:
    """The end of the call at ``at``, and the call or its error; ``None`` for a ``bare`` object that is no call."""
    at = _behind_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
        from_json(text[at:end].encode(), allow_inf_nan=False)  # stricter, and less deep
        key = next((each for each in _ARGUMENTS if isinstance(value, dict) and each in value), None)
        if key is None and bare:
            return end, None
        name = value.get("name") if key else None
        if not isinstance(name, str) or not name or not isinstance(value[key], dict):
            raise ValueError('a call needs a "name" and an object of "arguments"')
        behind = _behind_space(text, end)
        closing = text[behind : behind + len(form.end)]
        if not form.end.startswith(closing.lower()):
            raise ValueError(f"{closing!r} stands behind its JSON")
        arguments = ""
        while member := _MEMBER.match(text, at):
            _, at = _DECODER.raw_decode(text, member.end())
            arguments = text[member.end() : at] if json.loads(member[1]) == key else arguments
        return behind + len(closing) if form.end else end, ToolCall(name=name, arguments=arguments)
    except (ValueError, RecursionError) as error:
        resumed = re.compile(form.resume, re.IGNORECASE).search(text, at)
        wrong = isinstance(error, json.JSONDecodeError) and f"{error.msg} at {text[error.pos : error.pos + 20]!r}"
        return resumed.end() if resumed else len(text), f"A call was not executed: {wrong or error}. {form.example}."


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


Types = frozenset[str]
"""Names of types of JSON Schema."""
STRING: Types = frozenset({"string"})
"""The type of a parameter that no tool declares."""

_SURROGATE = re.compile("[\ud800-\udfff]")  # no file can hold one alone
_UNWRITABLE = re.compile(f"</?(?:function|parameter)|{_SURROGATE.pattern}", re.IGNORECASE)
# Servers end an answer before the closing tag, which is the stop sequence.
CALL = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|</function\Z|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)</parameter>", re.DOTALL)


def calls_in_text(text: str, tools: Sequence[JsonObject] = ()) -> tuple[ToolCall, ...]:
    """The calls of an answer, as OpenHands finds them: a value ends at the first closing tag.

    ``tools`` declare the types of the parameters. Arguments in a body that is JSON are taken as they stand.
    """
    known, calls = {function_of(tool).get("name"): parameters_of(tool) for tool in tools}, list[ToolCall]()
    for name, body in CALL.findall(text):
        own = known.get(name, {})
        # No search runs beyond the last closing tag, once for each opening one.
        closed, plain = body[: body.rfind("</parameter>") + len("</parameter>")], body.strip()
        values = {each: read_value(value, own.get(each, STRING)) for each, value in PARAMETER.findall(closed)}
        calls.append(ToolCall(name=name, arguments=plain if plain.startswith("{") else _dumps(values)))
    return tuple(calls)


def without_calls(text: str) -> str:
    """The text of a completion without its calls."""
    return CALL.sub("", text).strip()


def parameters_of(tool: JsonObject | None) -> Mapping[str, Types]:
    """The parameters of an OpenAI tool (or of its ``function`` part alone) with their types. Nulls count as absent."""
    schema = function_of(tool).get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return {name: _types(each) for name, each in (properties.items() if isinstance(properties, dict) else ())}


def function_of(tool: JsonObject | None) -> JsonObject:
    """The ``function`` part of an OpenAI tool, or the tool where it is that part alone."""
    inner = (tool or {}).get("function")
    return inner if isinstance(inner, dict) else tool or {}


def _types(schema: JsonValue) -> Types:
    """The types of a schema; one that declares none is of text, as in OpenHands."""
    declared = schema if isinstance(schema, dict) else {}
    named, branches = declared.get("type"), declared.get("anyOf") or declared.get("oneOf")
    if isinstance(branches, list) and not named:
        return frozenset[str]().union(*map(_types, branches))
    return frozenset(map(str, named if isinstance(named, list) else [named])) if named else STRING


def read_value(text: str, types: Types) -> JsonValue:
    """The value of ``text``. Text that cannot be of the parameter's ``types`` stays text."""
    if len(text) > 1 and text[0] == text[-1] == "\n":
        text = text[1:-1]
    try:
        value = text if "string" in types else json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def render_call(call: ToolCall) -> str:
    """The call as text: strings as they are, other values as JSON.

    Raises ``RenderError`` when the arguments are not a JSON object, or a name or a value cannot stand in a tag.
    """
    if not _can_stand(call.name):
        raise RenderError(f"the function name {call.name!r} cannot stand in a tag; rename the function")
    try:
        arguments = json.loads(call.arguments or "{}")
        json.dumps(arguments, allow_nan=False)  # NaN and the infinities are no JSON, though Python reads them
    except (ValueError, RecursionError) as error:
        raise RenderError(f"the arguments of {call.name!r} are not JSON ({error}); mend or drop the call") from error
    if not isinstance(arguments, dict):
        raise RenderError(f"the arguments of {call.name!r} are no JSON object; mend or drop the call")
    written = ""
    for name, value in arguments.items():
        plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if not _can_stand(name) or _UNWRITABLE.search(plain):
            raise RenderError(f"the argument {name!r:.80} of {call.name!r} cannot stand in a tag; drop the call")
        written += f"<parameter={name}>{f'\n{plain}\n' if '\n' in plain else plain}</parameter>\n"
    return f"<function={call.name}>\n{written}</function>"


def _can_stand(name: str) -> bool:
    """Whether a name is read back from a tag as it is."""
    return bool(name) and name == name.strip(" \t\r\n\"'") and not any(mark in name for mark in "<>\n")


def _dumps(value: JsonValue) -> str:
    """The value as JSON in Unicode, in ASCII where only that can be written to a file."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


FINISH = "finish"
"""The name of OpenHands' tool that ends an episode; its ``message`` is the answer."""


def last_answer(trajectory: Trajectory) -> str | None:
    """The agent's last words: the message of its ``finish``, also of one in the text, or a reply without a call.

    ``None`` where there are none, or where its last message is another call.
    """
    last = next((each for each in reversed(trajectory.messages()) if each.role == "assistant"), None)
    if last is None or not (calls := last.tool_calls or calls_in_text(last.content or "")):
        return None if last is None else last.content
    try:
        given = json.loads(next(call.arguments for call in calls if call.name == FINISH))
    except (ValueError, RecursionError, StopIteration):
        return None
    message = given.get("message") if isinstance(given, dict) else None
    return message if isinstance(message, str) else None


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


@dataclass(frozen=True)
class ChatTemplate:
    """One family. ``stop``: strings that end a completion.

    ``head`` and ``foot`` stand around the tools in the system message.
    """

    stop: tuple[str, ...]
    form: CallForm = TAGGED
    head: str = "# Tools\n\nThese functions can be called:\n"
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
_LLAMA_3 = ChatTemplate(_LLAMA, BARE, foot=_AN_EXAMPLE + _BARE_CALL)

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


def single_call_turns(messages: Sequence[Message]) -> list[Message]:
    """Split every message with several calls into one message a call, each followed by its own result.

    The text and the reasoning stand with the first of the calls. Raises ``RenderError`` where one of several calls got
    no result: between two others it cannot stand.
    """
    out: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls) < 2:
            out.append(message)
            continue
        following = [*takewhile(lambda each: each.role == "tool", messages[at:])]
        results, at = {each.tool_call_id: each for each in following}, at + len(following)
        for number, call in enumerate(message.tool_calls):
            if call.id not in results:
                raise RenderError("several calls were made at once and some of them got no result")
            emptied = {"content": None, **({"reasoning": None} if isinstance(message, SpokenMessage) else {})}
            split = message.model_copy(update={"tool_calls": (call,), **(emptied if number else {})})
            out += [split, results[call.id]]
    return out


_HEAD = "\nYou have access to the following functions:\n\n"
# The block that says IMPORTANT is never closed in the prompt of the published rows, and is kept so.
_TAIL = """

If you choose to call a function ONLY reply in the following format with NO suffix:

<function=example_function_name>
<parameter=example_parameter_1>value_1</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format, start with <function= and end with </function>
- Required parameters MUST be specified
- Only call one function at a time
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after.
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
"""


def system_prompt(content: str, tools: Sequence[JsonObject]) -> str:
    """``content`` with the description of the tools and the rules of the text form; itself without tools."""
    described = (_describe(number, function_of(tool)) for number, tool in enumerate(tools, 1))
    return f"{content}{_HEAD}{'\n'.join(described)}{_TAIL}" if tools else content


def _describe(number: int, function: JsonObject) -> str:
    schema, listed = function.get("parameters"), "No parameters are required for this function.\n"
    if isinstance(schema, dict):
        required, properties = schema.get("required") or (), schema.get("properties")
        parameters = enumerate(properties.items() if isinstance(properties, dict) else (), 1)
        lines = (
            f"  ({at}) {name} {_declared(info, isinstance(required, list | tuple) and name in required)}\n"
            for at, (name, info) in parameters
        )
        listed = f"Parameters:\n{''.join(lines)}"
    name, about = function.get("name", ""), function.get("description", "")
    begin = f"---- BEGIN FUNCTION #{number}: {name} ----\nDescription: {about}\n"
    return f"{begin}{listed}---- END FUNCTION #{number} ----\n"


def _declared(info: JsonValue, required: bool) -> str:
    known = info if isinstance(info, dict) else {}
    allowed, status = known.get("enum"), "required" if required else "optional"
    values = ", ".join(f"`{value}`" for value in allowed) if isinstance(allowed, list) else None
    suffix = "" if values is None else f"\nAllowed values: [{values}]"
    return f"({known.get('type', 'string')}, {status}): {known.get('description', 'No description provided')}{suffix}"


def text_messages(messages: Sequence[Message], tools: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Messages with at most one call each in the text form. Raises ``RenderError``."""
    if tools and (not messages or messages[0].role != "system"):
        yield {"role": "system", "content": system_prompt("", tools)}
    names: dict[str | None, str] = {}
    for at, message in enumerate(messages):
        content, role = message.content or "", message.role
        if role == "system" and at == 0:
            content = system_prompt(content, tools)
        elif role == "tool":
            name = message.name or names.get(message.tool_call_id, "function")
            content, role = f"EXECUTION RESULT of [{name}]:\n{content}", "user"
        for call in message.tool_calls:
            names[call.id] = call.name
            content = "\n\n".join(filter(None, (content, render_call(call))))
        reasoning = reasoning_with(message)
        yield {"role": role, "content": content, **({} if reasoning is None else {"reasoning_content": reasoning})}


SYSTEM = """You are an expert judge evaluating AI assistant interactions. Your task is to determine if the assistant \
successfully resolved the user's request.

Key evaluation criteria:
1. Did the assistant complete the main task requested by the user?
2. Did the assistant handle all edge cases and requirements specified?
3. Were there any errors or issues in the final solution?
4. Did the assistant verify the solution works as intended?

Respond only with "<judgement>YES</judgement>" or "<judgement>NO</judgement>"."""
_USER = """Please evaluate the following interaction between an AI assistant and a user:

=== INTERACTION LOG ===
{log}
=== END INTERACTION ===

Based on the above interaction, did the assistant successfully resolve the user's initial request? Respond with YES \
or NO."""


_RULE = "-" * 100 + "\n"


class LogSection(NamedTuple):
    """A part of a log, without the rule above it. The message after the system's is the instruction."""

    kind: Literal["system", "instruction", "turn"]
    text: str


def question(log: str) -> list[JsonObject]:
    """The two messages that ask for a judgement of an interaction log."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _USER.format(log=log)}]


def joined(sections: Sequence[LogSection]) -> str:
    """The log that consists of these sections; turns are counted in pairs of messages."""
    return "".join(section.text if section.kind == "system" else _RULE + section.text for section in sections) + _RULE


def log_sections(messages: Sequence[Message]) -> list[LogSection]:
    """The parts of the log in order: the system prompt, the instruction, and every other message."""
    sections: list[LogSection] = []
    if messages and messages[0].role == "system":
        text = f"*** System Message that describes the assistant's behavior ***\n{messages[0].content or ''}\n"
        sections.append(LogSection("system", text))
        messages = messages[1:]
    for at, message in enumerate(_user_merged(messages)):
        title = "TOOL EXECUTION RESULT" if message.role == "tool" else message.role.upper()
        text = f"*** Turn {at // 2 + 1} - {title} ***\n{message.content or ''}\n"
        for number, call in enumerate(message.tool_calls):
            text += f"### Tool Call {number}\n{_as_text(call)}\n"
        sections.append(LogSection("instruction" if at == 0 else "turn", text))
    return sections


def _user_merged(messages: Sequence[Message]) -> Iterator[Message]:
    for by_user, group in groupby(messages, key=lambda message: message.role == "user"):
        if by_user:
            yield Message(role="user", content="\n".join(message.content or "" for message in group))
        else:
            yield from group


def _as_text(call: ToolCall) -> str:
    try:
        return render_call(call)
    except RenderError:
        # The judge sees a call that could not be executed as it was written.
        return f"<function={call.name}>\n{call.arguments}\n</function>"

"""An environment of tools: the model calls them until it gives its answer.

    environment = ToolEnvironment(tools=(ThinkTool(), FinalTool(), LookUp()))

Each model response is one step, a malformed one too. When one of the tools ends the episode (``FinalTool``), only its
argument reaches the user; otherwise a response without calls is the final answer."""

from __future__ import annotations

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field, ImportString, JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import (
    BadEnvironmentError,
    CaughtFailure,
    ConfigError,
    boundary,
    describe,
    unknown_name,
)
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.templates import template_for
from openhands_rl_plugin.core.types import FailureKind, Frozen, JsonObject, Message, Observation, Task, ToolCall

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator


_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.IGNORECASE | re.DOTALL)
_UP_TO_THOUGHT_END = re.compile(r"\A.*</think>", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A parsed response: ``calls`` to execute, ``problems`` of invalid calls, and ``speech``, the text around them.

    The speech is without reasoning and without white space at its ends.
    """

    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    speech: str = ""


class Dialect:
    """How tools are offered, calls are parsed and results are formatted.

    ``template``: the model family in whose format calls stand in the text, and the server gets no tools; results then
    form one user message of ``<tool_response>`` blocks, as in the families' own templates. Empty: calls are the
    server's tool calls, and one that is left in the text is a problem: the server could not parse it.
    ``opens_thought``: the model's prompt ends with ``<think>``, so that every response begins with reasoning.
    Raises ``ConfigError`` for an unknown family.
    """

    def __init__(self, template: str = "", *, opens_thought: bool = False) -> None:
        self._native = not template
        self._template = template_for(template or "hermes")
        self._opening = "<think>" if opens_thought else ""

    def offered(self, tools: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
        """The tools in the request to the model server."""
        return tuple(tools) if self._native else ()

    def system(self, text: str, tools: Sequence[JsonObject]) -> str:
        """The system message that begins with ``text``."""
        return text if self._native else self._template.system(text, tools)

    def read(self, message: Message) -> ReadAnswer:
        """Parse a response. Never raises."""
        parsed = self._template.parse(self._opening + message.content if message.content else "")
        problems = [*parsed.problems]
        if self._native:
            problems += [f"The call of {call.name!r} was not executed: it stands in the text." for call in parsed.calls]
        calls = message.tool_calls if self._native else (*message.tool_calls, *parsed.calls)
        # A thought may lack its first or its last tag.
        speech = _UP_TO_THOUGHT_END.sub("", _THOUGHT.sub("", parsed.before + parsed.after))
        return ReadAnswer(calls, tuple(problems), speech.strip())

    def results(self, results: Sequence[tuple[ToolCall, str]]) -> tuple[Message, ...]:
        """The results of the calls, as messages."""
        if self._native:
            return tuple(
                Message(role="tool", content=text, tool_call_id=call.id or None, name=call.name)
                for call, text in results
            )
        blocks = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for _, text in results)
        return (Message(role="user", content=blocks),) if results else ()


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_CHARACTERS = 65_536
"""The most characters of a result."""


class ToolBase(ABC):
    """A tool that the model may call.

    ``parameters`` is the JSON Schema of an object; ``call`` gets only arguments that are valid against it.
    ``private``: its calls and results are never shown to users. ``ends``: a call ends the episode, and its result is
    the answer.
    """

    name: str
    description: str = ""
    parameters: JsonObject
    private: bool = False
    ends: bool = False

    def openai_tool(self) -> JsonObject:
        """The tool as an entry of ``tools`` in a chat request."""
        function: JsonObject = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @abstractmethod
    async def call(self, arguments: JsonObject) -> str:
        """Execute the call and return the observation for the model.

        The message of an exception becomes the observation, so that the model can react. ``InfrastructureError``
        instead fails the episode, which then is not a sample of the policy's behaviour.
        """


def _text_parameter(name: str, about: str) -> JsonObject:
    """The JSON Schema of an object with this text only."""
    fields: JsonObject = {name: {"type": "string", "description": about}}
    return {"type": "object", "properties": fields, "required": [name], "additionalProperties": False}


class ThinkTool(ToolBase):
    """Private notes, which only stay in the model's context."""

    name = "think"
    description = "Write private notes: plans, intermediate results, open questions. Nobody else reads them."
    parameters = _text_parameter("notes", "What to keep in mind.")
    private = True

    async def call(self, arguments: JsonObject) -> str:
        """Return a short confirmation; the thought is already in the context."""
        return "noted"


class FinalTool(ToolBase):
    """Gives the answer to the user and ends the episode."""

    name = "final"
    description = "Give the final answer to the user. This ends the task, so call it last and once."
    parameters = _text_parameter("answer", "The whole answer, as the user shall read it.")
    ends = True

    async def call(self, arguments: JsonObject) -> str:
        """Return the answer unchanged."""
        return str(arguments["answer"])


BUILT_IN: dict[str, type[ToolBase]] = {ThinkTool.name: ThinkTool, FinalTool.name: FinalTool}


def load_tool(name: str) -> ToolBase:
    """``"think"``, ``"final"`` or ``"module:Name"`` of a tool class or a tool.

    A class is instantiated in each call. Raises ``ConfigError``.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if ":" not in name:
        raise ConfigError(f'unknown tool {name!r}; available: {", ".join(sorted(BUILT_IN))}, or "module:Class"')
    try:
        found = TypeAdapter(ImportString).validate_python(name)
    except ValidationError as error:
        raise ConfigError(f"tool {name!r} cannot be loaded: {describe(error)}") from error
    if isinstance(found, type) and issubclass(found, ToolBase):
        return found()
    if isinstance(found, ToolBase):
        return found
    raise ConfigError(f"tool {name!r} is no ToolBase")


def validators(tools: Sequence[ToolBase]) -> dict[str, Draft202012Validator]:
    """Validators of the arguments of each tool, by name.

    Raises ``ConfigError`` for invalid or duplicate names and for an invalid JSON Schema.
    """
    # Imported late: with some packages installed it takes over a second, and plain conversations do not need it.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing import Registry

    found: dict[str, Draft202012Validator] = {}
    for tool in tools:
        if _NAME.fullmatch(tool.name) is None or tool.name in found:
            raise ConfigError(f"tool {tool.name!r} occurs twice, or its name has not 1 to 64 letters, digits, '_', '-'")
        try:
            Draft202012Validator.check_schema(tool.parameters)
        except SchemaError as error:
            raise ConfigError(f"tool {tool.name!r}: parameters are no JSON Schema: {error.message}") from error
        # An empty registry, so that no reference in a schema is fetched from the network.
        found[tool.name] = Draft202012Validator(tool.parameters, registry=Registry())
    return found


class TurnText(Frozen):
    """The text of a response that is not the answer, without reasoning and calls."""

    text: str


class ToolCallStarted(Frozen):
    """A call of a tool that is not private starts. ``arguments`` is JSON text, as the model wrote it."""

    call_id: str
    name: str
    arguments: str


class ToolResult(Frozen):
    """The result of a tool that is not private; ``ok`` is false when it failed."""

    call_id: str
    name: str
    content: str
    ok: bool = True


ToolEvent = TurnText | ToolCallStarted | ToolResult
ToolListener = Callable[[ToolEvent], None]


class _CallError(Exception):
    """A call has no result; ``code`` is the kind of error in the observation."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_arguments(text: str) -> JsonObject:
    """Parse strict JSON of an object; empty text is an empty object. Raises ``ValueError`` with the reason."""
    try:
        value = from_json(text.strip() or "{}", allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


_WITH_TOOLS = "You are a careful assistant. Solve the task step by step with the tools that you are given."
_PRIVATE = "What you give to {private} stays private."
_ENDING = "The user reads only what you give to {ending}: end every task with one call of it."
_SPEAKING = "When you know the answer, write it without calling a tool."


class ToolOptions(Frozen):
    """``tools``: names for ``load_tool``.

    ``template``: the model family whose format calls have in the text; empty: the server's own tool calls.
    ``opens_thought``: the model's prompt ends with ``<think>`` (Qwen3-Thinking, DeepSeek-R1), and the server leaves the
    reasoning in the response; all text up to ``</think>`` is then reasoning.
    ``system_prompt`` replaces the built-in words; a system message of the conversation is kept after it.
    ``tool_timeout`` is in seconds and bounds one call.
    """

    tools: tuple[str, ...] = (ThinkTool.name, FinalTool.name)
    template: str = ""
    opens_thought: bool = False
    system_prompt: str | None = None
    tool_timeout: float = Field(default=60.0, gt=0)


class ToolEnvironment:
    """One conversation with tools, as a ``protocols.Environment``.

    A task's ``data`` may hold ``messages`` (a conversation in OpenAI's format, to which ``instruction`` is appended as
    a user message) and ``label``, which is not part of the conversation but evidence for a reward.

    ``tools`` replace those that the options name; a tool with state must not be shared. ``listener`` receives the texts
    and calls that a user may see. Raises ``ConfigError`` for invalid tools or an unknown template.
    """

    Options = ToolOptions

    def __init__(
        self,
        options: ToolOptions | None = None,
        *,
        tools: Sequence[ToolBase] | None = None,
        listener: ToolListener | None = None,
    ) -> None:
        self.options = options or ToolOptions()
        given = [load_tool(name) for name in self.options.tools] if tools is None else tools
        self._validators = validators(given) if given else {}
        self._tools = {tool.name: tool for tool in given}
        self._listener = listener
        self._dialect = Dialect(self.options.template, opens_thought=self.options.opens_thought)
        self._schemas = tuple(tool.openai_tool() for tool in self._tools.values())
        self._ending = [name for name, tool in self._tools.items() if tool.ends]
        self._answer: str | None = None
        self._label: JsonValue = None
        self._open = False
        self._steps = 0
        self._calls: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    @property
    def info(self) -> EnvInfo:
        """The environment's info, with the tools that requests to the model server contain."""
        return EnvInfo(tools=self._dialect.offered(self._schemas))

    async def reset(self, task: Task) -> Observation:
        """Open the conversation: one system message (none when it would be empty), then the task's messages."""
        messages = [*_conversation(task)]
        if task.instruction:
            messages.append(Message(role="user", content=task.instruction))
        if all(message.role == "system" for message in messages):
            raise BadEnvironmentError(f"task {task.id!r} is empty: give it an instruction, or data.messages")
        given = [message.content for message in messages if message.role == "system" and message.content]
        text = self._dialect.system("\n\n".join(part for part in (self._prompt(), *given) if part), self._schemas)
        system = [Message(role="system", content=text)] if text else []
        self._label = task.data.get("label")
        self._open = True
        return Observation(messages=(*system, *(message for message in messages if message.role != "system")))

    async def step(self, action: Message) -> Observation:
        """Execute the calls of one response; without any, the observation is feedback for the model."""
        if not self._open:
            raise BadEnvironmentError("the conversation is not open: reset it first, and do not step after its end")
        self._steps += 1
        answer = self._dialect.read(action)
        # Where a tool delivers the answer, the text of a response is not for the user.
        spoken = answer.speech if not self._ending else ""
        if not answer.calls and not answer.problems and spoken:
            self._answer, self._open = spoken, False
            return Observation(messages=(), terminated=True)
        if self._listener is not None and spoken:
            self._listener(TurnText(text=spoken))
        results: list[tuple[ToolCall, str]] = []
        for at, call in enumerate(answer.calls):
            call = call if call.id else call.model_copy(update={"id": f"call_{self._steps}_{at}"})
            results.append((call, await self._result(call)))
        messages = self._dialect.results(results)
        problems = " ".join(answer.problems)
        if problems or not results:
            missing = f"The answer holds no tool call: call one of {', '.join(self._ending or self._tools)}."
            code = "invalid_action_format" if problems else "no_tool_call"
            messages += (Message(role="user", content=self._feedback(code, problems or missing)),)
        return Observation(messages=messages, terminated=not self._open)

    async def evidence(self) -> JsonObject:
        """The answer (``None``: none), the label, the number of steps, calls by tool name and errors by code."""
        return {
            "answer": self._answer,
            "label": self._label,
            "steps": self._steps,
            "calls": dict(sorted(self._calls.items())),
            "errors": dict(sorted(self._errors.items())),
        }

    async def close(self) -> None:
        """End the conversation."""
        self._open = False

    async def _result(self, call: ToolCall) -> str:
        """The observation of a call. Raises ``CaughtFailure`` if a tool's infrastructure failed."""
        try:
            text = await self._executed(call)
        except _CallError as error:
            return self._feedback(error.code, str(error))
        self._calls[call.name] += 1
        if not self._tools[call.name].ends:
            return _cut(text, MOST_CHARACTERS)
        self._answer, self._open = text, False
        return "delivered"

    async def _executed(self, call: ToolCall) -> str:
        """The text of the call's tool. Raises ``_CallError``, and ``CaughtFailure`` as ``_result``."""
        tool, not_executed = self._tools.get(call.name), f"The call of {call.name[:100]!r} was not executed:"
        if not self._open:
            raise _CallError("ignored_after_final", f"{not_executed} the answer was given before it.")
        if tool is None:
            known = unknown_name("tool", call.name[:100], self._tools)
            raise _CallError("unknown_tool", f"The call was not executed: {known}.")
        try:
            arguments = read_arguments(call.arguments)
        except ValueError as error:
            raise _CallError("invalid_action_format", f"{not_executed} its arguments are {error}.") from error
        errors = [f"{each.json_path}: {each.message}" for each in self._validators[call.name].iter_errors(arguments)]
        if errors:
            raise _CallError("invalid_arguments", _cut(f"{not_executed} {'; '.join(sorted(errors)[:3])}.", 1000))
        self._tell(tool, ToolCallStarted(call_id=call.id, name=call.name, arguments=call.arguments))
        try:
            with boundary(FailureKind.ENVIRONMENT, f"tool.{call.name}"):
                async with asyncio.timeout(self.options.tool_timeout):
                    text = await tool.call(arguments)
                if not isinstance(text, str):
                    raise TypeError(f"the tool returned {type(text).__name__} instead of text")
        except CaughtFailure as caught:
            if caught.failure.kind is FailureKind.INFRASTRUCTURE:
                raise
            message = caught.failure.message
            if isinstance(caught.__cause__, TimeoutError):
                message = f"it did not answer within {self.options.tool_timeout:g} s"
            self._tell(tool, ToolResult(call_id=call.id, name=call.name, content=message, ok=False))
            raise _CallError("tool_runtime_error", f"{call.name!r} failed: {message}") from caught
        shown = _cut(text, MOST_CHARACTERS)
        self._tell(tool, ToolResult(call_id=call.id, name=call.name, content=shown))
        return text

    def _tell(self, tool: ToolBase, event: ToolEvent) -> None:
        if self._listener is not None and not tool.private and not tool.ends:
            self._listener(event)

    def _feedback(self, code: str, message: str) -> str:
        """An error for the model."""
        self._errors[code] += 1
        return json.dumps({"ok": False, "error": {"code": code, "message": message}}, ensure_ascii=False)

    def _prompt(self) -> str:
        if self.options.system_prompt is not None or not self._tools:
            return self.options.system_prompt or ""
        private = [name for name, tool in self._tools.items() if tool.private]
        parts = [_WITH_TOOLS]
        if private:
            parts.append(_PRIVATE.format(private=" and ".join(private)))
        parts.append(_ENDING.format(ending=" or ".join(self._ending)) if self._ending else _SPEAKING)
        return " ".join(parts)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}\n[{len(text) - longest} characters cut]"


def _conversation(task: Task) -> list[Message]:
    given = task.data.get("messages") or []
    try:
        return [to_message(message) for message in given]  # type: ignore[union-attr]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadEnvironmentError(f"task {task.id!r}: data.messages holds an invalid chat message: {error}") from error

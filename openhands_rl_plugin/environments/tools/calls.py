"""Executes the calls of one response: arguments checked, errors as feedback, results in the order of the calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.types import Failure, FailureKind, Frozen, JsonObject, ToolCall
from openhands_rl_plugin.core.validation import unknown_name
from openhands_rl_plugin.environments.tools.base import ToolBase
from openhands_rl_plugin.environments.tools.feedback import Feedback, FeedbackCode

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

_MOST_ERRORS = 3
_LONGEST_ERROR = 300


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


ToolEvent = ToolCallStarted | ToolResult
ToolListener = Callable[[ToolEvent], None]


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The outcome of one call: the ``text`` of its tool, or ``feedback``. ``ends``: the text is the answer."""

    call: ToolCall
    text: str = ""
    feedback: Feedback | None = None
    ends: bool = False


@dataclass(frozen=True, slots=True)
class _Ready:
    call: ToolCall
    tool: ToolBase
    arguments: JsonObject


@dataclass(slots=True)
class ToolBox:
    """The tools of one episode.

    ``timeout`` bounds one call, in seconds; ``longest`` its result, in characters. ``listener`` receives the calls of
    tools that are not private and do not end the episode.
    """

    tools: Sequence[ToolBase]
    timeout: float
    longest: int
    listener: ToolListener | None = None
    _by_name: Mapping[str, ToolBase] = field(init=False)
    _validators: Mapping[str, Draft202012Validator] = field(init=False)

    def __post_init__(self) -> None:
        self._by_name = {tool.name: tool for tool in self.tools}
        self._validators = {tool.name: _validator(tool) for tool in self.tools}

    async def execute(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        """Execute ``calls`` in order, adjacent parallel ones concurrently; none after one that ends the episode.

        Raises ``CaughtFailure`` when a tool's infrastructure failed.
        """
        outcomes: list[ToolOutcome] = []
        prepared = [self._prepare(call) for call in calls]
        for together, group in groupby(prepared, key=lambda one: isinstance(one, _Ready) and one.tool.parallel):
            if together and not _ended(outcomes):
                outcomes += await self._side_by_side([one for one in group if isinstance(one, _Ready)])
                continue
            for one in group:
                outcomes.append(await self._next(one, outcomes))
        return outcomes

    async def _next(self, one: _Ready | ToolOutcome, before: Sequence[ToolOutcome]) -> ToolOutcome:
        if (final := _ended(before)) is not None:
            message = f"The call of {one.call.name!r} was not executed: it comes after {final.call.name!r}."
            return ToolOutcome(one.call, feedback=Feedback(FeedbackCode.IGNORED_AFTER_FINAL, message, one.call.name))
        if isinstance(one, ToolOutcome):
            return one
        outcome = await self._run(one)
        if isinstance(outcome, Failure):
            raise CaughtFailure(outcome)
        return outcome

    async def _side_by_side(self, ready: Sequence[_Ready]) -> list[ToolOutcome]:
        found = await asyncio.gather(*(self._run(one) for one in ready))
        if (failure := next((one for one in found if isinstance(one, Failure)), None)) is not None:
            raise CaughtFailure(failure)
        return [one for one in found if isinstance(one, ToolOutcome)]

    def _prepare(self, call: ToolCall) -> _Ready | ToolOutcome:
        tool = self._by_name.get(call.name)
        if tool is None:
            known = unknown_name("tool", call.name[:100], self._by_name)
            return ToolOutcome(
                call, feedback=Feedback(FeedbackCode.UNKNOWN_TOOL, f"The call was not executed: {known}.")
            )
        try:
            arguments = read_arguments(call.arguments)
        except ValueError as error:
            message = f"The call of {call.name!r} was not executed: its arguments are {error}."
            return ToolOutcome(call, feedback=Feedback(FeedbackCode.INVALID_ACTION_FORMAT, message, call.name))
        if wrong := _violations(self._validators[call.name], arguments):
            message = f"The call of {call.name!r} was not executed: {wrong}."
            return ToolOutcome(call, feedback=Feedback(FeedbackCode.INVALID_ARGUMENTS, message, call.name))
        return _Ready(call, tool, arguments)

    async def _run(self, ready: _Ready) -> ToolOutcome | Failure:
        call, tool = ready.call, ready.tool
        self._tell(tool, ToolCallStarted(call_id=call.id, name=call.name, arguments=call.arguments))
        try:
            with boundary(FailureKind.ENVIRONMENT, f"tool.{call.name}"):
                async with asyncio.timeout(self.timeout):
                    text = await tool.call(ready.arguments)
                if not isinstance(text, str):
                    raise TypeError(f"the tool returned {type(text).__name__} instead of text")
        except CaughtFailure as caught:
            if caught.failure.kind is FailureKind.INFRASTRUCTURE:
                return caught.failure
            message = caught.failure.message
            if isinstance(caught.__cause__, TimeoutError):
                message = f"it did not answer within {self.timeout:g} s"
            self._tell(tool, ToolResult(call_id=call.id, name=call.name, content=message, ok=False))
            told = Feedback(FeedbackCode.TOOL_RUNTIME_ERROR, f"{call.name!r} failed: {message}", call.name)
            return ToolOutcome(call, feedback=told)
        if not tool.ends:
            text = _cut(text, self.longest)
        self._tell(tool, ToolResult(call_id=call.id, name=call.name, content=text))
        return ToolOutcome(call, text, ends=tool.ends)

    def _tell(self, tool: ToolBase, event: ToolEvent) -> None:
        if self.listener is not None and not tool.private and not tool.ends:
            self.listener(event)


def _validator(tool: ToolBase) -> Draft202012Validator:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    # An empty registry, so that no reference in a schema is fetched from the network.
    return Draft202012Validator(tool.parameters, registry=Registry())


def read_arguments(text: str) -> JsonObject:
    """Parse strict JSON of an object; empty text is an empty object. Raises ``ValueError`` with the reason."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("ambiguous (a key is there twice)")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"no JSON ({name} is no number)")


def _violations(validator: Draft202012Validator, arguments: JsonObject) -> str:
    """The first errors as text; empty when there is none."""
    errors = sorted(validator.iter_errors(arguments), key=lambda error: [str(step) for step in error.absolute_path])
    return "; ".join(_worded(error) for error in errors[:_MOST_ERRORS])


def _worded(error: ValidationError) -> str:
    place = ".".join(str(step) for step in error.absolute_path)
    return _cut(f"{place}: {error.message}" if place else error.message, _LONGEST_ERROR)


def _ended(outcomes: Sequence[ToolOutcome]) -> ToolOutcome | None:
    return next((outcome for outcome in outcomes if outcome.ends), None)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}\n[{len(text) - longest} characters cut]"

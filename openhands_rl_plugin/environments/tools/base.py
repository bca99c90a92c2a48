"""The base class of tools, and the two built-in tools: private notes and the final answer."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import ArgsKwargs

from openhands_rl_plugin.core.errors import ConfigError, describe
from openhands_rl_plugin.core.types import JsonObject

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolBase(ABC):
    """A tool that the model may call.

    ``parameters`` is the JSON Schema of an object; ``call`` gets only arguments that are valid against it.
    ``private``: its calls and results are never shown to users. ``parallel``: its calls may run concurrently with other
    such calls of the same message. ``ends``: a call ends the episode, and its result is the answer.
    """

    name: str
    description: str = ""
    parameters: JsonObject
    private: bool = False
    parallel: bool = False
    ends: bool = False

    def openai_tool(self) -> JsonObject:
        """The tool as an entry of ``tools`` in a chat request."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @abstractmethod
    async def call(self, arguments: JsonObject) -> str:
        """Execute the call and return the observation for the model.

        The message of an exception becomes the observation, so that the model can react. ``InfrastructureError``
        instead fails the episode, which then is not a sample of the policy's behaviour.
        """


class ThinkTool(ToolBase):
    """Private notes, which only stay in the model's context."""

    name = "think"
    description = "Write private notes: plans, intermediate results, open questions. Nobody else reads them."
    parameters: JsonObject = {  # noqa: RUF012  (an attribute of each tool, not a state that tools share)
        "type": "object",
        "properties": {"notes": {"type": "string", "description": "What to keep in mind."}},
        "required": ["notes"],
        "additionalProperties": False,
    }
    private = True

    async def call(self, arguments: JsonObject) -> str:
        """Acknowledge."""
        return "noted"


class FinalTool(ToolBase):
    """Gives the answer to the user and ends the episode."""

    name = "final"
    description = "Give the final answer to the user. This ends the task, so call it last and once."
    parameters: JsonObject = {  # noqa: RUF012
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The whole answer, as the user shall read it."}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    ends = True

    async def call(self, arguments: JsonObject) -> str:
        """Return the answer unchanged."""
        return str(arguments["answer"])


class FunctionTool(ToolBase):
    """A typed function as a tool; also a decorator. A function that is not async runs in a thread.

    The name, the description (the docstring) and the schema (the annotations) come from the function. A result that is
    not text is returned as JSON. Raises ``ConfigError`` for positional-only parameters and for types that JSON cannot
    represent.
    """

    def __init__(self, function: Callable[..., Any], *, private: bool = False, parallel: bool = False) -> None:
        self.name = function.__name__
        self.description = inspect.getdoc(function) or ""
        self.private = private
        self.parallel = parallel
        self._is_async = inspect.iscoroutinefunction(function)
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(function)  # pyright: ignore[reportArgumentType]
            schema = self._adapter.json_schema()
        except (NameError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{self.name!r} cannot be a tool: {describe(error)}") from error
        if schema.get("type") != "object":
            raise ConfigError(f"{self.name!r} cannot be a tool: all its parameters must accept keyword arguments")
        self.parameters = schema

    async def call(self, arguments: JsonObject) -> str:
        """Call the function with ``arguments`` by name."""
        given = ArgsKwargs((), dict(arguments))
        if self._is_async:
            result = await self._adapter.validate_python(given)
        else:
            result = await asyncio.to_thread(self._adapter.validate_python, given)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


BUILT_IN: dict[str, type[ToolBase]] = {ThinkTool.name: ThinkTool, FinalTool.name: FinalTool}


def load_tool(name: str) -> ToolBase:
    """``"think"``, ``"final"`` or ``"module:Name"`` of a tool class, a tool or a typed function.

    A class is instantiated in each call. Raises ``ConfigError``.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f'unknown tool {name!r}; available: {", ".join(sorted(BUILT_IN))}, or "module:Class"')
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"tool {name!r} cannot be loaded: {describe(error)}") from error
    if isinstance(found, type) and issubclass(found, ToolBase):
        return found()
    if isinstance(found, ToolBase):
        return found
    if inspect.isfunction(found):
        return FunctionTool(found)
    raise ConfigError(f"tool {name!r} is neither a ToolBase nor a typed function")


def checked(tools: Sequence[ToolBase]) -> tuple[ToolBase, ...]:
    """``tools`` unchanged. Raises ``ConfigError`` for invalid or duplicate names and for an invalid JSON Schema."""
    seen: set[str] = set()
    for tool in tools:
        if _NAME.fullmatch(tool.name) is None:
            raise ConfigError(f"tool {tool.name!r}: a name has 1 to 64 letters, digits, '_' and '-'")
        if tool.name in seen:
            raise ConfigError(f"tool {tool.name!r} occurs twice: rename one of them")
        seen.add(tool.name)
        _check_schema(tool)
    return tuple(tools)


def _check_schema(tool: ToolBase) -> None:
    if not isinstance(tool.parameters, dict) or tool.parameters.get("type") != "object":
        raise ConfigError(f'tool {tool.name!r}: parameters must be the JSON Schema of an object ("type": "object")')
    # Imported late: with some packages installed it takes over a second, and plain conversations do not need it.
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(tool.parameters)
    except SchemaError as error:
        raise ConfigError(f"tool {tool.name!r}: parameters are not a valid JSON Schema: {error.message}") from error

"""Tools that a server brings along: offered to the model server, and called by a response's own tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall
from openhands_rl_plugin.environments.http.client import RefusedActionError, excerpt

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ServerTools:
    """The tools of one episode by name, as OpenAI's functions.

    ``reserved``: names that a tool may not have, because the server uses them itself. Raises ``BadEnvironmentError``
    for names that are taken, reserved or no names, and for parameters that are not the JSON Schema of an object.
    """

    def __init__(self, functions: Sequence[JsonObject], where: str, reserved: frozenset[str] = frozenset()) -> None:
        self.functions: dict[str, JsonObject] = {}
        for function in functions:
            name, about = function.get("name"), function.get("description")
            parameters = function.get("parameters") or {"type": "object", "properties": {}}
            taken = name in reserved or name in self.functions
            if not isinstance(name, str) or _NAME.fullmatch(name) is None or taken:
                raise BadEnvironmentError(f"{where}: {excerpt(repr(name))} is no name of a tool, or is taken")
            if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
                raise BadEnvironmentError(f"{where}: the parameters of {name!r} are no JSON Schema of an object")
            about = about if isinstance(about, str) else ""
            self.functions[name] = {"name": name, "description": about, "parameters": parameters}

    @property
    def offered(self) -> tuple[JsonObject, ...]:
        """The tools in the requests to the model server."""
        return tuple({"type": "function", "function": function} for function in self.functions.values())

    def calls_in(self, message: Message) -> tuple[ToolCall, ...]:
        """The calls of a response, each with an id. Raises ``RefusedActionError`` for a tool that there is not."""
        if unknown := [call.name for call in message.tool_calls if call.name not in self.functions]:
            raise RefusedActionError(
                f"Invalid action: there is no tool {excerpt(repr(unknown[0]))}; there are {', '.join(self.functions)}"
            )
        numbered = enumerate(message.tool_calls, 1)
        return tuple(call.model_copy(update={"id": call.id or f"call_{at}"}) for at, call in numbered)


def arguments_of(call: ToolCall) -> JsonObject:
    """The arguments of a call. Raises ``ValueError`` where they are no JSON object."""
    value: JsonValue = json.loads(call.arguments or "{}")
    if not isinstance(value, dict):
        raise ValueError("the arguments are no JSON object")
    return value


def replies(results: Sequence[tuple[ToolCall, str]]) -> tuple[Message, ...]:
    """The outputs of calls as messages."""
    return tuple(Message(role="tool", content=output, tool_call_id=call.id, name=call.name) for call, output in results)

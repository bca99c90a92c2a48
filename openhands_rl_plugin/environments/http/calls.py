"""Tools that a server brings along: how they are offered, and how a call is read from a response.

With ``react_format`` they are described in the system message, and a call is an action of JSON. Otherwise the model
server is given them, and a call is one of the response's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall
from openhands_rl_plugin.environments.http.client import RefusedActionError, excerpt

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOW = 'call one of these tools with a JSON object, {"name": "<tool>", "arguments": {...}}:'


@dataclass(frozen=True, slots=True)
class CalledAction:
    """An action: the ``calls`` in it, and the ``text`` beside them, or instead of them."""

    calls: tuple[ToolCall, ...] = ()
    text: str = ""


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

    def language(self) -> str:
        """The description of the tools for a prompt."""
        return "\n".join([_HOW, *map(_described, self.functions.values())])

    def read(self, message: Message, text: str) -> CalledAction:
        """The action of a response: its own calls, else the JSON of one or of a list in ``text``, else the text.

        Raises ``RefusedActionError`` for a tool that there is not.
        """
        calls: Sequence[ToolCall | None] = message.tool_calls
        if not calls:
            value = _json(text)
            calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
            if None in calls or not calls:
                return CalledAction(text=text)
            text = ""
        known = [call for call in calls if call is not None]
        if unknown := [call.name for call in known if call.name not in self.functions]:
            raise RefusedActionError(
                f"Invalid action: there is no tool {excerpt(repr(unknown[0]))}; there are {', '.join(self.functions)}"
            )
        numbered = (call.model_copy(update={"id": call.id or f"call_{at}"}) for at, call in enumerate(known, 1))
        return CalledAction(tuple(numbered), text)


def arguments_of(call: ToolCall) -> JsonObject:
    """The arguments of a call. Raises ``ValueError`` where they are no JSON object."""
    value: JsonValue = json.loads(call.arguments or "{}")
    if not isinstance(value, dict):
        raise ValueError("the arguments are no JSON object")
    return value


def replies(action: Message, results: Sequence[tuple[ToolCall, str]]) -> tuple[Message, ...]:
    """The outputs of calls as messages: a tool's for each call of the response itself, else one of a user."""
    if not action.tool_calls:
        return (Message(role="user", content="\n\n".join(output for _, output in results)),)
    return tuple(Message(role="tool", content=output, tool_call_id=call.id, name=call.name) for call, output in results)


def _call(value: JsonValue) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, str | dict):
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id="", name=name, arguments=text)


def _described(function: JsonObject) -> str:
    about = " ".join(str(function["description"]).split())
    parameters = json.dumps(function["parameters"], ensure_ascii=False)
    return f"{function['name']}{f' - {about}' if about else ''}\n  arguments: {parameters}"


def _json(text: str) -> JsonValue:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

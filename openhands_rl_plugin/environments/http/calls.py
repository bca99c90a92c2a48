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
_CALLS, _SAID = "tool_calls", "content"
_HOW = 'call one of these tools with a JSON object, {"name": "<tool>", "arguments": {...}}:'
_TAGS = re.compile(r"\A<tool_call>(.*)</tool_call>\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CalledAction:
    """An action: the ``calls`` in it, and the text that was ``said``."""

    calls: tuple[ToolCall, ...] = ()
    said: str = ""

    def written(self) -> str:
        """As text that ``read`` reads back, so that a replay executes the same."""
        if not self.calls:
            return self.said
        return json.dumps({_CALLS: [call.model_dump() for call in self.calls], _SAID: self.said}, ensure_ascii=False)


class ServerTools:
    """The tools of one episode, in OpenAI's form for chats (``{"type": "function", "function": {...}}``).

    ``reserved``: names that a tool may not have, because the server uses them itself. Raises ``BadEnvironmentError``
    for names that are taken, reserved or no names, and for parameters that are not the JSON Schema of an object.
    """

    def __init__(self, functions: Sequence[JsonObject], where: str, reserved: frozenset[str] = frozenset()) -> None:
        seen: dict[str, JsonObject] = {}
        for function in functions:
            name = function.get("name")
            if not isinstance(name, str) or _NAME.fullmatch(name) is None:
                raise BadEnvironmentError(f"{where}: {excerpt(repr(name))} is no name of a tool")
            if name in reserved:
                raise BadEnvironmentError(f"{where}: a tool cannot be called {name!r}, as the server's own endpoint is")
            if name in seen:
                raise BadEnvironmentError(f"{where}: two tools are called {name!r}, so that a call names neither")
            parameters = function.get("parameters") or {"type": "object", "properties": {}}
            if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
                raise BadEnvironmentError(
                    f"{where}: the parameters of the tool {name!r} are no JSON Schema of an object"
                )
            about = function.get("description")
            seen[name] = {
                "name": name,
                "description": about if isinstance(about, str) else "",
                "parameters": parameters,
            }
        self._functions = seen

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __bool__(self) -> bool:
        return bool(self._functions)

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(self._functions)

    @property
    def offered(self) -> tuple[JsonObject, ...]:
        """The tools in the requests to the model server."""
        return tuple({"type": "function", "function": function} for function in self._functions.values())

    def language(self) -> str:
        """The description of the tools for a prompt."""
        return "\n".join([_HOW, *map(_described, self._functions.values())])

    def refused(self, name: str) -> RefusedActionError:
        """What a model is told that called a tool which there is not."""
        return RefusedActionError(
            f"Invalid action: there is no tool {excerpt(repr(name))}; there are {', '.join(self._functions)}"
        )

    def of_message(self, message: Message, text: str | None) -> CalledAction:
        """The action of a response: its own calls, else the calls in ``text``, its action."""
        if message.tool_calls:
            return CalledAction(
                tuple(map(_numbered, message.tool_calls, range(1, 1 + len(message.tool_calls)))), text or ""
            )
        return self.read(text or "")

    def read(self, text: str) -> CalledAction:
        """The action in ``text``: JSON of one call or of a list of them, what ``written`` wrote, or plain speech."""
        value = _json(text if (tagged := _TAGS.match(text.strip())) is None else tagged[1])
        if isinstance(value, dict) and isinstance(calls := value.get(_CALLS), list) and value.keys() <= {_CALLS, _SAID}:
            found = [_call(each, at) for at, each in enumerate(calls, 1)]
            beside = value.get(_SAID)
        else:
            found = [_call(each, at) for at, each in enumerate(value if isinstance(value, list) else [value], 1)]
            beside = None
        known = tuple(call for call in found if call is not None)
        if not known or len(known) < len(found):
            return CalledAction(said=text)
        return CalledAction(known, beside if isinstance(beside, str) else "")


def arguments_of(call: ToolCall) -> JsonObject:
    """The arguments of a call. Raises ``ValueError`` where they are no JSON object."""
    value: JsonValue = json.loads(call.arguments or "{}")
    if not isinstance(value, dict):
        raise ValueError("the arguments are no JSON object")
    return value


def replies(action: Message, calls: Sequence[ToolCall], outputs: Sequence[str]) -> tuple[Message, ...]:
    """The outputs of calls as messages: a tool's for each call of the response itself, else one of a user."""
    if not action.tool_calls:
        return (Message(role="user", content="\n\n".join(outputs)),)
    ids = [call.id for call in action.tool_calls]
    return tuple(
        Message(role="tool", content=output, tool_call_id=own or call.id, name=call.name)
        for own, call, output in zip(ids, calls, outputs, strict=False)
    )


def _call(value: JsonValue, number: int) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    identity = value.get("id")
    if isinstance(arguments, str):
        text = arguments
    elif isinstance(arguments, dict):
        text = json.dumps(arguments, ensure_ascii=False)
    else:
        return None
    return ToolCall(
        id=identity if isinstance(identity, str) and identity else f"call_{number}", name=name, arguments=text
    )


def _numbered(call: ToolCall, number: int) -> ToolCall:
    return call if call.id else call.model_copy(update={"id": f"call_{number}"})


def _described(function: JsonObject) -> str:
    about = " ".join(str(function["description"]).split())
    parameters = json.dumps(function["parameters"], ensure_ascii=False)
    return f"{function['name']}{f' - {about}' if about else ''}\n  arguments: {parameters}"


def _json(text: str) -> JsonValue:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

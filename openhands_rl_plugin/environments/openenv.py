"""Environments of OpenEnv: its WebSocket and MCP protocols, and where their servers are."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Never
from urllib.parse import urlsplit

from pydantic import Field, JsonValue
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, EpisodeError, InfrastructureError
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.servers import is_loopback
from openhands_rl_plugin.core.types import JsonObject, Message, Task, ToolCall
from openhands_rl_plugin.environments.http.calls import ServerTools, arguments_of, replies
from openhands_rl_plugin.environments.http.client import (
    BaseEnvClient,
    EndpointMissingError,
    HttpEnvironmentOptions,
    NoPlaceError,
    RefusedActionError,
    ServerAnswer,
    UnavailableError,
    check_status,
    decode_json,
    episode_index,
    excerpt,
)
from openhands_rl_plugin.environments.http.react import ParsedAction

_MOST_BYTES = 4 * 1024 * 1024
_LONGEST_CLOSING = 5.0
_TOO_BIG = 1009
# Failures of the server itself, or of the machines behind it, rather than of the environment.
_BROKEN = frozenset({"FACTORY_ERROR", "SESSION_ERROR"})


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception:
        """Follow none: the key would go elsewhere."""
        return exc


class OpenEnvConnection:
    """One connection to ``/ws``, and its episode. Sends one request at a time, each once."""

    def __init__(self, where: str, seconds: float, socket: ClientConnection) -> None:
        self._where, self._seconds, self._socket = where, seconds, socket
        self._end: EpisodeError | None = None

    @classmethod
    async def open(cls, options: HttpEnvironmentOptions) -> OpenEnvConnection:
        """Connect, once. Raises ``InfrastructureError`` or ``BadEnvironmentError``."""
        where, key = f"{options.base_url}/ws", options.key()
        try:
            socket = await _Connect(
                f"ws{where.removeprefix('http')}",
                additional_headers={"authorization": f"Bearer {key}"} if key else {},
                # As for HTTP: no proxy between this process and its own machine.
                proxy=None if is_loopback(urlsplit(options.base_url).hostname or "") else True,
                compression=None,
                open_timeout=options.timeout,
                # An environment may block its server's event loop for minutes.
                ping_interval=None,
                close_timeout=_LONGEST_CLOSING,
                max_size=_MOST_BYTES,
            )
        except InvalidStatus as error:
            found = error.response
            check_status(where, found.status_code, bytes(found.body or b""), found.headers.get("location"))
            raise BadEnvironmentError(
                f"{where} answered {found.status_code} instead of a WebSocket (is this an OpenEnv server?)"
            ) from error
        except (TimeoutError, InvalidHandshake) as error:
            raise InfrastructureError(
                f"{where} could not be connected to within {options.timeout:g} s ({type(error).__name__}): check "
                "whether the server is still running, and its load"
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"nothing answers at {options.base_url}: start the OpenEnv server or set env_server_base and env_port"
            ) from error
        return cls(where, options.timeout, socket)

    async def ask(self, kind: str, data: JsonObject | None = None, *, answered_by: str = "observation") -> JsonObject:
        """Send a message of this ``kind`` and return the data of the answer, which must be of kind ``answered_by``.

        Raises ``RefusedActionError`` when a step was not executed because its action is invalid.
        """
        if self._end is not None:
            raise self._end
        message: JsonObject = {"type": kind} if data is None else {"type": kind, "data": data}
        # Until an answer is read, it is not known what the next one answers.
        self._end = InfrastructureError(f"the connection to {self._where} was cancelled during a {kind}")
        try:
            async with asyncio.timeout(self._seconds):
                # When sending fails, receiving says why: a full server sends its error first.
                with suppress(ConnectionClosed):
                    await self._socket.send(json.dumps(message))
                received = await self._socket.recv()
        except (TimeoutError, ConnectionClosed) as error:
            self._end = self._lost(error, kind)
            raise self._end from error
        self._end = None
        answer = decode_json(self._where, received if isinstance(received, bytes) else received.encode())
        found, shown = (answer.get("type"), answer.get("data")) if isinstance(answer, dict) else (None, None)
        if found not in (answered_by, "error") or not isinstance(shown, dict):
            raise BadEnvironmentError(f"{self._where} answered a {kind} with {excerpt(received)}")
        if found == "error":
            self._raise_error(shown, kind)
        return shown

    async def close(self) -> None:
        """Send ``close`` and wait briefly until the server releases the episode: its capacity may be limited."""
        if self._end is None:
            with suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(min(self._seconds, _LONGEST_CLOSING)):
                    await self._socket.send('{"type": "close"}')
                    await self._socket.wait_closed()
        self._end = self._end or InfrastructureError(f"the connection to {self._where} is closed")
        await self._socket.close()

    def _lost(self, error: TimeoutError | ConnectionClosed, kind: str) -> EpisodeError:
        if isinstance(error, TimeoutError):
            late = f"{self._where} did not answer a {kind} within {self._seconds:g} s: check the server's load or raise"
            return InfrastructureError(f"{late} the timeout")
        if error.sent is not None and error.sent.code == _TOO_BIG:
            return BadEnvironmentError(f"{self._where} answered more than {_MOST_BYTES} bytes")
        return InfrastructureError(
            f"the connection to {self._where} broke (close code {self._socket.close_code}): check whether the server "
            "is still running"
        )

    def _raise_error(self, data: JsonObject, kind: str) -> Never:
        code, message, errors = data.get("code"), excerpt(str(data.get("message"))), data.get("errors")
        # Those of pydantic: ``action: Input should be 'UP' or 'DOWN'``.
        found: list[dict[str, Any]] = [*map(_object, errors[:3])] if isinstance(errors, list) else []
        parts = ((".".join(map(str, each.get("loc") or ())), str(each.get("msg"))) for each in found)
        reasons = "; ".join(excerpt(": ".join(filter(None, each))) for each in parts)
        text = f"{self._where} answered a {kind} with the error {code}: {message} {reasons}".rstrip()
        if code == "CAPACITY_REACHED":
            raise NoPlaceError(
                f"{text}; lower max_workers or open_worlds in [rl.strategy], or raise max_concurrent_envs of the server"
            )
        if code in _BROKEN:
            raise InfrastructureError(text)
        if code == "VALIDATION_ERROR" and kind == "step":
            raise RefusedActionError(f"Invalid action: {reasons or message}")
        raise BadEnvironmentError(text)


LIST: JsonObject = {"type": "list_tools"}
"""The action that asks for the tools."""

_RESERVED = frozenset({"reset", "step", "state", "close"})


def is_mcp(schema: JsonObject) -> bool:
    """Whether a server's actions are calls of tools, by the schema of an action."""
    kind = _object(_object(schema.get("properties")).get("type"))
    return "call_tool" in (kind.get("const"), kind.get("default"))


def tools_in(data: JsonObject, where: str) -> ServerTools:
    """The tools in the answer to ``LIST``. Raises ``BadEnvironmentError``, also where there is none."""
    listed = _object(data.get("observation")).get("tools")
    tools = [_object(tool) for tool in listed] if isinstance(listed, list) else []
    if not tools:
        raise BadEnvironmentError(f"{where} listed no tools: {excerpt(json.dumps(data.get('observation')))}")
    functions = [{**tool, "parameters": tool.get("input_schema", tool.get("inputSchema"))} for tool in tools]
    return ServerTools(functions, where, _RESERVED)


def action_of(call: ToolCall) -> JsonObject:
    """The action that makes a call. Raises ``RefusedActionError``."""
    try:
        return {"type": "call_tool", "tool_name": call.name, "arguments": arguments_of(call)}
    except ValueError as error:
        raise RefusedActionError(f"Invalid action: the arguments of {call.name} are not JSON of an object") from error


def output_of(observation: JsonValue) -> str:
    """What a call returned, as text: the texts of the result, else its JSON, or the error."""
    error, result = _object(observation).get("error"), _object(observation).get("result")
    if isinstance(error, dict):
        return f"{error.get('error_type')}: {error.get('message')}"
    if isinstance(result, str):
        return result
    content = _object(result).get("content")
    texts = [_object(part).get("text") for part in content] if isinstance(content, list) else []
    if texts and all(isinstance(text, str) for text in texts):
        return "\n".join(map(str, texts))
    shown = _object(result).get("structured_content") or _object(result).get("data") or result
    return json.dumps(shown, ensure_ascii=False)


class ActionForm:
    """The fields of a server's actions. The server checks their values.

    A JSON object with these names only is the action itself. Any other text is the value of ``field``, else of the only
    field, else of the only required one. Raises ``ConfigError`` when ``field`` is not a field of the actions.
    """

    def __init__(self, schema: JsonObject, field: str | None = None) -> None:
        definitions, found, required = _object(schema.get("$defs")), _object(schema.get("properties")), []
        self._names = frozenset(found)
        # A field with a single possible value needs no description. ``$ref`` names a definition.
        self._fields = {
            name: _object(definitions.get(str(_object(each).get("$ref")).rpartition("/")[2])) | _object(each)
            for name, each in found.items()
            if name != "metadata" and "const" not in _object(each)
        }
        if isinstance(listed := schema.get("required"), list):
            required = [name for name in self._fields if name in listed]
        if field is not None and found and field not in found:
            raise ConfigError(
                f"action_field {field!r} is not a field of the server's actions; these have {', '.join(self._fields)}"
            )
        self._required = required
        self._field = field or next((each[0] for each in ([*self._fields], required) if len(each) == 1), None)

    def read(self, text: str) -> JsonObject:
        """The action in ``text``. Raises ``RefusedActionError``, whose message describes valid actions to the model."""
        try:
            value: JsonValue = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and (not self._names or self._names.issuperset(value)):
            return value
        if self._field is None:
            raise RefusedActionError(f"Invalid action: {self.language() or 'it must be a JSON object.'}")
        typed = self._fields.get(self._field, {}).get("type", "string")
        return {self._field: text if typed == "string" or value is None else value}

    def language(self) -> str:
        """The description of the actions for the prompt; empty where the server publishes no schema."""
        lines = (
            f"  {name} ({'required' if name in self._required else 'optional'}) - {_described(each)}".rstrip(" -")
            for name, each in self._fields.items()
        )
        return "\n".join(["a JSON object with these fields:", *lines]) if self._fields else ""


def _described(schema: JsonObject) -> str:
    values, description = schema.get("enum"), str(schema.get("description") or "")
    what = f"one of {', '.join(map(str, values))}" if isinstance(values, list) else str(schema.get("type") or "")
    return ": ".join(part for part in (what, description) if part)


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


_NOT_SHOWN = frozenset({"metadata", "reward", "done"})


class OpenEnvOptions(HttpEnvironmentOptions):
    """``index_key`` is the argument of the server's ``reset`` for the task's index (empty: none). ``reset_arguments``
    are further arguments; those of one task are its row, ``data["row"]``.

    ``action_field`` is the action's field that a plain text fills, ``observation_field`` the field that is shown to the
    model. ``None``: chosen by the fields of the server's actions and observations.
    """

    index_key: str = "seed"
    reset_arguments: JsonObject = Field(default_factory=dict)
    action_field: str | None = None
    observation_field: str | None = None


class OpenEnvClient(BaseEnvClient):
    """``reset``, ``step``, ``state`` and ``close`` of one connection to ``/ws``. A fork replays, in one of its own.

    An observation with a single text field is shown to the model as that text, any other one as JSON of its fields
    without reward, done and metadata. The model answers with JSON of an action's fields, or with the value of the only
    field. An invalid action takes a step, and its error is the observation. The evidence holds the server's ``state``.

    An environment that is driven by MCP is asked for its tools after the reset, and an action calls one of them. A step
    may have no reward; the one that ends the episode needs one. Where no step of an episode had one, the evidence
    has ``unrewarded``.
    """

    Options: ClassVar[type[HttpEnvironmentOptions]] = OpenEnvOptions

    def __init__(self, options: OpenEnvOptions | None = None) -> None:
        self._settings = options or OpenEnvOptions()
        super().__init__(self._settings)
        self._form: ActionForm | None = None
        self._has_tools = False
        self._tools: ServerTools | None = None
        self._results: list[tuple[ToolCall, str]] = []
        self._rewarded = False
        self._connection: OpenEnvConnection | None = None

    @property
    def info(self) -> EnvInfo:
        """After ``reset`` with the tools."""
        return replace(super().info, tools=() if self._tools is None else self._tools.offered)

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``GET /schema``, a connection of its own, and ``reset``."""
        await self._leave()
        key, row = self._settings.index_key, task.data.get("row", {})
        if not isinstance(row, dict):
            raise BadEnvironmentError(f"task '{task.id}' needs an object in data['row'], not {excerpt(repr(row))}")
        given = {**({key: episode_index(task)} if key else {}), **self._settings.reset_arguments, **row}
        if self._form is None:
            schema = await self._action_schema()
            self._form, self._has_tools = ActionForm(schema, self._settings.action_field), is_mcp(schema)
        self._connection = await OpenEnvConnection.open(self._settings)
        answer = self._answer(await self._connection.ask("reset", given), "reset")
        if self._has_tools:
            self._tools = tools_in(await self._connection.ask("step", LIST), self._settings.base_url)
        return answer

    async def act(self, action: str | tuple[ToolCall, ...]) -> ServerAnswer:
        """``step``, once for each call where the environment is driven by tools."""
        if self._connection is None or self._form is None:
            raise RuntimeError("no episode is open")
        self._results = []
        if isinstance(action, str):
            return self._answer(await self._connection.ask("step", self._form.read(action)), "step")
        earned, answer = 0.0, None
        for call, step in [(call, action_of(call)) for call in action]:
            answer = self._answer(data := await self._connection.ask("step", step), "step")
            earned += answer.reward
            self._results.append((call, output_of(data.get("observation"))))
            if answer.done:
                break
        assert answer is not None
        state = "\n\n".join(text for _, text in self._results)
        return answer.model_copy(update={"state": state, "reward": earned})

    def parse(self, action: Message) -> ParsedAction:
        """The response's calls, where the environment has tools."""
        if self._tools is None:
            return super().parse(action)
        if calls := self._tools.calls_in(action):
            return ParsedAction(calls, None)
        return ParsedAction(None, f"Invalid action: call {', '.join(self._tools.functions)}")

    def reply(self, action: Message, state: str) -> tuple[Message, ...]:
        """The outputs of calls."""
        return replies(self._results) or super().reply(action, state)

    async def release(self) -> None:
        """``close``; the server ends the episode with its connection."""
        await self._leave()

    async def evidence(self) -> JsonObject:
        """The evidence of ``BaseEnvClient``, with the server's ``state`` while the connection is open."""
        found = await super().evidence()
        if found and self._connection is not None:
            with suppress(EpisodeError):
                found["state"] = await self._connection.ask("state", answered_by="state")
        if any(step.answer is not None for step in self.steps) and not self._rewarded:
            found["unrewarded"] = True
        return found

    def actions(self, task: Task) -> str:
        """The format of actions, from the server's schema; none for tools, which are offered themselves."""
        return self._form.language() if self._form is not None and self._tools is None else ""

    async def _leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _action_schema(self) -> JsonObject:
        try:
            answer = await self.open_transport().request("/schema")
        except EndpointMissingError:
            return {}
        schema = _object(answer).get("action")
        if not isinstance(schema, dict):
            raise BadEnvironmentError(f"/schema answered {excerpt(str(answer))}, which holds no schema of an 'action'")
        return schema

    def _answer(self, data: JsonObject, what: str) -> ServerAnswer:
        reward: JsonValue = data.get("reward")
        if what == "step":
            if "done" not in data:
                raise BadEnvironmentError("step answered no 'done'")
            if reward is None and data["done"] is True:
                raise BadEnvironmentError(
                    "step ended the episode without a reward, which is not 0.0: let the server give its last step one"
                )
            self._rewarded |= reward is not None
        if reward is None or isinstance(reward, bool):
            reward = float(reward or 0)
        answer = {"state": self._shown(data, what), "reward": reward, "done": data.get("done", False)}
        return ServerAnswer.parse({**answer, "info": data.get("metadata")}, what)

    def _shown(self, data: JsonObject, what: str) -> str:
        observation, field = data.get("observation"), self._settings.observation_field
        if not isinstance(observation, dict):
            raise BadEnvironmentError(f"{what} answered a wrong 'observation': {excerpt(str(observation))}")
        shown = {name: value for name, value in observation.items() if name not in _NOT_SHOWN}
        if field is not None:
            if field not in observation:
                raise BadEnvironmentError(f"{what} answered no '{field}' (observation_field), but {', '.join(shown)}")
            shown = {field: observation[field]}
        if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
            return text
        return json.dumps(shown if field is None else shown[field], ensure_ascii=False)

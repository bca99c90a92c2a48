"""Environments of OpenEnv: its WebSocket and MCP protocols, and where their servers are."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Never
from urllib.parse import urlsplit

from pydantic import Field, JsonValue
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, EpisodeError, InfrastructureError
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers import is_loopback
from openhands_rl_plugin.core.types import JsonObject, Message, Task, ToolCall
from openhands_rl_plugin.environments.http.calls import ServerTools, arguments_of, replies
from openhands_rl_plugin.environments.http.client import (
    BaseEnvClient,
    EndpointMissingError,
    Episode,
    HttpEnvironmentOptions,
    RefusedActionError,
    ServerAnswer,
    UnavailableError,
    check_status,
    decode_json,
    episode_index,
    excerpt,
)
from openhands_rl_plugin.environments.http.react import ParsedAction

_LOG = redacting_logger(__name__)
# Connections that a search opens in advance; further ones as it needs them.
_IN_ADVANCE = 8
_LONGEST_CLOSING = 5.0
_MOST_REASONS = 3
_TOO_BIG = 1009
# Failures of the server itself, or of the machines behind it, rather than of the environment.
_BROKEN = frozenset({"FACTORY_ERROR", "SESSION_ERROR"})


class NoPlaceError(UnavailableError):
    """The server has as many episodes as it may. ``most``: how many those are, where it says that."""

    def __init__(self, message: str, most: int | None = None) -> None:
        super().__init__(message)
        self.most = most


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception:
        """Follow none: the key would go elsewhere."""
        return exc


class OpenEnvSession:
    """One connection to ``/ws``. Sends one request at a time, each once."""

    def __init__(self, options: HttpEnvironmentOptions) -> None:
        self._base_url = options.base_url
        self._where = options.base_url + "/ws"
        self._timeout = options.timeout
        self._max_bytes = options.max_response_bytes
        self._headers = {"authorization": f"Bearer {key}"} if (key := options.key()) else {}
        self._connection: ClientConnection | None = None
        self._end: EpisodeError | None = None

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._connection is not None and self._connection.close_code is None and self._end is None

    async def open(self) -> None:
        """Connect, once. Raises ``InfrastructureError`` or ``BadEnvironmentError``; then nothing is left to close."""
        try:
            self._connection = await _Connect(
                f"ws{self._where.removeprefix('http')}",
                additional_headers=self._headers,
                # As for HTTP: no proxy between this process and its own machine.
                proxy=None if is_loopback(urlsplit(self._base_url).hostname or "") else True,
                compression=None,
                open_timeout=self._timeout,
                # An environment may block its server's event loop for minutes.
                ping_interval=None,
                close_timeout=_LONGEST_CLOSING,
                max_size=self._max_bytes,
            )
        except InvalidStatus as error:
            found = error.response
            check_status(self._where, found.status_code, bytes(found.body or b""), found.headers.get("location"))
            raise BadEnvironmentError(
                f"{self._where} answered {found.status_code} instead of a WebSocket (is this an OpenEnv server?)"
            ) from error
        except TimeoutError as error:
            raise InfrastructureError(
                f"{self._where} did not answer within {self._timeout:g} s: check the server's load"
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"nothing answers at {self._base_url}: start the OpenEnv server or set env_server_base and env_port"
            ) from error
        except InvalidHandshake as error:
            raise self._broke(type(error).__name__) from error

    async def ask(self, kind: str, data: JsonObject | None = None, *, answered_by: str = "observation") -> JsonObject:
        """Send a message of this ``kind`` and return the data of the answer, which must be of kind ``answered_by``.

        Raises ``RefusedActionError`` when a step was not executed because its action is invalid.
        """
        if self._connection is None:
            raise RuntimeError("the connection is not open")
        if self._end is not None:
            raise self._end
        message: JsonObject = {"type": kind} if data is None else {"type": kind, "data": data}
        # Until an answer is read, it is not known what the next one answers.
        self._end = InfrastructureError(f"the connection to {self._where} was cancelled during a {kind}")
        try:
            async with asyncio.timeout(self._timeout):
                early = await self._early(self._connection)
                if early is None:
                    # When sending fails, receiving says why.
                    with suppress(ConnectionClosed):
                        await self._connection.send(json.dumps(message))
                received = early or await self._connection.recv()
        except TimeoutError as error:
            self._end = InfrastructureError(
                f"{self._where} did not answer a {kind} within {self._timeout:g} s: check the server's load or raise"
                " the timeout"
            )
            raise self._end from error
        except ConnectionClosed as error:
            self._end = self._broke(f"close code {self._connection.close_code}")
            if error.sent is not None and error.sent.code == _TOO_BIG:
                self._end = BadEnvironmentError(
                    f"{self._where} answered more than {self._max_bytes} bytes:"
                    " make its observations shorter or raise max_response_bytes"
                )
            raise self._end from error
        if isinstance(received, bytes):
            self._end = BadEnvironmentError(f"{self._where} sent an unexpected message: {excerpt(received)}")
            raise self._end
        if early is None:
            self._end = None
            return self._read(received, kind, answered_by)
        # A full server sends its error before the first request.
        return self._read(received, "connection", "error")

    async def close(self) -> None:
        """Send ``close`` and wait briefly until the server releases the episode: its capacity may be limited."""
        if self._connection is None:
            return
        if self._end is None:
            with suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(min(self._timeout, _LONGEST_CLOSING)):
                    await self._connection.send('{"type": "close"}')
                    await self._connection.wait_closed()
        self._end = self._end or InfrastructureError(f"the connection to {self._where} is closed")
        await self._connection.close()

    async def _early(self, connection: ClientConnection) -> str | bytes | None:
        """A message that nothing asked for."""
        with suppress(TimeoutError, ConnectionClosed):
            async with asyncio.timeout(0):
                return await connection.recv()
        return None

    def _read(self, received: str, kind: str, answered_by: str) -> JsonObject:
        answer = decode_json(self._where, received.encode())
        found, data = (answer.get("type"), answer.get("data")) if isinstance(answer, dict) else (None, None)
        if found not in (answered_by, "error") or not isinstance(data, dict):
            raise BadEnvironmentError(f"{self._where} answered a {kind} with {excerpt(received)}")
        if found == "error":
            self._raise_error(data, kind)
        return data

    def _raise_error(self, data: JsonObject, kind: str) -> Never:
        code, message = data.get("code"), excerpt(str(data.get("message")))
        text = f"{self._where} answered a {kind} with the error {code}: {message}"
        if code == "CAPACITY_REACHED":
            most = data.get("max_sessions")
            raise NoPlaceError(
                f"{text}; lower max_workers or raise max_concurrent_envs of the server",
                most if isinstance(most, int) else None,
            )
        if code in _BROKEN:
            raise InfrastructureError(text)
        if code == "VALIDATION_ERROR" and kind == "step":
            raise RefusedActionError(f"Invalid action: {_reasons(data.get('errors')) or message}")
        raise BadEnvironmentError(f"{text} {_reasons(data.get('errors'))}".rstrip())

    def _broke(self, how: str) -> InfrastructureError:
        return InfrastructureError(
            f"the connection to {self._where} broke ({how}): check whether the server is still running"
        )


def _reasons(errors: JsonValue) -> str:
    """The first of pydantic's errors as text: ``action: Input should be 'UP' or 'DOWN'``."""
    worded: list[str] = []
    for each in errors[:_MOST_REASONS] if isinstance(errors, list) else ():
        found: dict[str, Any] = each if isinstance(each, dict) else {}
        place = ".".join(str(step) for step in found.get("loc") or ())
        worded.append(excerpt(f"{place}: {found.get('msg')}" if place else str(found.get("msg"))))
    return "; ".join(worded)


LIST: JsonObject = {"type": "list_tools"}
"""The action that asks for the tools."""

_RESERVED = frozenset({"reset", "step", "state", "close"})


def is_mcp(schema: JsonObject) -> bool:
    """Whether a server's actions are calls of tools, by the schema of an action."""
    properties = schema.get("properties")
    kind = properties.get("type") if isinstance(properties, dict) else None
    return isinstance(kind, dict) and "call_tool" in (kind.get("const"), kind.get("default"))


def tools_in(data: JsonObject, where: str) -> ServerTools:
    """The tools in the answer to ``LIST``. Raises ``BadEnvironmentError``, also where there is none."""
    observation = data.get("observation")
    listed = observation.get("tools") if isinstance(observation, dict) else None
    functions: list[JsonObject] = []
    for tool in listed if isinstance(listed, list) else ():
        if not isinstance(tool, dict):
            raise BadEnvironmentError(f"{where} listed {excerpt(repr(tool))}, which is no tool")
        parameters = tool.get("input_schema", tool.get("inputSchema"))
        functions.append({"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters})
    if not functions:
        raise BadEnvironmentError(f"{where} listed no tools: {excerpt(json.dumps(observation))}")
    return ServerTools(functions, where, _RESERVED)


def action_of(call: ToolCall, tools: ServerTools) -> JsonObject:
    """The action that makes a call. Raises ``RefusedActionError``."""
    if call.name not in tools:
        raise tools.refused(call.name)
    try:
        arguments = arguments_of(call)
    except ValueError as error:
        raise RefusedActionError(f"Invalid action: the arguments of {call.name} are not JSON of an object") from error
    return {"type": "call_tool", "tool_name": call.name, "arguments": arguments}


def output_of(observation: JsonValue) -> str:
    """What a call returned, as text: the texts of the result, else its JSON, or the error."""
    found: JsonObject = observation if isinstance(observation, dict) else {}
    error, result = found.get("error"), found.get("result")
    if isinstance(error, dict):
        return f"{error.get('error_type')}: {error.get('message')}"
    if not isinstance(result, dict):
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    content = result.get("content")
    texts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if texts and all(isinstance(text, str) for text in texts):
        return "\n".join(map(str, texts))
    shown = result.get("structured_content") or result.get("data") or result
    return json.dumps(shown, ensure_ascii=False)


_BASE_FIELD = "metadata"


class ActionForm:
    """The fields of a server's actions. The server checks their values.

    A JSON object with these names only is the action itself. Any other text is the value of ``field``, else of the only
    field, else of the only required one. Raises ``ConfigError`` when ``field`` is not a field of the actions.
    """

    def __init__(self, schema: JsonObject, field: str | None = None) -> None:
        self._definitions = _object(schema.get("$defs"))
        found = _object(schema.get("properties"))
        self._names = frozenset(found)
        # A field with a single possible value needs no description.
        self._fields = {
            name: self._resolved(each)
            for name, each in found.items()
            if name != _BASE_FIELD and isinstance(each, dict) and "const" not in each
        }
        required = schema.get("required")
        self._required = [name for name in required if name in self._fields] if isinstance(required, list) else []
        if field is not None and found and field not in found:
            raise ConfigError(
                f"action_field {field!r} is not a field of the server's actions; these have {', '.join(self._fields)}"
            )
        self._field = field or _only(list(self._fields)) or _only(self._required)

    def read(self, text: str) -> JsonObject:
        """The action in ``text``. Raises ``RefusedActionError``, whose message describes valid actions to the model."""
        value = _json_or_none(text)
        if isinstance(value, dict) and (not self._names or self._names.issuperset(value)):
            return value
        if self._field is None:
            raise RefusedActionError(f"Invalid action: {self.language() or 'it must be a JSON object.'}")
        if value is None or self._is_text(self._fields.get(self._field, {"type": "string"})):
            return {self._field: text}
        return {self._field: value}

    def language(self) -> str:
        """The description of the actions for the prompt; empty where the server publishes no schema."""
        if (only := _only(list(self._fields))) is not None:
            return f"<{only}> - {self._worded(self._fields[only])}".removesuffix(" - ")
        lines = (
            f"  {name} ({'required' if name in self._required else 'optional'}) - {self._worded(each)}".rstrip(" -")
            for name, each in self._fields.items()
        )
        return "\n".join(["a JSON object with these fields:", *lines]) if self._fields else ""

    def _worded(self, schema: JsonObject) -> str:
        values, description = schema.get("enum"), str(schema.get("description") or "")
        what = f"one of {', '.join(map(str, values))}" if isinstance(values, list) else str(schema.get("type") or "")
        return f"{what}: {description}" if what and description else what or description

    def _is_text(self, schema: JsonObject) -> bool:
        choices = schema.get("anyOf")
        found = [schema, *map(self._resolved, choices if isinstance(choices, list) else ())]
        return any(each.get("type") == "string" for each in found)

    def _resolved(self, schema: JsonValue) -> JsonObject:
        """With what a ``$ref`` refers to."""
        own = _object(schema)
        return _object(self._definitions.get(str(own.get("$ref")).rpartition("/")[2])) | own


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _only(names: list[str]) -> str | None:
    return names[0] if len(names) == 1 else None


def _json_or_none(text: str) -> JsonValue:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


_NOT_SHOWN = frozenset({"metadata", "reward", "done"})


class OpenEnvOptions(HttpEnvironmentOptions):
    """``index_key`` is the argument of the server's ``reset`` for the task's index (empty: none). ``reset_arguments``
    are further arguments; those of one task are its row, ``data["row"]``.

    ``action_field`` is the action's field that a plain text fills, ``observation_field`` the field that is shown to the
    model. ``None``: chosen by the fields of the server's actions and observations.

    ``place_timeout``: seconds that an episode waits for a place on a server that is full.
    """

    index_key: str = "seed"
    reset_arguments: JsonObject = Field(default_factory=dict)
    action_field: str | None = None
    observation_field: str | None = None
    place_timeout: float = Field(default=1800.0, ge=0)


class OpenEnvClient(BaseEnvClient):
    """``reset``, ``step``, ``state`` and ``close`` of one connection to ``/ws``.

    An observation with a single text field is shown to the model as that text, any other one as JSON of its fields
    without reward, done and metadata. The model answers with JSON of an action's fields, or with the value of the only
    field. An invalid action takes a step, and its error is the observation. The evidence holds the server's ``state``.

    An environment that is driven by MCP is asked for its tools after the reset, and an action calls one of them. A step
    may say nothing of its reward; the one that ends the episode may not. Where no step of an episode did, the evidence
    says ``unrewarded``.
    """

    Options: ClassVar[type[HttpEnvironmentOptions]] = OpenEnvOptions

    def __init__(self, options: OpenEnvOptions | None = None) -> None:
        self._settings = options or OpenEnvOptions()
        super().__init__(self._settings)
        self._form: ActionForm | None = None
        self._driven = False
        self._tools: ServerTools | None = None
        self._told: tuple[tuple[ToolCall, str], ...] = ()
        self._paid = False
        self._session: OpenEnvSession | None = None
        # Of a fork: the episode of the search, whose open connections it uses and gives back.
        self._owner: OpenEnvClient | None = None
        self._wanted = 0
        self._most: int | None = None
        self._idle: list[OpenEnvSession] | None = None

    @property
    def info(self) -> EnvInfo:
        """The forks that the server has room for, and, after ``reset``, the tools, unless ``react_format`` describes
        them in the prompt."""
        tools = self._tools.offered if self._tools is not None and not self.options.react_format else ()
        return replace(super().info, max_forks=self._most, tools=tools)

    def reserve(self, forks: int) -> None:
        """Let ``reset`` take the places of up to ``forks`` forks, too."""
        self._wanted, self._idle = forks, []

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``GET /schema``, a connection of its own, and ``reset``; waits for a place."""
        arguments = self._reset_arguments(task)
        if self._form is None:
            schema = await self._action_schema()
            self._form, self._driven = ActionForm(schema, self._settings.action_field), is_mcp(schema)
        patience = 0.0 if self._owner is not None else self._settings.place_timeout
        backoff, began, tries = Backoff(0.1, 2.0), time.monotonic(), 0
        while True:
            await self._leave()
            try:
                return await self._begin(arguments)
            except NoPlaceError:
                await self._leave()
                left, tries = patience - (time.monotonic() - began), tries + 1
                if left <= 0:
                    raise
                if tries == 1:
                    _LOG.info("%s has no free place: waiting up to %g s for one", self._settings.base_url, patience)
                await backoff.wait(tries, at_most=left)

    async def act(self, action: str) -> ServerAnswer:
        """``step``, once for each call where the environment is driven by tools."""
        if self._session is None or self._form is None:
            raise RuntimeError("no episode is open")
        self._told = ()
        if self._tools is None:
            return self._answer(await self._session.ask("step", self._form.read(action)), "step")
        calls = self._tools.read(action).calls
        if not calls:
            how = self._tools.language() if self.options.react_format else f"call {', '.join(self._tools.names)}"
            raise RefusedActionError(f"Invalid action: {how}")
        sent = [action_of(call, self._tools) for call in calls]
        earned, told, answer = 0.0, [], None
        for call, step in zip(calls, sent, strict=True):
            answer = self._answer(data := await self._session.ask("step", step), "step")
            earned += answer.reward
            told.append((call, output_of(data.get("observation"))))
            if answer.done:
                break
        assert answer is not None
        self._told = tuple(told)
        return answer.model_copy(update={"state": "\n\n".join(text for _, text in told), "reward": earned})

    def parse(self, action: Message) -> ParsedAction:
        """The response's own calls, where it has some."""
        if self._tools is not None and action.tool_calls:
            return ParsedAction(self._tools.of_message(action, action.content).written(), None)
        return super().parse(action)

    def reply(self, action: Message, state: str) -> tuple[Message, ...]:
        """The outputs of calls, of a tool's where the response had calls of its own."""
        if not self._told:
            return super().reply(action, state)
        return replies(action, [call for call, _ in self._told], [text for _, text in self._told])

    async def fork_episode(self, twin: Episode) -> bool:
        """A fork replays, in a connection that is open already where there is one."""
        assert isinstance(twin, OpenEnvClient), "a twin is of the same class"
        twin._owner = self._owner or self
        return False

    async def release(self) -> None:
        """``close``; the server ends the episode with its connection. A fork's is kept for the next fork."""
        idle = self._owner._idle if self._owner is not None else None
        if idle is not None and self._session is not None and self._session.alive:
            idle.append(self._session)
        else:
            await self._leave()
        await self._close_idle()

    async def evidence(self) -> JsonObject:
        """The evidence of ``BaseEnvClient``, with the server's ``state`` while the connection is open."""
        found = await super().evidence()
        if found and self._session is not None and self._session.alive:
            with suppress(EpisodeError):
                found["state"] = await self._session.ask("state", answered_by="state")
        if any(step.action is not None for step in self.steps) and not self._paid:
            found["unrewarded"] = True
        return found

    def actions(self, task: Task) -> str:
        """The format of actions, from the server's schema or its tools; none where these are offered themselves."""
        if self._tools is not None:
            return self._tools.language() if self.options.react_format else ""
        return self._form.language() if self._form is not None else ""

    async def _begin(self, arguments: JsonObject) -> ServerAnswer:
        while self._owner is not None and self._owner._idle and self._session is None:
            self._session = kept if (kept := self._owner._idle.pop()).alive else None
        if self._session is None:
            self._session = await self._opened()
        answer = self._answer(await self._session.ask("reset", arguments), "reset")
        if self._wanted:
            await self._open_for_forks()
        if self._driven and self._tools is None:
            self._tools = tools_in(await self._session.ask("step", LIST), self._settings.base_url)
        return answer

    async def _open_for_forks(self) -> None:
        """Open connections in advance. Raises ``NoPlaceError`` where there is none now, ``BadEnvironmentError`` where
        there never is."""
        server, idle = self._settings.base_url, []
        self._idle = idle
        try:
            while len(idle) < min(self._wanted, _IN_ADVANCE):
                idle.append(session := await self._opened())
                with suppress(BadEnvironmentError):  # an environment may have no state before its reset
                    await session.ask("state", answered_by="state")
        except NoPlaceError as full:
            await idle.pop().close()
            if idle:
                self._most = len(idle)
                _LOG.warning("%s has room for %d forks; the search wanted %d", server, self._most, self._wanted)
                return
            if full.most is not None and full.most < 2:
                raise BadEnvironmentError(
                    f"{server} has one place, and a search needs two at least: the episode's and a fork's (up to "
                    f"{1 + self._wanted} with open_worlds = {self._wanted}); raise the server's max_concurrent_envs, "
                    'or use rollout_strategy = "StandardReAct", which needs no forks'
                ) from full
            raise
        except BaseException:
            await self._close_idle()
            raise

    async def _close_idle(self) -> None:
        """Close what waits for forks; what a fork gives back later is closed, too."""
        while self._idle:
            await self._idle.pop().close()
        self._idle = None

    async def _opened(self) -> OpenEnvSession:
        session = OpenEnvSession(self._settings)
        await session.open()
        return session

    async def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _action_schema(self) -> JsonObject:
        try:
            answer = await self._open_transport().get("/schema")
        except EndpointMissingError:
            return {}
        schema = answer.get("action") if isinstance(answer, dict) else None
        if not isinstance(schema, dict):
            raise BadEnvironmentError(f"/schema answered {excerpt(str(answer))}, which holds no schema of an 'action'")
        return schema

    def _reset_arguments(self, task: Task) -> JsonObject:
        key, own = self._settings.index_key, task.data.get("row", {})
        if not isinstance(own, dict):
            raise BadEnvironmentError(f"task '{task.id}' needs an object in data['row'], not {excerpt(repr(own))}")
        return {**({key: episode_index(task)} if key else {}), **self._settings.reset_arguments, **own}

    def _answer(self, data: JsonObject, what: str) -> ServerAnswer:
        reward: JsonValue = data.get("reward")
        if what == "step":
            if "done" not in data:
                raise BadEnvironmentError("step answered no 'done'")
            if reward is None and data["done"] is True:
                raise BadEnvironmentError(
                    "step ended the episode without a reward, which is not 0.0: let the server pay its last step"
                )
            self._paid |= reward is not None
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

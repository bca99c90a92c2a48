"""Environments of OpenEnv: its WebSocket and MCP protocols, and where their servers are."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Never
from urllib.parse import urlsplit

import aiohttp
from pydantic import Field, JsonValue

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, EpisodeError, InfrastructureError
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers import is_loopback
from openhands_rl_plugin.core.types import JsonObject, Message, Task, ToolCall
from openhands_rl_plugin.environments.http.calls import ServerTools, arguments_of, replies
from openhands_rl_plugin.environments.http.client import (
    BaseEnvClient,
    HttpEnvironmentOptions,
    RefusedActionError,
    ServerAnswer,
    episode_index,
)
from openhands_rl_plugin.environments.http.react import ParsedAction
from openhands_rl_plugin.environments.http.transport import (
    EndpointMissingError,
    UnavailableError,
    check_status,
    decode_json,
    excerpt,
)

_LOG = redacting_logger(__name__)
# Connections that a search opens in advance; further ones as it needs them.
_IN_ADVANCE = 8
_TOLD: set[str] = set()


class PlaceWait:
    """One wait for a place: at most ``patience`` seconds, told once for each server."""

    def __init__(self, server: str, patience: float) -> None:
        self._server = server
        self._patience = patience
        self._began = time.monotonic()
        self._backoff = Backoff(0.1, 2.0)
        self._tries = 0

    async def after(self, full: NoPlaceError) -> None:
        """Pause before the next try. Raises ``full`` when the time is over."""
        left = self._patience - (time.monotonic() - self._began)
        if left <= 0:
            raise full
        if self._server not in _TOLD:
            _TOLD.add(self._server)
            _LOG.warning(
                "%s has no free place (%s): episodes wait up to %g s for one (place_timeout)",
                self._server,
                "its limit is not known" if full.most is None else f"{full.most} at a time",
                self._patience,
            )
        self._tries += 1
        await self._backoff.wait(self._tries, at_most=left)


class ForkPlaces:
    """The places for the forks of one episode: idle connections, which a fork takes and gives back.

    ``wanted``: forks that the search holds at a time. ``most`` is how many it may hold; ``None``: as many as it wants.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.most: int | None = None
        self._idle: list[OpenEnvSession] = []
        self._closed = False

    async def fill(self, server: str, connect: Callable[[], OpenEnvSession]) -> None:
        """Open connections. Raises ``NoPlaceError`` where there is none now, ``BadEnvironmentError`` where there never
        is; then nothing is held."""
        while len(self._idle) < min(self.wanted, _IN_ADVANCE):
            session = connect()
            try:
                await session.open()
                with suppress(BadEnvironmentError):  # an environment may have no state before its reset
                    await session.ask("state", answered_by="state")
            except NoPlaceError as full:
                await session.close()
                if self._idle:
                    self.most = len(self._idle)
                    _LOG.warning("%s has room for %d forks; the search wanted %d", server, self.most, self.wanted)
                    return
                if full.most is not None and full.most < 2:
                    raise BadEnvironmentError(
                        f"{server} has one place, and a search needs two at least: the episode's and a fork's (up to "
                        f"{1 + self.wanted} with open_worlds = {self.wanted}); raise the server's max_concurrent_envs, "
                        'or use rollout_strategy = "StandardReAct", which needs no forks'
                    ) from full
                raise
            except BaseException:
                await session.close()
                await self.close()
                raise
            self._idle.append(session)

    def take(self) -> OpenEnvSession | None:
        """A connection that is open, if one is left."""
        while self._idle:
            if (session := self._idle.pop()).alive:
                return session
        return None

    async def give_back(self, session: OpenEnvSession) -> None:
        """Keep a connection for the next fork, unless it broke or the episode is over."""
        if self._closed or not session.alive:
            await session.close()
        else:
            self._idle.append(session)

    async def close(self) -> None:
        """Close what is idle; what is given back later is closed, too."""
        self._closed = True
        idle, self._idle = self._idle, []
        with suppress(EpisodeError):
            await asyncio.gather(*(session.close() for session in idle))


_PATH = "/ws"
_LONGEST_CLOSING = 5.0
_MOST_REASONS = 3
_TOO_BIG = 1009
_SAID = aiohttp.WSMsgType.TEXT
# Failures of the server itself, or of the machines behind it, rather than of the environment.
_BROKEN = frozenset({"FACTORY_ERROR", "SESSION_ERROR"})


class NoPlaceError(UnavailableError):
    """The server has as many episodes as it may. ``most``: how many those are, where it says that."""

    def __init__(self, message: str, most: int | None = None) -> None:
        super().__init__(message)
        self.most = most


class OpenEnvSession:
    """Sends one request at a time, each once.

    The connection is read all the time by a task of its own: a server drops a client that leaves its pings unanswered,
    and a model may need minutes for a response.

    Args:
        base_url: where the server listens, without a path.
        timeout: seconds for the connection, and for one answer.
        max_bytes: longest answer that is read.
        key: sent as a bearer token; empty: none is.
    """

    def __init__(self, base_url: str, *, timeout: float, max_bytes: int, key: str = "") -> None:
        self._base_url = base_url
        self._where = base_url + _PATH
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client: aiohttp.ClientSession | None = None
        self._connection: aiohttp.ClientWebSocketResponse | None = None
        self._listener: asyncio.Task[None] | None = None
        self._heard: asyncio.Queue[str | EpisodeError] = asyncio.Queue()
        self._end: EpisodeError | None = None

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._connection is not None and self._end is None

    async def open(self) -> None:
        """Connect, once. Raises ``InfrastructureError`` or ``BadEnvironmentError``; then nothing is left to close."""
        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(_refuse_redirect)
        self._client = aiohttp.ClientSession(
            # As for HTTP: no proxy between this process and its own machine, no cookies, no redirects.
            trust_env=not is_loopback(urlsplit(self._base_url).hostname or ""),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            trace_configs=[tracing],
        )
        try:
            self._connection = await self._connect(self._client)
        except BaseException:
            await self._client.close()
            raise
        self._listener = asyncio.create_task(self._listen(self._connection))

    async def ask(self, kind: str, data: JsonObject | None = None, *, answered_by: str = "observation") -> JsonObject:
        """Send a message of this ``kind`` and return the data of the answer, which must be of kind ``answered_by``.

        Raises ``RefusedActionError`` when a step was not executed because its action is invalid.
        """
        if self._connection is None:
            raise RuntimeError("the connection is not open")
        if not self._heard.empty():
            self._refuse_unasked(self._heard.get_nowait())
        message: JsonObject = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            async with asyncio.timeout(self._timeout):
                # When sending fails, the reading task has the reason.
                with suppress(aiohttp.ClientError, ConnectionError):
                    await self._connection.send_str(json.dumps(message))
                heard = await self._next()
        except TimeoutError as error:
            self._end = InfrastructureError(
                f"{self._where} did not answer a {kind} within {self._timeout:g} s: check the server's load or raise"
                " the timeout"
            )
            raise self._end from error
        except asyncio.CancelledError:
            self._end = InfrastructureError(f"the connection to {self._where} was cancelled during a {kind}")
            raise
        return self._read(heard, kind, answered_by)

    async def close(self) -> None:
        """Send ``close`` and wait briefly until the server releases the episode: its capacity may be limited."""
        if self._client is None or self._connection is None or self._listener is None:
            return
        try:
            if self._end is None:
                with suppress(aiohttp.ClientError, ConnectionError, TimeoutError):
                    async with asyncio.timeout(min(self._timeout, _LONGEST_CLOSING)):
                        await self._connection.send_str('{"type": "close"}')
                        await asyncio.wait({self._listener})
        finally:
            self._end = self._end or InfrastructureError(f"the connection to {self._where} is closed")
            self._listener.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LONGEST_CLOSING):
                    await self._connection.close()
            await self._client.close()

    async def _connect(self, client: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        try:
            async with asyncio.timeout(self._timeout):
                return await client.ws_connect(self._where, max_msg_size=self._max_bytes)
        except aiohttp.WSServerHandshakeError as error:
            check_status(self._where, error.status, error.message.encode())
            raise BadEnvironmentError(
                f"{self._where} answered {error.status} instead of a WebSocket (is this an OpenEnv server?)"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise UnavailableError(
                f"nothing answers at {self._base_url}: start the OpenEnv server or set env_server_base and env_port"
            ) from error
        except TimeoutError as error:
            raise InfrastructureError(
                f"{self._where} did not answer within {self._timeout:g} s: check the server's load"
            ) from error
        except aiohttp.ClientError as error:
            raise self._broke(type(error).__name__) from error

    async def _listen(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        while (message := await connection.receive()).type is _SAID and self._heard.empty():
            self._heard.put_nowait(message.data)
        if message.type is aiohttp.WSMsgType.ERROR and connection.close_code == _TOO_BIG:
            end: EpisodeError = BadEnvironmentError(
                f"{self._where} answered more than {self._max_bytes} bytes:"
                " make its observations shorter or raise max_response_bytes"
            )
        elif message.type in (_SAID, aiohttp.WSMsgType.BINARY):
            end = BadEnvironmentError(f"{self._where} sent an unexpected message: {excerpt(message.data)}")
        else:
            end = self._broke(f"close code {connection.close_code}")
        self._end = self._end or end
        self._heard.put_nowait(end)

    async def _next(self) -> str:
        heard = self._end if self._end is not None and self._heard.empty() else await self._heard.get()
        if isinstance(heard, str):
            return heard
        raise heard

    def _read(self, heard: str, kind: str, answered_by: str) -> JsonObject:
        answer = decode_json(self._where, heard.encode())
        said = answer.get("type") if isinstance(answer, dict) else None
        data = answer.get("data") if isinstance(answer, dict) else None
        if said not in (answered_by, "error") or not isinstance(data, dict):
            raise BadEnvironmentError(f"{self._where} answered a {kind} with {excerpt(heard)}")
        if said == "error":
            self._raise_error(data, kind)
        return data

    def _refuse_unasked(self, heard: str | EpisodeError) -> Never:
        if isinstance(heard, EpisodeError):
            raise heard
        # A full server sends its error before the first request.
        self._read(heard, "connection", "error")
        raise BadEnvironmentError(f"{self._where} sent an unexpected message: {excerpt(heard)}")

    def _raise_error(self, data: JsonObject, kind: str) -> Never:
        code, message = data.get("code"), excerpt(str(data.get("message")))
        said = f"{self._where} answered a {kind} with the error {code}: {message}"
        if code == "CAPACITY_REACHED":
            most = data.get("max_sessions")
            raise NoPlaceError(
                f"{said}; lower max_workers or raise max_concurrent_envs of the server",
                most if isinstance(most, int) else None,
            )
        if code in _BROKEN:
            raise InfrastructureError(said)
        if code == "VALIDATION_ERROR" and kind == "step":
            raise RefusedActionError(f"Invalid action: {_reasons(data.get('errors')) or message}")
        raise BadEnvironmentError(f"{said} {_reasons(data.get('errors'))}".rstrip())

    def _broke(self, how: str) -> InfrastructureError:
        return InfrastructureError(
            f"the connection to {self._where} broke ({how}): check whether the server is still running"
        )


async def _refuse_redirect(
    session: aiohttp.ClientSession, context: object, redirect: aiohttp.TraceRequestRedirectParams
) -> None:
    target = redirect.response.headers.get("location", "elsewhere")
    raise BadEnvironmentError(
        f"{redirect.url} redirects to {excerpt(target)}, which is not followed: set the server's own address"
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


_DEEPEST = 8
_BASE_FIELD = "metadata"


class ActionForm:
    """The fields of a server's actions. The server checks their values.

    A JSON object with these names only is the action itself. Any other text is the value of ``field``, else of the only
    field, else of the only required one. Raises ``ConfigError`` when ``field`` is not a field of the actions.
    """

    def __init__(self, schema: JsonObject, field: str | None = None) -> None:
        properties = schema.get("properties")
        found = properties if isinstance(properties, dict) else {}
        self._schema = schema
        self._names = frozenset(found)
        # A field with a single possible value needs no description.
        self._fields = {
            name: each
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
        if value is None or self._is_text(self._fields.get(self._field, {"type": "string"}), _DEEPEST):
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
        resolved = self._resolved(schema, _DEEPEST)
        values = resolved.get("enum")
        kind = resolved.get("type")
        what = f"one of {', '.join(map(str, values))}" if isinstance(values, list) else str(kind or "")
        description = schema.get("description") or resolved.get("description")
        return f"{what}: {description}" if what and isinstance(description, str) else what or str(description or "")

    def _is_text(self, schema: JsonObject, depth: int) -> bool:
        resolved = self._resolved(schema, depth)
        choices = resolved.get("anyOf")
        if isinstance(choices, list) and depth:
            return any(isinstance(each, dict) and self._is_text(each, depth - 1) for each in choices)
        return resolved.get("type") == "string"

    def _resolved(self, schema: JsonObject, depth: int) -> JsonObject:
        """The schema that a ``$ref`` refers to."""
        reference, definitions = schema.get("$ref"), self._schema.get("$defs")
        if not depth or not isinstance(reference, str) or not isinstance(definitions, dict):
            return schema
        target = definitions.get(reference.rpartition("/")[2])
        return self._resolved(target, depth - 1) if isinstance(target, dict) else schema


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
        self._places: ForkPlaces | None = None
        self._is_fork = False

    @property
    def info(self) -> EnvInfo:
        """The forks that the server has room for, and, after ``reset``, the tools, unless ``react_format`` describes
        them in the prompt."""
        tools = self._tools.offered if self._tools is not None and not self.options.react_format else ()
        most = None if self._places is None else self._places.most
        return replace(super().info, max_forks=most, tools=tools)

    def reserve(self, forks: int) -> None:
        """Let ``reset`` take the places of up to ``forks`` forks, too."""
        self._places = ForkPlaces(forks) if forks else None

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``GET /schema``, a connection of its own, and ``reset``; waits for a place."""
        arguments = self._reset_arguments(task)
        if self._form is None:
            schema = await self._action_schema()
            self._form, self._driven = ActionForm(schema, self._settings.action_field), is_mcp(schema)
        wait = PlaceWait(self._settings.base_url, 0.0 if self._is_fork else self._settings.place_timeout)
        while True:
            await self._leave()
            try:
                return await self._begin(arguments)
            except NoPlaceError as full:
                await self._leave()
                await wait.after(full)

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

    async def fork_episode(self, twin: BaseEnvClient) -> bool:
        """A fork replays, in a place that was taken for it where there is one."""
        assert isinstance(twin, OpenEnvClient), "a twin is of the same class"
        twin._places, twin._is_fork = self._places, True
        return False

    async def release(self) -> None:
        """``close``; the server ends the episode with its connection. A fork's is kept for the next fork."""
        if self._is_fork and self._places is not None and self._session is not None:
            session, self._session = self._session, None
            await self._places.give_back(session)
            return
        await self._leave()
        if self._places is not None and not self._is_fork:
            await self._places.close()

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
        options = self._settings
        if self._is_fork and self._places is not None and (kept := self._places.take()) is not None:
            self._session = kept
        else:
            self._session = self._connection()
            await self._session.open()
        answer = self._answer(await self._session.ask("reset", arguments), "reset")
        if self._places is not None and not self._is_fork:
            await self._places.fill(options.base_url, self._connection)
        if self._driven and self._tools is None:
            self._tools = tools_in(await self._session.ask("step", LIST), options.base_url)
        return answer

    def _connection(self) -> OpenEnvSession:
        options = self._settings
        bound, key = options.max_response_bytes, options.key()
        return OpenEnvSession(options.base_url, timeout=options.timeout, max_bytes=bound, key=key)

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

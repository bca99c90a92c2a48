"""A client of a server with ``/reset`` and ``/step``: JSON over HTTP, answers, the record of an episode, the opening.

Every failure is a typed error. An unreachable, slow or failing server raises ``InfrastructureError``; an answer that
violates the protocol raises ``BadEnvironmentError``. A request is sent once: only the caller knows whether it may be
repeated.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

import httpx
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import BadEnvironmentError, EpisodeError, InfrastructureError
from openhands_rl_plugin.core.messages import whole_json
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.servers import is_loopback, named_key
from openhands_rl_plugin.core.types import Frozen, JsonObject, Message, Observation, Task
from openhands_rl_plugin.environments.http.react import ParsedAction, parse_plain, parse_react

_EXCERPT_CHARACTERS = 200
_OVERLOADED = frozenset({408, 425, 429})
_NOT_OFFERED = frozenset({404, 405})
# Of what stands between, or of a server that is too busy to say more.
_NOT_ITS_OWN = frozenset({*range(300, 400), *_OVERLOADED, 502, 503, 504})


class EndpointMissingError(BadEnvironmentError):
    """The server has no such path (404 or 405)."""


class UnavailableError(InfrastructureError):
    """The request was certainly not executed: the server is unreachable, or reports that it is busy (503)."""


class HttpEnvironmentOptions(Frozen):
    """How an environment server is reached and how the model is told to act.

    ``timeout`` and ``backoff`` are in seconds. Only the opening of an episode is retried: a step that was sent may
    have been executed, so it is never sent twice. ``action_language`` of ``None`` means the known one of the task's
    environment. ``api_key_env`` names the environment variable with the server's key, for one that asks for it.
    """

    base_url: str = "http://127.0.0.1:8000"
    timeout: float = Field(default=60.0, gt=0)
    retries: int = Field(default=3, ge=0, le=20)
    backoff: float = Field(default=0.25, ge=0)
    react_format: bool = True
    system_prompt: str | None = None
    action_language: str | None = None
    max_response_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    api_key_env: str = ""

    @field_validator("base_url")
    @classmethod
    def _plain_http_url(cls, value: str) -> str:
        try:
            url = httpx.URL(value)
        except httpx.InvalidURL as error:
            raise ValueError(f"not a URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError("must look like http://host:port")
        if url.userinfo:
            raise ValueError("must not contain a user name or password")
        return value.rstrip("/")

    def key(self) -> str:
        """The server's key, empty for none. Raises ``ConfigError`` when its variable is not set."""
        return named_key(self.api_key_env, "api_key_env")


class JsonTransport:
    """POSTs JSON to one server and returns the JSON of the answer."""

    def __init__(self, options: HttpEnvironmentOptions) -> None:
        self._users = 1
        self._options = options
        self._base_url, key = options.base_url, options.key()
        url = httpx.URL(self._base_url)
        self._client = httpx.AsyncClient(
            base_url=self._base_url,
            timeout=options.timeout,
            follow_redirects=False,
            # Loopback requests must not use a proxy from the environment variables. A TLS context is created for https
            # only: that takes longer than an episode's first request.
            trust_env=not is_loopback(url.host),
            verify=url.scheme == "https",
            headers={"accept": "application/json", "accept-encoding": "identity"}
            | ({"authorization": f"Bearer {key}"} if key else {}),
        )

    async def post(self, path: str, body: JsonObject) -> JsonValue:
        """Send ``body`` to ``path`` once. Raises ``InfrastructureError`` or ``BadEnvironmentError``."""
        return await self._exchange("POST", path, body)

    async def get(self, path: str) -> JsonValue:
        """Read ``path`` once. Raises ``InfrastructureError`` or ``BadEnvironmentError``."""
        return await self._exchange("GET", path, None)

    async def ask(self, path: str, body: JsonObject) -> tuple[int, str]:
        """Send ``body`` to ``path`` once; the status and the text of the server's own answer, refusals among them.

        Raises as ``post`` for what is not the server's own: overload, redirects, a broken connection.
        """
        response, content = await self._send("POST", path, body)
        if response.status_code in _NOT_ITS_OWN:
            check_status(f"{self._base_url}{path}", response.status_code, content, response.headers.get("location"))
        return response.status_code, content.decode("utf-8", errors="replace")

    async def _exchange(self, method: str, path: str, body: JsonObject | None) -> JsonValue:
        response, content = await self._send(method, path, body)
        where = f"{self._base_url}{path}"
        check_status(where, response.status_code, content, response.headers.get("location"))
        return decode_json(where, content)

    async def _send(self, method: str, path: str, body: JsonObject | None) -> tuple[httpx.Response, bytes]:
        try:
            async with asyncio.timeout(self._options.timeout), self._client.stream(method, path, json=body) as response:
                return response, await self._read(response, path)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnavailableError(
                f"nothing answers at {self._base_url}: start the server (the embedded shop: `openhands-rl env webshop`)"
                " or set env_server_base and env_port"
            ) from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise InfrastructureError(
                f"{self._base_url}{path} did not answer within {self._options.timeout:g} s: check the server's load or"
                " raise the timeout"
            ) from error
        except httpx.TransportError as error:
            raise InfrastructureError(
                f"the connection to {self._base_url} broke during {path} ({type(error).__name__}):"
                " check whether the server is still running"
            ) from error

    def share(self) -> Self:
        """This transport, with one more user; each user calls ``close``."""
        self._users += 1
        return self

    async def close(self) -> None:
        """Close the connections when the last user is done."""
        self._users -= 1
        if self._users == 0:
            await self._client.aclose()

    async def _read(self, response: httpx.Response, path: str) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise BadEnvironmentError(
                f"{self._base_url}{path} sent a compressed answer, which was not requested: disable compression there"
            )
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > self._options.max_response_bytes:
                raise BadEnvironmentError(
                    f"{self._base_url}{path} answered more than {self._options.max_response_bytes} bytes:"
                    " make its observations shorter or raise max_response_bytes"
                )
        return bytes(content)


class CookieTransport(JsonTransport):
    """For servers that identify an episode by a cookie: ``share`` returns a transport with its own session.

    The cookies of the answers are sent back with every request.
    """

    @property
    def has_session(self) -> bool:
        """Whether the server has set a cookie."""
        return len(self._client.cookies) > 0

    def share(self) -> Self:
        """A new transport to the same server, without this one's cookies."""
        return type(self)(self._options)


def check_status(where: str, status: int, content: bytes, location: str | None = None) -> None:
    """Raise the typed error for an HTTP status of 300 or more. ``location``: the target of a redirect."""
    if status < 300:
        return
    said = f"{where} answered {status}: {excerpt(content)}"
    if status == 503:
        raise UnavailableError(said)
    if status in _NOT_OFFERED:
        raise EndpointMissingError(f"{said} (is this the address of an environment server?)")
    if status in _OVERLOADED or status >= 500:
        raise InfrastructureError(said)
    if status < 400:
        target = (location or "elsewhere")[:_EXCERPT_CHARACTERS]
        raise BadEnvironmentError(f"{where} redirects to {target}, which is not followed: set the server's own address")
    raise BadEnvironmentError(said)


def decode_json(where: str, content: bytes) -> JsonValue:
    """The JSON in ``content``. Raises ``BadEnvironmentError`` for invalid JSON, NaN and Infinity."""
    try:
        answer = json.loads(content, parse_constant=_refuse_constant)
        return whole_json(answer) if b"\\u" in content else answer
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _ConstantError) else "something that is not valid JSON"
        raise BadEnvironmentError(
            f"{where} answered {reason}: {excerpt(content)} (is this an environment server?)"
        ) from error


class _ConstantError(ValueError):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _ConstantError(f"{name}, which is neither JSON nor a reward")


def excerpt(content: bytes | str) -> str:
    """The first 200 characters on one line."""
    text = content[: 4 * _EXCERPT_CHARACTERS]
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    return " ".join(text.split())[:_EXCERPT_CHARACTERS] or "(empty)"


class ServerAnswer(BaseModel):
    """The answer to ``/reset`` or ``/step``. Other keys are ignored; a wrong type is an error.

    ``reward`` and one of ``done``, ``terminated`` and ``truncated`` may be left out by ``/reset`` only: a step that
    says nothing of its reward has none, which is not 0.0.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    state: str = Field(validation_alias=AliasChoices("state", "observation"))
    reward: float = 0.0
    done: bool = False
    terminated: bool = False
    truncated: bool = False
    info: JsonValue = None

    @classmethod
    def parse(cls, answer: JsonValue, path: str) -> Self:
        """Check an answer. Raises ``BadEnvironmentError`` that names the field."""
        if not isinstance(answer, dict):
            raise BadEnvironmentError(f"{path} answered {excerpt(str(answer))}, which is not a JSON object")
        if answer.get("error"):
            raise BadEnvironmentError(f"{path} answered an error: {excerpt(str(answer['error']))}")
        try:
            return cls.model_validate(answer)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"][:3])
            raise BadEnvironmentError(f"{path} answered a wrong '{field}': {first['msg']}") from invalid

    def as_step(self, path: str) -> Self:
        """This answer to a step. Raises ``BadEnvironmentError`` when it does not say what the step was worth."""
        if "reward" not in self.model_fields_set:
            inside = isinstance(self.info, dict) and "reward" in self.info
            hint = "the one in 'info' does not count: answer it beside 'state'" if inside else "answer a number"
            raise BadEnvironmentError(f"{path} answered no 'reward': {hint}, 0.0 where a step earns nothing")
        if not self.model_fields_set & {"done", "terminated", "truncated"}:
            raise BadEnvironmentError(f"{path} answered no 'done', so that no episode would end there")
        return self

    @property
    def messages(self) -> tuple[Message, ...]:
        """The observation as messages; empty where they are made of ``state``."""
        return ()

    def same_as(self, other: ServerAnswer | None) -> bool:
        """Whether observation, reward and end of episode are equal; ``info`` and sessions may differ."""
        mine = (self.state, self.reward, self.done, self.terminated, self.truncated)
        return other is not None and mine == (other.state, other.reward, other.done, other.terminated, other.truncated)

    @property
    def ended(self) -> bool:
        """The task itself ended; an episode that a limit of the server ended is ``truncated`` instead."""
        return self.terminated or (self.done and not self.truncated)


@dataclass(frozen=True, slots=True)
class EpisodeStep:
    """One executed action with the server's answer, or a malformed action that was not sent to the server."""

    action: str | None
    answer: ServerAnswer | None = None

    @property
    def reward(self) -> float:
        """The reward of the step."""
        return self.answer.reward if self.answer is not None else 0.0


class SessionAnswer(ServerAnswer):
    """The answer to ``/reset``, with a session where the server can run several episodes of one task."""

    session: str | int | None = Field(default=None, validation_alias=AliasChoices("session", "session_id"))


ACTION_LANGUAGES = {
    "webshop": (
        "search[keywords] - search the shop\n"
        "click[value] - click a button, product or option that the page shows; click[Buy Now] ends the task"
    ),
    "textcraft": (
        "get <count> <item> - take an ingredient from the world\n"
        "craft <count> <item> using <count> <ingredient>, ... - follow one of the given recipes\n"
        "inventory - list what you carry"
    ),
    "sciworld": (
        "look around, look at <object>, look in <object>, inventory, task, wait, wait1\n"
        "go to <place>, open <object>, close <object>, activate <object>, deactivate <object>\n"
        "pick up <object>, put down <object>, move <object> to <place>, pour <object> into <container>, "
        "dunk <object> into <container>, mix <container>\n"
        "connect <object> to <object>, disconnect <object>, use <object> on <object>, focus on <object>, "
        "read <object>, eat <object>, flush <object>"
    ),
    "babyai": (
        "turn right, turn left, move forward, toggle, drop, check available actions\n"
        "go to <object> <id>, pickup <object> <id>, go to goal\n"
        "go through <door> <id>, toggle and go through <door> <id>"
    ),
    "alfworld": (
        "go to <place>, look, inventory, examine <object>\n"
        "take <object> from <place>, put <object> in/on <place> (in newer versions: move <object> to <place>)\n"
        "open <object>, close <object>, use <object>\n"
        "clean <object> with <place>, heat <object> with <place>, cool <object> with <place>"
    ),
}

_ROLE = "Do the task step by step in an environment. Each turn you see its state and choose one action."
_REACT = "Answer in this form:\nThought: <your reasoning>\nAction: <one action>"
_PLAIN = "Answer with the action only."


def action_language(environment: str) -> str:
    """The actions of a known environment (``agentgym/webshop`` counts as ``webshop``), or an empty text."""
    return ACTION_LANGUAGES.get(environment.rsplit("/", 1)[-1], "")


def opening_messages(
    task: Task, state: str, *, react_format: bool, actions: str, system_prompt: str | None = None
) -> tuple[Message, Message]:
    """A system message with the task and how to act, then the first state as a user message.

    ``system_prompt`` replaces the general instructions and the list of actions, but neither the answer format, which
    the client requires, nor the task.
    """
    general = [system_prompt] if system_prompt is not None else [_ROLE, f"Actions:\n{actions}" if actions else ""]
    parts = [*general, _REACT if react_format else _PLAIN, f"Task: {task.instruction}" if task.instruction else ""]
    system = "\n".join(part for part in parts if part)
    return Message(role="system", content=system), Message(role="user", content=state)


_LONGEST_PAUSE = 5.0
_POLL = 0.01
# Servers that answer a reset with a session; and of the others, whose episode runs by server and index. A client that
# was dropped without ``close`` blocks no other.
_WITH_SESSIONS: set[str] = set()
_HOLDERS: weakref.WeakValueDictionary[tuple[str, int], WebEnvClient] = weakref.WeakValueDictionary()
_CLAIMS = threading.Lock()
WITHOUT_FORKS = 'use rollout_strategy = "StandardReAct", which needs no forks'


class RefusedActionError(BadEnvironmentError):
    """An invalid action, which was not executed. Its message becomes the observation, and the episode continues."""


class Episode(ABC):
    """One episode of an environment that takes actions as text; implements ``core.protocols.Environment`` and
    ``Forkable`` (reset once, step, fork, close once).
    """

    Options: ClassVar[Any]

    def __init__(self, options: Any = None) -> None:
        self.options = options or self.Options()
        self.steps: list[EpisodeStep] = []
        self._task: Task | None = None
        self._opening: ServerAnswer | None = None
        self._last: ServerAnswer | None = None
        self._closed = False

    @property
    @abstractmethod
    def where(self) -> str:
        """The environment, for error messages."""

    @property
    def copies(self) -> bool:
        """Whether a fork is a copy, not a replay of the actions."""
        return False

    @property
    def info(self) -> EnvInfo:
        """How many actions a fork replays; none for a copy."""
        return EnvInfo(fork_steps=0 if self.copies else sum(step.action is not None for step in self.steps))

    @abstractmethod
    async def open_episode(self, task: Task) -> ServerAnswer:
        """Start the episode and return its first observation. May be retried after a failure."""

    @abstractmethod
    async def act(self, action: str) -> ServerAnswer:
        """Execute one action, exactly once. Raises ``RefusedActionError`` for an invalid action."""

    async def release(self) -> None:  # noqa: B027 - by default there is nothing to release
        """Release the episode. Called once, also after ``open_episode`` failed."""

    async def fork_episode(self, twin: Self) -> bool:
        """Copy the episode for ``twin``; false when that is not possible, and the actions are replayed."""
        return False

    def actions(self, task: Task) -> str:
        """The description of the actions in the prompt, when the options give none."""
        return action_language(task.environment)

    def opening(self, task: Task, state: str) -> tuple[Message, ...]:
        """The messages that open the conversation."""
        options = self.options
        actions = self.actions(task) if options.action_language is None else options.action_language
        return opening_messages(
            task, state, react_format=options.react_format, actions=actions, system_prompt=options.system_prompt
        )

    def reply(self, action: Message, state: str) -> tuple[Message, ...]:
        """The messages that answer an action."""
        return (Message(role="user", content=state),)

    def parse(self, action: Message) -> ParsedAction:
        """The action in a response of the model."""
        return parse_react(action.content) if self.options.react_format else parse_plain(action.content)

    async def reset(self, task: Task) -> Observation:
        """Open the episode of ``task``; the observation holds the system message and the first state."""
        if self._task is not None or self._closed:
            raise RuntimeError("an environment runs one episode: make a new one")
        self._task = task
        self._last = self._opening = await self._open(task)
        return _observation(self._last, self._last.messages or self.opening(task, self._last.state))

    async def step(self, action: Message) -> Observation:
        """Execute one model response. A malformed one is not executed: it takes a step and has reward 0."""
        if self._last is None:
            raise RuntimeError("no episode is open: reset did not succeed")
        if self._last.ended or self._last.truncated:
            raise RuntimeError("the episode has ended")
        try:
            parsed = self.parse(action)
            if parsed.action is None:
                return self._malformed(action, parsed.error)
            answer = (await self.act(parsed.action)).as_step("/step")
        except RefusedActionError as refused:
            return self._malformed(action, str(refused))
        self._last = answer
        self.steps.append(EpisodeStep(parsed.action, answer))
        return _observation(answer, answer.messages or self.reply(action, answer.state))

    async def fork(self) -> Self:
        """An independent copy of the open episode in its current state: a copy where that is possible, else by replay.

        A replay executes the actions so far in a new episode. Raises ``BadEnvironmentError`` when the answers differ
        from the original ones twice, because a search in such copies would explore another episode.
        """
        twin = await self._twin() or await self._twin()
        if twin is None:
            raise BadEnvironmentError(
                f"{self.where} cannot be forked: it answered the same actions differently twice; {WITHOUT_FORKS}"
            )
        twin.steps, twin._last = list(self.steps), self._last
        return twin

    async def evidence(self) -> JsonObject:
        """Final state, return, per-step rewards and how the episode ended; empty when it never began."""
        if self._last is None or self._task is None:
            return {}
        return {
            "idx": self._task.data.get("idx"),
            "final_state": self._last.state,
            "return": sum(step.reward for step in self.steps),
            "rewards": [step.reward for step in self.steps],
            "steps": len(self.steps),
            "malformed": sum(step.action is None for step in self.steps),
            "done": self._last.ended or self._last.truncated,
            "truncated": self._last.truncated,
            "info": self._last.info,
        }

    async def close(self) -> None:
        """Release the episode; a second call does nothing."""
        if not self._closed:
            self._closed = True
            if self._task is not None:
                await self.release()

    async def _open(self, task: Task) -> ServerAnswer:
        return await self.open_episode(task)

    async def _twin(self) -> Self | None:
        """A copy of the episode; ``None`` where the replay went another way."""
        if self._task is None or self._opening is None or self._closed:
            raise RuntimeError("only an open episode can be forked")
        twin = self._new_twin()
        twin._task, twin._opening = self._task, self._opening
        try:
            if await self.fork_episode(twin) or await self._replayed(twin, self._opening):
                return twin
        except BaseException:
            with suppress(EpisodeError):
                await twin.close()
            raise
        with suppress(EpisodeError):
            await twin.close()
        return None

    def _new_twin(self) -> Self:
        return type(self)(self.options)

    async def _replayed(self, twin: Self, opening: ServerAnswer) -> bool:
        """Whether the actions so far were answered in ``twin`` as they were here."""
        assert self._task is not None
        same = (await twin._open(self._task)).same_as(opening)
        for step in (step for step in list(self.steps) if step.action is not None):
            same = same and (await twin.act(step.action or "")).same_as(step.answer)
        return same

    def _malformed(self, action: Message, error: str | None) -> Observation:
        self.steps.append(EpisodeStep(None))
        if not action.tool_calls:
            return Observation(messages=(Message(role="user", content=error),))
        answers = (
            Message(role="tool", content=error, tool_call_id=call.id, name=call.name) for call in action.tool_calls
        )
        return Observation(messages=tuple(answers))


def _observation(answer: ServerAnswer, messages: tuple[Message, ...]) -> Observation:
    return Observation(messages=messages, reward=answer.reward, terminated=answer.ended, truncated=answer.truncated)


class BaseEnvClient(Episode):
    """Base class of environments behind HTTP.

    A subclass implements ``open_episode`` and ``act``, and overrides ``release``, ``fork_episode`` and ``actions``
    where its server offers more. Parsing the action out of the model's text, the opening messages, retries of the
    opening, and the evidence for rewards are inherited. An environment that is not behind HTTP needs no base class:
    any class with the methods of ``Environment`` works.
    """

    Options: ClassVar[type[HttpEnvironmentOptions]] = HttpEnvironmentOptions

    def __init__(self, options: HttpEnvironmentOptions | None = None) -> None:
        super().__init__(options)
        self._transport: JsonTransport | None = None

    @property
    def where(self) -> str:
        """The server's address."""
        return self.options.base_url

    def make_transport(self) -> JsonTransport:
        """This episode's connection to the server."""
        return JsonTransport(self.options)

    async def post(self, path: str, body: JsonObject) -> JsonValue:
        """POST JSON once. Raises ``InfrastructureError`` or ``BadEnvironmentError``."""
        return await self._open_transport().post(path, body)

    async def close(self) -> None:
        """Release the episode on the server and close the connections; a second call does nothing."""
        try:
            if self._transport is not None:
                await super().close()
        finally:
            self._closed = True
            transport, self._transport = self._transport, None
            if transport is not None:
                await transport.close()

    def _new_twin(self) -> Self:
        twin = super()._new_twin()
        twin._transport = self._open_transport().share()
        return twin

    def _open_transport(self) -> JsonTransport:
        if self._transport is None:
            raise RuntimeError("the environment is not open: call reset first and nothing after close")
        return self._transport

    async def _open(self, task: Task) -> ServerAnswer:
        """The opening, which earns nothing. After retries, an error says beside its own cause that of the first try."""
        self._transport = self._transport or self.make_transport()
        backoff = Backoff(self.options.backoff, _LONGEST_PAUSE)
        first: UnavailableError | None = None
        attempt = 0
        while True:
            try:
                return (await self.open_episode(task)).model_copy(update={"reward": 0.0})
            except EpisodeError as error:
                if isinstance(error, UnavailableError) and attempt < self.options.retries:
                    first, attempt = first or error, attempt + 1
                    await backoff.wait(attempt)
                    continue
                if first is not None and str(first) != str(error):
                    error.args = (f"{error} (the first of {attempt + 1} tries: {first})",)
                raise


def episode_index(task: Task) -> int:
    """The server-side number of the task. Raises ``BadEnvironmentError`` when the task has none."""
    index = task.data.get("idx")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise BadEnvironmentError(f"task '{task.id}' needs a whole number in data['idx'], not {excerpt(repr(index))}")
    return index


class WebEnvClient(BaseEnvClient):
    """The simple protocol: ``POST /reset {"idx"}`` and ``POST /step {"action", "idx"}``, both answered with
    ``{"state", "reward", "done"}``.

    A server that answers the reset with a ``session`` gets it back with every request, and a ``/close`` at the end.
    On a server without sessions two episodes of one ``idx`` share their state, so the second one is refused while the
    first one runs (within this process; other processes are not checked).
    """

    def __init__(self, options: HttpEnvironmentOptions | None = None) -> None:
        super().__init__(options)
        self._index = -1
        self._session: str | int | None = None
        self._server_forks = True

    @property
    def copies(self) -> bool:
        """Whether the server copies episodes, or might and was not tried."""
        return self._server_forks

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``POST /reset``."""
        server, self._index = self.options.base_url, episode_index(task)
        while server not in _WITH_SESSIONS and (holder := self._holder()) is not self:
            if holder._last is not None:
                raise self._taken()
            await asyncio.sleep(_POLL)  # its reset will show whether the server has sessions
        answer = SessionAnswer.parse(await self.post("/reset", {"idx": self._index}), "/reset")
        self._session = answer.session
        if self._session is not None:
            _WITH_SESSIONS.add(server)
            self._give_up()
        else:
            _WITH_SESSIONS.discard(server)
            if self._holder() is not self:
                raise self._taken()
        return answer

    async def act(self, action: str) -> ServerAnswer:
        """``POST /step``."""
        return ServerAnswer.parse(await self.post("/step", {"action": action, **self._key()}), "/step")

    async def fork_episode(self, twin: Episode) -> bool:
        """``POST /fork`` where the server has it, answered with a new ``session``.

        Raises ``BadEnvironmentError`` for a server without sessions: a copy would share the state of the episode.
        """
        if self._session is None:
            raise BadEnvironmentError(
                f"{self.options.base_url} cannot be forked: it has no sessions, so a copy would share the state of the "
                f"episode; {WITHOUT_FORKS}, or a server whose /reset answers a session"
            )
        assert isinstance(twin, WebEnvClient), "a twin is of the same class"
        answer: JsonValue = None
        try:
            answer = await self.post("/fork", self._key()) if self._server_forks else None
        except EndpointMissingError:
            self._server_forks = False
        twin._server_forks = self._server_forks
        if not self._server_forks:
            return False
        session = answer.get("session") if isinstance(answer, dict) else None
        if not isinstance(session, str | int) or session == self._session:
            raise BadEnvironmentError(f"/fork answered {excerpt(str(answer))}, which holds no new 'session'")
        twin._index, twin._session = self._index, session
        return True

    async def release(self) -> None:
        """``POST /close`` where the server returned a session; otherwise release the index."""
        self._give_up()
        if self._session is not None:
            # The simple protocol has no /close; a server without one lets its sessions expire.
            with suppress(EndpointMissingError):
                await self.post("/close", self._key())

    def _key(self) -> JsonObject:
        return {"idx": self._index} if self._session is None else {"idx": self._index, "session": self._session}

    def _holder(self) -> WebEnvClient:
        """Whose episode runs on the server; this one's where no other does."""
        with _CLAIMS:
            return _HOLDERS.setdefault((self.options.base_url, self._index), self)

    def _give_up(self) -> None:
        with _CLAIMS:
            if _HOLDERS.get((self.options.base_url, self._index)) is self:
                del _HOLDERS[self.options.base_url, self._index]

    def _taken(self) -> InfrastructureError:
        return InfrastructureError(
            f"{self.options.base_url} has no sessions and an episode of idx {self._index} is running already: run its "
            "episodes one at a time (max_workers = 1) or use a server whose /reset answers a session"
        )

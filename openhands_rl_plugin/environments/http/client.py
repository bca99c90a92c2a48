"""Episodes over text, and the client of a server with ``/reset`` and ``/step``: JSON over HTTP, each request sent once.

Every failure is a typed error. An unreachable, slow or failing server raises ``InfrastructureError``; an answer that
violates the protocol raises ``BadEnvironmentError``. Only the caller knows whether a request may be repeated.
"""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Annotated, Any, ClassVar, NamedTuple, Never, Self
from urllib.parse import urlsplit

import httpx
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import BadEnvironmentError, EpisodeError, InfrastructureError
from openhands_rl_plugin.core.messages import whole_json
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.servers import is_loopback, named_key
from openhands_rl_plugin.core.types import Frozen, JsonObject, Message, Observation, Task
from openhands_rl_plugin.environments.http.react import ParsedAction, parse_plain, parse_react

MOST_BYTES = 4 * 1024 * 1024
"""Of a response."""
_EXCERPT_CHARACTERS = 200


class EndpointMissingError(BadEnvironmentError):
    """The server has no such path (404 or 405)."""


class UnavailableError(InfrastructureError):
    """The request was certainly not executed: the server is unreachable, or reports that it is busy (503)."""


class NoPlaceError(UnavailableError):
    """The server has as many episodes as it may."""


def _http_url(value: str) -> str:
    url = urlsplit(value)
    if url.scheme not in ("http", "https") or not url.hostname or url.username:
        raise ValueError("must look like http://host:port, without a user name")
    return value.rstrip("/")


class HttpEnvironmentOptions(Frozen):
    """How an environment server is reached and how the model is told to act.

    ``timeout`` and ``backoff`` are in seconds. Only the opening of an episode is retried: a step that was sent may
    have been executed, so it is never sent twice. ``action_language`` of ``None`` means the known one of the task's
    environment. ``api_key_env`` names the environment variable with the server's key, for one that asks for it.
    ``place_timeout``: seconds that an episode waits for a place on a server that is full.
    """

    base_url: Annotated[str, AfterValidator(_http_url)] = "http://127.0.0.1:8000"
    timeout: float = Field(default=60.0, gt=0)
    retries: int = Field(default=3, ge=0, le=20)
    backoff: float = Field(default=0.25, ge=0)
    react_format: bool = True
    system_prompt: str | None = None
    action_language: str | None = None
    api_key_env: str = ""
    place_timeout: float = Field(default=1800.0, ge=0)

    def key(self) -> str:
        """The server's key, empty for none. Raises ``ConfigError`` when its variable is not set."""
        return named_key(self.api_key_env, "api_key_env")


def check_status(where: str, status: int, content: bytes, location: str | None = None) -> None:
    """Raise the typed error for an HTTP status of 300 or more. ``location``: the target of a redirect."""
    if status < 300:
        return
    text = f"{where} answered {status}: {excerpt(content)}"
    if status == 503:
        raise UnavailableError(text)
    if status in (404, 405):
        raise EndpointMissingError(f"{text} (is this the address of an environment server?)")
    if status in (408, 425, 429) or status >= 500:
        raise InfrastructureError(text)
    if status < 400:
        raise BadEnvironmentError(f"{where} redirects to {excerpt(location or 'elsewhere')}, which is not followed")
    raise BadEnvironmentError(text)


def decode_json(where: str, content: bytes) -> JsonValue:
    """The JSON in ``content``. Raises ``BadEnvironmentError`` for invalid JSON, NaN and Infinity."""
    try:
        answer = json.loads(content, parse_constant=_refuse_constant)
        return whole_json(answer) if b"\\u" in content else answer
    except (ValueError, RecursionError) as error:
        raise BadEnvironmentError(
            f"{where} answered what is not valid JSON ({error}): {excerpt(content)} (is this an environment server?)"
        ) from error


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is no number")


def excerpt(content: bytes | str) -> str:
    """The first 200 characters on one line."""
    text = content[: 4 * _EXCERPT_CHARACTERS]
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    return " ".join(text.split())[:_EXCERPT_CHARACTERS] or "(empty)"


class ServerAnswer(BaseModel):
    """The answer to ``/reset`` or ``/step``. Other keys are ignored; a wrong type is an error.

    ``reward`` and one of ``done``, ``terminated`` and ``truncated`` may be left out by ``/reset`` only: a step that
    has no reward is not worth 0.0. ``session``: where the server can run several episodes of one task. ``messages``:
    the observation, where it is not made of ``state``; a server gives none.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    state: str = Field(validation_alias=AliasChoices("state", "observation"))
    reward: float = 0.0
    done: bool = False
    terminated: bool = False
    truncated: bool = False
    info: JsonValue = None
    session: str | int | None = Field(default=None, validation_alias=AliasChoices("session", "session_id"))

    @classmethod
    def parse(cls, answer: JsonValue, path: str) -> Self:
        """Check an answer. Raises ``BadEnvironmentError`` that names the field."""
        if not isinstance(answer, dict):
            raise BadEnvironmentError(f"{path} answered {excerpt(str(answer))}, which is not a JSON object")
        if answer.get("error"):
            raise BadEnvironmentError(f"{path} answered an error: {excerpt(str(answer['error']))}")
        try:
            read = cls.model_validate(answer)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"][:3])
            raise BadEnvironmentError(f"{path} answered a wrong '{field}': {first['msg']}") from invalid
        if path == "/step" and "reward" not in answer:
            raise BadEnvironmentError(f"{path} answered no 'reward': answer it beside 'state', 0.0 where there is none")
        if path == "/step" and not answer.keys() & {"done", "terminated", "truncated"}:
            raise BadEnvironmentError(f"{path} answered no 'done', so that no episode would end there")
        return read

    def same_as(self, other: ServerAnswer | None) -> bool:
        """Whether observation, reward and end of episode are equal; ``info`` and sessions may differ."""
        kept = {"state", "reward", "done", "terminated", "truncated"}
        return other is not None and self.model_dump(include=kept) == other.model_dump(include=kept)

    @property
    def ended(self) -> bool:
        """The task itself ended; an episode that a limit of the server ended is ``truncated`` instead."""
        return self.terminated or (self.done and not self.truncated)


class EpisodeStep(NamedTuple):
    """An executed action with its answer; or ``None`` for both, for a malformed action, which was not sent."""

    action: Any = None
    answer: ServerAnswer | None = None


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
    task: Task, state: str, *, react_format: bool | None, actions: str, system_prompt: str | None = None
) -> tuple[Message, Message]:
    """A system message with the task and how to act, then the first state as a user message.

    ``system_prompt`` replaces the general instructions and the list of actions, but neither the answer format, which
    the client requires, nor the task. ``react_format`` of ``None``: answers have no form, because they call tools.
    """
    form = "" if react_format is None else _REACT if react_format else _PLAIN
    general = [system_prompt] if system_prompt is not None else [_ROLE, f"Actions:\n{actions}" if actions else ""]
    parts = [*general, form, f"Task: {task.instruction}" if task.instruction else ""]
    system = "\n".join(part for part in parts if part)
    return Message(role="system", content=system), Message(role="user", content=state)


# Of servers without sessions: the episode that runs, by server and index. One that was dropped without ``close`` blocks
# no other.
_RUNNING: weakref.WeakValueDictionary[tuple[str, int], WebEnvClient] = weakref.WeakValueDictionary()
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
        return EnvInfo(fork_steps=0 if self.copies else sum(step.answer is not None for step in self.steps))

    @abstractmethod
    async def open_episode(self, task: Task) -> ServerAnswer:
        """Start the episode and return its first observation. May be retried after a failure."""

    @abstractmethod
    async def act(self, action: Any) -> ServerAnswer:
        """Execute one action that ``parse`` read, exactly once. Raises ``RefusedActionError`` for an invalid one."""

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
        form = None if self.info.tools else options.react_format
        return opening_messages(task, state, react_format=form, actions=actions, system_prompt=options.system_prompt)

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
        return _observation(self._last, self.opening(task, self._last.state))

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
            answer = await self.act(parsed.action)
        except RefusedActionError as refused:
            return self._malformed(action, str(refused))
        self._last = answer
        self.steps.append(EpisodeStep(parsed.action, answer))
        return _observation(answer, self.reply(action, answer.state))

    async def fork(self) -> Self:
        """An independent copy of the open episode in its current state: a copy where that is possible, else by replay.

        A replay executes the actions so far in a new episode. Raises ``BadEnvironmentError`` when an answer differs
        from the original one, because a search in such copies would explore another episode.
        """
        if self._task is None or self._opening is None or self._closed:
            raise RuntimeError("only an open episode can be forked")
        twin, steps, last = self._new_twin(), list(self.steps), self._last
        twin._task, twin._opening = self._task, self._opening
        try:
            if not await self.fork_episode(twin):
                same = (await twin._open(self._task)).same_as(self._opening)
                for step in (step for step in steps if step.answer is not None):
                    same = same and (await twin.act(step.action)).same_as(step.answer)
                if not same:
                    raise BadEnvironmentError(
                        f"{self.where} cannot be forked: it answered the same actions differently; {WITHOUT_FORKS}"
                    )
        except BaseException:
            with suppress(EpisodeError):
                await twin.close()
            raise
        twin.steps, twin._last = steps, last
        return twin

    async def evidence(self) -> JsonObject:
        """Final state, return, per-step rewards and how the episode ended; empty when it never began."""
        if self._last is None or self._task is None:
            return {}
        rewards = [0.0 if step.answer is None else step.answer.reward for step in self.steps]
        return {
            "idx": self._task.data.get("idx"),
            "final_state": self._last.state,
            "return": sum(rewards),
            "rewards": [*rewards],
            "steps": len(rewards),
            "malformed": sum(step.answer is None for step in self.steps),
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

    def _new_twin(self) -> Self:
        return type(self)(self.options)

    def _malformed(self, action: Message, error: str | None) -> Observation:
        self.steps.append(EpisodeStep())
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
        self._http: httpx.AsyncClient | None = None
        self._patience = self.options.place_timeout

    @property
    def where(self) -> str:
        """The server's address."""
        return self.options.base_url

    async def request(self, path: str, body: JsonObject | None = None) -> JsonValue:
        """POST ``body``, or GET without one, once. Raises ``InfrastructureError`` or ``BadEnvironmentError``."""
        if self._http is None:
            raise RuntimeError("the environment is not open: call reset first and nothing after close")
        where, seconds, content = f"{self.where}{path}", self.options.timeout, bytearray()
        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(seconds), self._http.stream(method, where, json=body) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MOST_BYTES:
                        raise BadEnvironmentError(f"{where} answered more than {MOST_BYTES} bytes")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnavailableError(
                f"nothing answers at {self.where}: start the server (the embedded shop: `openhands-rl env webshop`) "
                "or set env_server_base and env_port"
            ) from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise InfrastructureError(f"{where} did not answer within {seconds:g} s") from error
        except httpx.RequestError as error:
            raise InfrastructureError(
                f"the connection to {self.where} broke during {path} ({type(error).__name__}): check whether the "
                "server is still running"
            ) from error
        check_status(where, response.status_code, bytes(content), response.headers.get("location"))
        return decode_json(where, bytes(content))

    async def close(self) -> None:
        """Release the episode on the server and close the connections; a second call does nothing."""
        http = self._http
        try:
            if http is not None:
                await super().close()
        finally:
            self._closed, self._http = True, None
            if http is not None:
                await http.aclose()

    def _new_twin(self) -> Self:
        twin = super()._new_twin()
        twin._http = self._new_http()
        twin._patience = 0.0  # forks that wait for each other's places would wait for ever
        return twin

    def _new_http(self) -> httpx.AsyncClient:
        key, url = self.options.key(), httpx.URL(self.where)
        return httpx.AsyncClient(
            timeout=self.options.timeout,
            # Loopback requests must not use a proxy from the environment variables. A TLS context is created for https
            # only: that takes longer than an episode's first request.
            trust_env=not is_loopback(url.host),
            verify=url.scheme == "https",
            headers={"authorization": f"Bearer {key}"} if key else None,
        )

    async def _open(self, task: Task) -> ServerAnswer:
        """The opening, which earns nothing; retried where the server is away or busy, or has no place yet."""
        self._http = self._http or self._new_http()
        backoff, failed, until = Backoff(self.options.backoff, 5.0), 0, time.monotonic() + self._patience
        while True:
            try:
                return (await self.open_episode(task)).model_copy(update={"reward": 0.0})
            except UnavailableError as error:
                failed += 1
                waits = time.monotonic() < until if isinstance(error, NoPlaceError) else failed <= self.options.retries
                if not waits:
                    raise
            await backoff.wait(failed)


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
        self._index = episode_index(task)
        self._check_place(_RUNNING.get(self._place))
        answer = ServerAnswer.parse(await self.request("/reset", {"idx": self._index}), "/reset")
        self._session = answer.session
        if self._session is None:
            self._check_place(_RUNNING.setdefault(self._place, self))
        return answer

    async def act(self, action: str) -> ServerAnswer:
        """``POST /step``."""
        return ServerAnswer.parse(await self.request("/step", {"action": action, **self._key()}), "/step")

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
            answer = await self.request("/fork", self._key()) if self._server_forks else None
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
        if _RUNNING.get(self._place) is self:
            del _RUNNING[self._place]
        if self._session is not None:
            # The simple protocol has no /close; a server without one lets its sessions expire.
            with suppress(EndpointMissingError):
                await self.request("/close", self._key())

    @property
    def _place(self) -> tuple[str, int]:
        return self.options.base_url, self._index

    def _key(self) -> JsonObject:
        return {"idx": self._index} if self._session is None else {"idx": self._index, "session": self._session}

    def _check_place(self, running: WebEnvClient | None) -> None:
        if running not in (None, self):
            raise InfrastructureError(
                f"{self.options.base_url} has no sessions and an episode of idx {self._index} is running already: run "
                "its episodes one at a time (max_workers = 1) or use a server whose /reset answers a session"
            )

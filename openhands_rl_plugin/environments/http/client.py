"""Episodes over text, and clients of servers with ``/reset`` and ``/step``: JSON over HTTP, each request sent once.

Every failure is a typed error. An unreachable, slow or failing server raises ``InfrastructureError``; an answer that
violates the protocol raises ``BadEnvironmentError``. The runner repeats the whole episode.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, NamedTuple, Self
from urllib.parse import urlsplit

import httpx
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, EpisodeError, InfrastructureError
from openhands_rl_plugin.core.messages import whole_json
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.servers import is_loopback, named_key
from openhands_rl_plugin.core.types import Frozen, JsonObject, Message, Observation, Task
from openhands_rl_plugin.environments.http.react import ParsedAction, parse_plain, parse_react

MOST_BYTES = 4 * 1024 * 1024
"""The most bytes of a response."""
_EXCERPT_CHARACTERS = 200


class EndpointMissingError(BadEnvironmentError):
    """The server has no such path (404 or 405)."""


def _http_url(value: str) -> str:
    url = urlsplit(value)
    if url.scheme not in ("http", "https") or not url.hostname or url.username:
        raise ValueError("must look like http://host:port, without a user name")
    return value.rstrip("/")


class EpisodeOptions(Frozen):
    """How the model learns to act. ``timeout`` is in seconds, of one call. ``action_language`` of ``None`` means the
    known one of the task's environment.
    """

    timeout: float = Field(default=60.0, gt=0)
    react_format: bool = True
    system_prompt: str | None = None
    action_language: str | None = None


class HttpEnvironmentOptions(EpisodeOptions):
    """``TextOptions``, and how to reach an environment server.

    ``api_key_env`` names the environment variable with the server's key, for one that asks for it."""

    base_url: Annotated[str, AfterValidator(_http_url)] = "http://127.0.0.1:8000"
    api_key_env: str = ""

    def key(self) -> str:
        """The server's key, empty for none. Raises ``ConfigError`` when its variable is not set."""
        return named_key(self.api_key_env, "api_key_env")


def check_status(where: str, status: int, content: bytes) -> None:
    """Raise the typed error for an HTTP status of 300 or more; no redirect is followed."""
    text = f"{where} answered {status}: {excerpt(content)}"
    if status in (404, 405):
        raise EndpointMissingError(f"{text} (is this the address of an environment server?)")
    if status in (408, 425, 429) or status >= 500:
        raise InfrastructureError(text)
    if status >= 300:
        raise BadEnvironmentError(text)


def decode_json(where: str, content: bytes | str) -> JsonValue:
    """The JSON in ``content``, with U+FFFD for halves of characters. Raises ``BadEnvironmentError`` for invalid JSON
    and NaN."""
    try:
        try:
            return from_json(content, allow_inf_nan=False)
        except ValueError:
            return from_json(json.dumps(whole_json(json.loads(content))), allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise BadEnvironmentError(
            f"{where} answered what is not valid JSON ({error}): {excerpt(content)} (is this an environment server?)"
        ) from error


def excerpt(content: bytes | str) -> str:
    """The first 200 characters on one line."""
    text = content[: 4 * _EXCERPT_CHARACTERS]
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    return " ".join(text.split())[:_EXCERPT_CHARACTERS] or "(empty)"


class ServerAnswer(BaseModel):
    """The answer to ``/reset`` or ``/step``. Other keys are ignored; a wrong type is an error.

    ``reward`` and ``done`` may be left out by ``/reset`` only: a step that has no reward is not worth 0.0.
    ``truncated``: a limit of the server ended the episode, not the task. ``session``: where the server can run several
    episodes of one task.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    state: str = Field(validation_alias=AliasChoices("state", "observation"))
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    info: JsonValue = None
    session: str | int | None = None

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
        if path == "/step" and (missing := {"reward", "done"} - answer.keys()):
            raise BadEnvironmentError(f"{path} answered no '{min(missing)}': answer 'reward' and 'done' with 'state'")
        return read

    @property
    def shown(self) -> tuple[object, ...]:
        """The fields that a replayed action must reproduce; ``info`` and sessions may differ."""
        return self.state, self.reward, self.done, self.truncated


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
        """Start the episode and return its first observation, whose reward does not count."""

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
        self._last = self._opening = await self.open_episode(task)
        return Observation(messages=self.opening(task, self._last.state))

    async def step(self, action: Message) -> Observation:
        """Execute one model response. A malformed one is not executed: it takes a step and has reward 0."""
        if self._last is None or self._last.done or self._last.truncated:
            raise RuntimeError("no episode is open")
        try:
            parsed = self.parse(action)
            if parsed.action is None:
                return self._malformed(action, parsed.error)
            answer = await self.act(parsed.action)
        except RefusedActionError as refused:
            return self._malformed(action, str(refused))
        self._last = answer
        self.steps.append(EpisodeStep(parsed.action, answer))
        return Observation(
            messages=self.reply(action, answer.state),
            reward=answer.reward,
            terminated=answer.done and not answer.truncated,
            truncated=answer.truncated,
        )

    async def fork(self) -> Self:
        """An independent copy of the open episode in its current state: a copy where that is possible, else by replay.

        A replay executes the actions so far in a new episode. Raises ``BadEnvironmentError`` when an answer differs
        from the original one, because a search in such copies would explore another episode.
        """
        if self._task is None or self._opening is None or self._closed:
            raise RuntimeError("only an open episode can be forked")
        twin, steps, last = type(self)(self.options), list(self.steps), self._last
        twin._task, twin._opening = self._task, self._opening
        try:
            if not await self.fork_episode(twin):
                done = [(action, answer) for action, answer in steps if answer is not None]
                found = [await twin.open_episode(self._task), *[await twin.act(action) for action, _ in done]]
                if [each.shown for each in found] != [each.shown for each in (self._opening, *(x for _, x in done))]:
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
            "done": self._last.done or self._last.truncated,
            "truncated": self._last.truncated,
            "info": self._last.info,
        }

    async def close(self) -> None:
        """Release the episode; a second call does nothing."""
        if not self._closed:
            self._closed = True
            if self._task is not None:
                await self.release()

    def _malformed(self, action: Message, error: str | None) -> Observation:
        self.steps.append(EpisodeStep())
        calls = action.tool_calls
        results = [Message(role="tool", content=error, tool_call_id=call.id, name=call.name) for call in calls]
        return Observation(messages=tuple(results) or (Message(role="user", content=error),))


class BaseEnvClient(Episode):
    """Base class of environments behind HTTP.

    A subclass implements ``open_episode`` and ``act``, and overrides ``release``, ``fork_episode`` and ``actions``
    where its server offers more. Parsing the action out of the model's text, the opening messages and the evidence for
    rewards are inherited. An environment that is not behind HTTP needs no base class:
    any class with the methods of ``Environment`` works.
    """

    Options: ClassVar[type[HttpEnvironmentOptions]] = HttpEnvironmentOptions

    _http: httpx.AsyncClient | None = None

    @property
    def where(self) -> str:
        """The server's address."""
        return self.options.base_url

    async def request(self, path: str, body: JsonObject | None = None) -> JsonValue:
        """POST ``body``, or GET without one, once. Raises ``InfrastructureError`` or ``BadEnvironmentError``."""
        http = self._http = self._http or self._new_http()
        where, seconds, content = f"{self.where}{path}", self.options.timeout, bytearray()
        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(seconds), http.stream(method, where, json=body) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MOST_BYTES:
                        raise BadEnvironmentError(f"{where} answered more than {MOST_BYTES} bytes")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise InfrastructureError(
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
        check_status(where, response.status_code, bytes(content))
        return decode_json(where, bytes(content))

    async def close(self) -> None:
        """Release the episode on the server and close the connections; a second call does nothing."""
        try:
            await super().close()
        finally:
            if self._http is not None:
                await self._http.aclose()

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


def episode_index(task: Task) -> int:
    """The server-side number of the task. Raises ``BadEnvironmentError`` when the task has none."""
    index = task.data.get("idx")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise BadEnvironmentError(f"task '{task.id}' needs a whole number in data['idx'], not {excerpt(repr(index))}")
    return index


# Of servers without sessions: the episodes that run, by server and index.
_RUNNING: set[tuple[str, int]] = set()


class WebEnvClient(BaseEnvClient):
    """The simple protocol: ``POST /reset {"idx"}`` and ``POST /step {"action", "idx"}``, both answered with
    ``{"state", "reward", "done"}``.

    A server that answers the reset with a ``session`` gets it back with every request, and a ``/close`` at the end.
    On a server without sessions two episodes of one ``idx`` share their state, so the second one is refused while the
    first one runs (within this process; other processes are not checked).
    """

    _index = -1
    _session: str | int | None = None
    _holds = False

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``POST /reset``."""
        self._index = episode_index(task)
        place = self.where, self._index
        if place not in _RUNNING:
            answer = ServerAnswer.parse(await self.request("/reset", {"idx": self._index}), "/reset")
            self._session = answer.session
            if self._session is not None:
                return answer
            if place not in _RUNNING:
                _RUNNING.add(place)
                self._holds = True
                return answer
        raise InfrastructureError(
            f"{self.where} has no sessions and an episode of idx {self._index} is running already: run its episodes "
            "one at a time (max_workers = 1) or use a server whose /reset answers a session"
        )

    async def act(self, action: str) -> ServerAnswer:
        """``POST /step``."""
        return ServerAnswer.parse(await self.request("/step", {"action": action, **self._key()}), "/step")

    async def fork_episode(self, twin: Episode) -> bool:
        """Raises ``BadEnvironmentError`` for a server without sessions: a fork would share the state of the episode."""
        if self._session is None:
            raise BadEnvironmentError(
                f"{self.where} cannot be forked: it has no sessions; {WITHOUT_FORKS}, or answer a session to /reset"
            )
        return False

    async def release(self) -> None:
        """``POST /close`` where the server returned a session; otherwise release the index."""
        if self._holds:
            _RUNNING.discard((self.where, self._index))
        if self._session is not None:
            # The simple protocol has no /close; a server without one lets its sessions expire.
            with suppress(EndpointMissingError):
                await self.request("/close", self._key())

    def _key(self) -> JsonObject:
        return {"idx": self._index} if self._session is None else {"idx": self._index, "session": self._session}


# Tolerance for the rounding of summed step rewards, such as 10 x 0.1.
_ROUNDING = 1e-9


class AgentGymDialect(NamedTuple):
    """The request format of one server.

    ``id_key`` names the episode in every request and ``index_key`` the task in ``/reset``; ``reset_extra`` is added
    there. ``reward_is_level`` marks servers whose ``reward`` is the progress so far instead of the step's reward.
    ``full_score`` is the return of a solved task; rewards are divided by it. ``cuts_short`` marks servers that have a
    limit of their own: an episode that is done but neither solved nor lost (below zero) was truncated.
    """

    id_key: str
    index_key: str
    reset_extra: Mapping[str, str] = {}
    reward_is_level: bool = False
    full_score: float = 1.0
    cuts_short: bool = False


DIALECTS = {
    "webshop": AgentGymDialect("env_idx", "session_id"),
    "textcraft": AgentGymDialect("id", "data_idx"),
    "sciworld": AgentGymDialect("id", "data_idx", full_score=100.0, cuts_short=True),
    "babyai": AgentGymDialect("id", "data_idx", reward_is_level=True),
    "alfworld": AgentGymDialect("id", "game", reset_extra={"world_type": "Text"}),
}


class AgentGymClient(BaseEnvClient):
    """``/create``, ``/reset``, ``/step`` and, where the server has it, ``/close``. Every client has its own episode."""

    _dialect: AgentGymDialect
    _episode: int | str | None = None
    _level = 0.0

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``POST /create`` and ``POST /reset``. Raises ``ConfigError`` where it is none of ``DIALECTS``."""
        index, name = episode_index(task), task.environment.rsplit("/", 1)[-1]
        if name not in DIALECTS:
            raise ConfigError(f"unknown AgentGym server '{name}'; available: {', '.join(sorted(DIALECTS))}")
        self._dialect = DIALECTS[name]
        created = await self.request("/create", {})
        found = created.get(self._dialect.id_key) if isinstance(created, dict) else created
        if not isinstance(found, int | str) or isinstance(found, bool):
            raise BadEnvironmentError(f"/create answered {excerpt(str(created))}, which holds no id of an episode")
        self._episode = found
        body: JsonObject = {**self._key(), self._dialect.index_key: index, **self._dialect.reset_extra}
        return ServerAnswer.parse(_opening_answer(await self.request("/reset", body)), "/reset")

    async def act(self, action: str) -> ServerAnswer:
        """``POST /step``."""
        answer = ServerAnswer.parse(await self.request("/step", {**self._key(), "action": action}), "/step")
        dialect = self._dialect
        earned = answer.reward / dialect.full_score
        gained = earned - self._level if dialect.reward_is_level else earned
        self._level = earned if dialect.reward_is_level else self._level + earned
        cut = dialect.cuts_short and answer.done and 0 <= self._level < 1 - _ROUNDING
        return answer.model_copy(update={"reward": gained, "truncated": answer.truncated or cut})

    async def release(self) -> None:
        """``POST /close``; AgentGym's WebShop server has none."""
        if self._episode is not None:
            with suppress(EndpointMissingError):
                await self.request("/close", self._key())

    def _key(self) -> JsonObject:
        return {self._dialect.id_key: self._episode}


def _opening_answer(answer: JsonValue) -> JsonValue:
    """Convert the forms of ``/reset`` answers to that of ``/step``: ``[state, info]``, a task description of its
    own (ScienceWorld), a list of possible actions (ALFWorld)."""
    if isinstance(answer, list) and answer and isinstance(answer[0], str):
        return {"state": answer[0], "info": answer[1] if len(answer) > 1 else None}
    if not isinstance(answer, dict) or not isinstance(answer.get("observation"), str):
        return answer
    parts = [answer.get("task_description"), answer["observation"]]
    if isinstance(possible := answer.get("available_actions"), list):
        parts.append("AVAILABLE ACTIONS: " + ",".join(str(action) for action in possible))
    return {**answer, "observation": "\n".join(str(part) for part in parts if part), "reward": 0.0}

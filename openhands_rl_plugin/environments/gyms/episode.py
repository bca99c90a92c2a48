"""One episode of a class with ``reset`` and ``step`` that lives in this process; each library has a subclass."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue

from openhands_rl_plugin.core.errors import (
    BadEnvironmentError,
    CaughtFailure,
    ConfigError,
    EpisodeError,
    InfrastructureError,
    MissingExtraError,
    boundary,
    describe,
)
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.types import FailureKind, Frozen, JsonObject, Message, Observation, Task
from openhands_rl_plugin.environments.gyms.off_loop import off_loop
from openhands_rl_plugin.environments.http.client import RefusedActionError
from openhands_rl_plugin.environments.http.opening import opening_messages
from openhands_rl_plugin.environments.http.react import parse_plain, parse_react

WITHOUT_FORKS = 'use rollout_strategy = "StandardReAct", which needs no forks'


class GymOptions(Frozen):
    """Options of all libraries.

    ``id``: the library's name of the environment (default: what follows the slash in ``env_name``). ``arguments`` are
    those of its constructor. ``timeout`` is in seconds and bounds every call.

    ``fork``: how a search copies an episode. "copy" makes a deep copy, for classes whose state is in their attributes;
    "replay" executes the actions again in a new episode of the same seed and compares every observation; "auto" copies
    where that is known to be safe and replays elsewhere; "none" refuses.
    """

    id: str = ""
    arguments: JsonObject = Field(default_factory=dict)
    timeout: float = Field(default=60.0, gt=0)
    fork: Literal["auto", "copy", "replay", "none"] = "auto"


class TextGymOptions(GymOptions):
    """``react_format``, ``system_prompt`` and ``action_language`` are as for servers (``HttpEnvironmentOptions``)."""

    react_format: bool = True
    system_prompt: str | None = None
    action_language: str | None = None

    def opening(self, task: Task, state: str, actions: str) -> tuple[Message, ...]:
        """The messages that open an episode."""
        language = actions if self.action_language is None else self.action_language
        return opening_messages(
            task, state, react_format=self.react_format, actions=language, system_prompt=self.system_prompt
        )

    def action_in(self, answer: Message) -> str:
        """The action in a model's answer. Raises ``RefusedActionError``."""
        parsed = parse_react(answer.content) if self.react_format else parse_plain(answer.content)
        if parsed.action is None:
            raise RefusedActionError(parsed.error or "Invalid action.")
        return parsed.action


@dataclass(frozen=True, slots=True)
class Seen:
    """What ``reset`` or ``step`` returned, as messages for the model. ``info`` is JSON."""

    messages: tuple[Message, ...]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: JsonValue = field(default=None, compare=False)

    @property
    def ended(self) -> bool:
        """Whether no action can follow."""
        return self.terminated or self.truncated


class GymEpisode(ABC):
    """Base class; implements ``core.protocols.Environment`` and ``Forkable``.

    A subclass implements ``open``, ``act`` and ``shut``, which are synchronous, run in a thread and may raise anything.
    A malformed action is told to the model, takes a step and has reward 0; the environment is not stepped.
    """

    Options: ClassVar[type[GymOptions]] = GymOptions
    library: ClassVar[str]

    def __init__(self, options: GymOptions | None = None) -> None:
        """Raises ``MissingExtraError`` where the library is not installed."""
        module = self.library.replace("-", "_")
        if find_spec(module) is None:
            raise MissingExtraError(self.library, self.library)
        self.options = options or self.Options()
        self.name = self.library
        self._task: Task | None = None
        self._steps: list[tuple[str | None, Seen]] = []
        self._opening: Seen | None = None
        self._last: Seen | None = None
        self._lost = self._closed = False
        self._one_at_a_time = asyncio.Lock()

    @abstractmethod
    def open(self, name: str, task: Task) -> Seen:
        """Make the environment ``name`` and start the episode of ``task``; called once."""

    @abstractmethod
    def act(self, action: str) -> Seen:
        """Execute one action. Raises ``RefusedActionError`` for an invalid one."""

    @abstractmethod
    def shut(self) -> None:
        """Release the environment; also called after ``open`` failed."""

    def read(self, answer: Message) -> str:
        """The action in a model's answer. Raises ``RefusedActionError``. Default: the whole text."""
        return answer.content or ""

    @property
    def copies_safely(self) -> bool:
        """Whether a deep copy is known to be independent and complete."""
        return False

    def copied(self) -> dict[str, Any]:
        """The attributes of a copy of this episode: a deep copy of the running environment and what belongs to it."""
        raise NotImplementedError

    def final(self) -> JsonObject:
        """Further evidence, gathered from the environment before it is closed."""
        return {}

    @property
    def info(self) -> EnvInfo:
        """How many actions a fork replays; none for a copy."""
        return EnvInfo(fork_steps=0 if self._by_copy() else sum(action is not None for action, _ in self._steps))

    async def reset(self, task: Task) -> Observation:
        """Open the episode of ``task``. Raises ``BadEnvironmentError`` where the library has no such environment."""
        if self._task is not None or self._closed:
            raise RuntimeError("an environment runs one episode: make a new one")
        self._task = task
        name = self.options.id or task.environment.partition("/")[2]
        if not name:
            raise BadEnvironmentError(
                f"{self.library} needs the name of an environment: write it after a slash, as in "
                f'env_name = "{self.library}/NAME", or as id in [rl.environment]'
            )
        self.name = f"{self.library}/{name}"
        seen = await self._call(lambda: _checked(self.open(name, task), self.name), "reset")
        self._opening = self._last = seen
        return _observation(seen)

    async def step(self, action: Message) -> Observation:
        """Execute one model response."""
        if self._last is None:
            raise RuntimeError("no episode is open: reset did not succeed")
        if self._last.ended:
            raise RuntimeError("the episode has ended")
        try:
            text = self.read(action)
            seen = await self._execute(text)
        except RefusedActionError as refused:
            said = Seen((Message(role="user", content=str(refused)),))
            self._steps.append((None, said))
            return _observation(said)
        self._steps.append((text, seen))
        self._last = seen
        return _observation(seen)

    async def fork(self) -> Self:
        """An independent copy of the open episode.

        Raises ``BadEnvironmentError`` where it cannot be copied, or a replay is answered differently.
        """
        if self._task is None or self._opening is None or self._closed:
            raise RuntimeError("only an open episode can be forked")
        if self.options.fork == "none":
            raise BadEnvironmentError(f"{self.name} is not forked, as [rl.environment] fork says; {WITHOUT_FORKS}")
        twin = type(self)(self.options)
        try:
            if self._by_copy():
                await self._call(lambda: self._copy(twin), "copy")
            else:
                await self._replay_in(twin)
        except BaseException:
            with suppress(EpisodeError):
                await twin.close()
            raise
        twin.name, twin._task, twin._opening = self.name, self._task, self._opening
        twin._steps, twin._last = list(self._steps), self._last
        return twin

    async def evidence(self) -> JsonObject:
        """Final state, return, rewards and how the episode ended; empty when it never began."""
        if self._last is None or self._task is None:
            return {}
        rewards: list[JsonValue] = [seen.reward for _, seen in self._steps]
        return {
            "idx": self._task.data.get("idx"),
            "final_state": "\n\n".join(message.content or "" for message in self._last.messages),
            "return": sum(seen.reward for _, seen in self._steps),
            "rewards": rewards,
            "steps": len(self._steps),
            "malformed": sum(action is None for action, _ in self._steps),
            "done": self._last.ended,
            "truncated": self._last.truncated,
            "info": self._last.info,
            **(await self._call(lambda: plain_object(self.final()), "evidence") if not self._lost else {}),
        }

    async def close(self) -> None:
        """Release the environment; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._task is not None and not self._lost:
            await self._call(self.shut, "close")

    def _by_copy(self) -> bool:
        return self.options.fork == "copy" or (self.options.fork == "auto" and self.copies_safely)

    def _copy(self, twin: Self) -> None:
        try:
            for name, value in self.copied().items():
                setattr(twin, name, value)
        except (TypeError, ValueError, AttributeError, copy.Error, NotImplementedError) as error:
            raise BadEnvironmentError(
                f'{self.name} cannot be copied ({error}): set fork = "replay" in [rl.environment], or {WITHOUT_FORKS}'
            ) from error

    async def _replay_in(self, twin: Self) -> None:
        assert self._task is not None
        await twin.reset(self._task)
        same = twin._opening == self._opening
        for action, seen in list(self._steps):
            if action is not None:
                same = same and await twin._execute(action) == seen
        if not same:
            raise BadEnvironmentError(
                f"{self.name} cannot be forked: it answered the same actions differently the second time; "
                f"{WITHOUT_FORKS}"
            )

    async def _execute(self, action: str) -> Seen:
        return await self._call(lambda: _checked(self.act(action), self.name), "step")

    async def _call[T](self, call: Callable[[], T], what: str) -> T:
        async with self._one_at_a_time:
            if self._lost:
                raise InfrastructureError(f"{self.name} still executes an earlier call, which took too long")
            # Until the call has returned, the environment is in another thread's hands: after a timeout, for ever.
            self._lost = True
            result = await off_loop(lambda: _outcome(call), f"{self.name}.{what}", self.options.timeout)
            self._lost = False
        if isinstance(result, EpisodeError):
            raise result
        return result


def _outcome[T](call: Callable[[], T]) -> T | EpisodeError:
    """The result of foreign code, or its failure: either way the call has returned."""
    try:
        with boundary(FailureKind.ENVIRONMENT, "environment"):
            return call()
    except CaughtFailure as caught:
        cause = caught.__cause__
        return cause if isinstance(cause, EpisodeError) else caught


def _checked(seen: Seen, name: str) -> Seen:
    if not seen.messages and not seen.ended:
        raise BadEnvironmentError(f"{name} answered no observation although the episode goes on")
    return seen


def _observation(seen: Seen) -> Observation:
    return Observation(messages=seen.messages, reward=seen.reward, terminated=seen.terminated, truncated=seen.truncated)


def number(reward: object, name: str) -> float:
    """A reward. Raises ``BadEnvironmentError`` for one that is missing or no finite number: it is never taken as 0."""
    try:
        value = None if reward is None or isinstance(reward, str) else float(reward)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        value = None
    if value is None or not math.isfinite(value):
        raise BadEnvironmentError(f"{name} returned the reward {reward!r:.80}, which is no finite number")
    return value


def plain(value: Any) -> JsonValue:
    """Any value as JSON: arrays and tuples as lists, what JSON does not have as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value if type(value) in (type(None), bool, int, float, str) else json.loads(json.dumps(value))
    if isinstance(value, dict):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy
        return plain(value.tolist())
    return str(value)


def plain_object(value: Any) -> JsonObject:
    """A mapping as JSON; empty for anything else."""
    found = plain(value)
    return found if isinstance(found, dict) else {}


def load_function(option: str, name: str) -> Callable[..., Any]:
    """The function that an option names as ``"module:function"``. Raises ``ConfigError``."""
    module, colon, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute) if colon else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option} = {name!r} cannot be loaded: {describe(error)}") from error
    if not callable(found):
        raise ConfigError(f'{option} = {name!r}: give "module:function"')
    return found

"""Classes with ``reset`` and ``step`` that live in this process: ``GymEpisode``, and Gymnasium's environments."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from pydantic_core import to_jsonable_python

from openhands_rl_plugin.core.errors import (
    BadEnvironmentError,
    CaughtFailure,
    EpisodeError,
    InfrastructureError,
    MissingExtraError,
    RLError,
    boundary,
    describe,
)
from openhands_rl_plugin.core.judgements import SuccessRule
from openhands_rl_plugin.core.types import FailureKind, Frozen, JsonObject, Message, Task
from openhands_rl_plugin.environments.http.client import Episode, RefusedActionError, ServerAnswer, episode_index
from openhands_rl_plugin.environments.tools.environment import load_object


class GymOptions(Frozen):
    """Options of all libraries.

    ``id``: the library's name of the environment (default: what follows the slash in ``env_name``). ``arguments`` are
    those of its constructor. ``timeout`` is in seconds and bounds every call.

    ``fork``: how a search copies an episode. "copy" makes a deep copy, for classes whose state is in their attributes;
    "replay" executes the actions again in a new episode of the same seed and compares every observation; "auto" copies
    where that is known to be safe and replays elsewhere. ``react_format``, ``system_prompt`` and ``action_language``
    are as for servers (``HttpEnvironmentOptions``); environments with a conversation of their own have no use for them.
    """

    id: str = ""
    arguments: JsonObject = Field(default_factory=dict)
    timeout: float = Field(default=60.0, gt=0)
    fork: Literal["auto", "copy", "replay"] = "auto"
    react_format: bool = True
    system_prompt: str | None = None
    action_language: str | None = None


def seen(messages: tuple[Message, ...], reward: float = 0.0, **more: Any) -> ServerAnswer:
    """What ``reset`` or ``step`` returned, as messages for the model. ``more``: other fields of ``ServerAnswer``."""
    state = "\n\n".join(message.content or "" for message in messages)
    return ServerAnswer(state=state, reward=reward, messages=messages, **more)


class GymEpisode(Episode):
    """Base class of environments in this process.

    A subclass implements ``open``, ``execute`` and ``shut``, which are synchronous, run in a thread and may raise
    anything. A malformed action is an observation of its error, takes a step and has reward 0; the environment is not
    stepped.
    """

    Options: ClassVar[type[GymOptions]] = GymOptions
    library: ClassVar[str]

    def __init__(self, options: GymOptions | None = None) -> None:
        """Raises ``MissingExtraError`` where the library is not installed."""
        module = self.library.replace("-", "_")
        if find_spec(module) is None:
            raise MissingExtraError(self.library, self.library)
        super().__init__(options)
        self.name = self.library
        self._lost = False
        self._one_at_a_time = asyncio.Lock()

    @abstractmethod
    def open(self, name: str, task: Task) -> ServerAnswer:
        """Make the environment ``name`` and start the episode of ``task``; called once."""

    @abstractmethod
    def execute(self, action: str) -> ServerAnswer:
        """Execute one action. Raises ``RefusedActionError`` for an invalid one."""

    @abstractmethod
    def shut(self) -> None:
        """Release the environment; also called after ``open`` failed."""

    @property
    def where(self) -> str:
        """The library and the environment's name."""
        return self.name

    @property
    def copies(self) -> bool:
        """As ``fork`` of the options says."""
        return self.options.fork == "copy" or (self.options.fork == "auto" and self.copies_safely)

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

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``open``. Raises ``BadEnvironmentError`` where the library has no such environment."""
        name = self.options.id or task.environment.partition("/")[2]
        if not name:
            raise BadEnvironmentError(
                f"{self.library} needs the name of an environment: write it after a slash, as in "
                f'env_name = "{self.library}/NAME", or as id in [rl.environment]'
            )
        self.name = f"{self.library}/{name}"
        return await self._call(lambda: self.open(name, task), "reset")

    async def act(self, action: str) -> ServerAnswer:
        """``execute``."""
        return await self._call(lambda: self.execute(action), "step")

    async def release(self) -> None:
        """``shut``, unless a call still runs."""
        if not self._lost:
            await self._call(self.shut, "close")

    async def fork_episode(self, twin: Episode) -> bool:
        """A deep copy, where the options and the environment allow one. Raises ``BadEnvironmentError``."""
        assert isinstance(twin, GymEpisode), "a twin is of the same class"
        if self.copies:
            twin.name = self.name
            vars(twin).update(await self._call(self.copied, "copy"))
        return self.copies

    async def evidence(self) -> JsonObject:
        """The evidence of ``Episode`` with what ``final`` says."""
        found = await super().evidence()
        if found and not self._lost:
            found |= await self._call(lambda: plain_object(self.final()), "evidence")
        return found

    async def _call[T](self, call: Callable[[], T], what: str) -> T:
        """The result of foreign code, in a thread of its own.

        Raises ``EpisodeError`` for whatever it raises, and ``InfrastructureError`` after the timeout: the thread then
        goes on by itself, because Python cannot end it, so what it works on is not used again.
        """
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # so that nobody cancels it before the thread ends

        def run() -> None:
            try:
                with boundary(FailureKind.ENVIRONMENT, f"{self.name}.{what}"):
                    done.set_result(call())
            except CaughtFailure as caught:
                cause = caught.__cause__
                done.set_exception(cause if isinstance(cause, EpisodeError) else caught)
            except RLError as error:
                done.set_exception(error)
            except SystemExit as error:
                done.set_exception(BadEnvironmentError(f"{self.name} asked its process to end: {describe(error)}"))

        async with self._one_at_a_time:
            if self._lost:
                raise InfrastructureError(f"{self.name} still executes an earlier call, which took too long")
            # A daemon, so that a call that hangs does not keep the process from ending.
            threading.Thread(target=run, daemon=True).start()
            try:
                async with asyncio.timeout(self.options.timeout):
                    return await asyncio.wrap_future(done)
            except TimeoutError as error:
                raise InfrastructureError(
                    f"{self.name}.{what} did not return within {self.options.timeout:g} s: raise timeout in "
                    "[rl.environment], or mend the environment"
                ) from error
            finally:
                self._lost = not done.done()


def number(reward: object, name: str) -> float:
    """A reward. Raises ``BadEnvironmentError`` for one that is missing or no finite number: it is never taken as 0."""
    try:
        value = None if reward is None or isinstance(reward, str) else float(reward)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        value = None
    if value is None or not math.isfinite(value):
        raise BadEnvironmentError(f"{name} returned the reward {reward!r:.80}, which is no finite number")
    return value


def plain(value: Any) -> Any:
    """Any value as JSON: arrays and tuples as lists, what JSON does not have as text."""

    def listed(other: Any) -> Any:
        return other.tolist() if hasattr(other, "tolist") else str(other)  # arrays and numbers of NumPy

    found = to_jsonable_python(value, fallback=listed, bytes_mode="base64")
    return json.loads(json.dumps(found), parse_constant=str)


def plain_object(value: Any) -> JsonObject:
    """A mapping as JSON; empty for anything else."""
    found = plain(value)
    return found if isinstance(found, dict) else {}


_COLOURED = re.compile(r"\x1b\[[\d;]*[1-9][\d;]*m(.*?)\x1b\[0?m", re.DOTALL)
_MOST_CHARACTERS = 128
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


class ActionSpace:
    """The actions of a space, with ``names`` for those of a ``Discrete`` one, in their order."""

    def __init__(self, space: Any, names: Sequence[str] = ()) -> None:
        self._space = space
        self._kind = type(space).__name__
        start = int(getattr(space, "start", 0)) if self._kind == "Discrete" else 0
        self._first, self._count = start, int(space.n) if self._kind == "Discrete" else 0
        self._names = {name.lower(): start + at for at, name in enumerate(names[: self._count])}

    def language(self) -> str:
        """The description for the prompt."""
        if self._kind == "Discrete":
            if self._names:
                return ", ".join(f"{name} ({value})" for name, value in self._names.items())
            return f"a whole number from {self._first} to {self._first + self._count - 1}"
        if self._kind == "Text":
            characters = "".join(sorted(self._space.character_set))[:_MOST_CHARACTERS]
            return f"a text of {self._space.min_length} to {self._space.max_length} of the characters {characters!r}"
        return f"JSON of an element of {self._space}"

    def read(self, text: str) -> Any:
        """The element that ``text`` names. Raises ``RefusedActionError``, which describes the actions."""
        text, action = text.strip(), None
        try:
            if self._kind == "Text":
                action = text
            elif self._kind == "Discrete":
                action = self._names.get(text.lower().strip("\"'.!"))
                action = int(text) if action is None else action
            else:
                action = _element(self._space, json.loads(text))
            known = bool(self._space.contains(action))
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            known = False
        if not known:
            raise RefusedActionError(f"Invalid action: it must be {self.language()}.")
        return action


def _element(space: Any, value: Any) -> Any:
    """JSON as a value of ``space``: arrays where it has them, tuples and mappings part by part."""
    kind = type(space).__name__
    if kind == "Dict":
        return {name: _element(part, value[name]) for name, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(_element(part, each) for part, each in zip(space.spaces, value, strict=True))
    if kind in ("Discrete", "Text") or space.shape is None:
        return value
    import numpy

    found = numpy.asarray(value)
    kept = found.astype(space.dtype)
    if space.dtype.kind != "f" and not (kept == found).all():
        raise ValueError("a fraction that an integer space would cut off is no element of it")
    return kept


def as_text(value: Any) -> str:
    """An observation: text as it is, a mapping with one line a part, anything else as JSON."""
    found = plain(value)
    if isinstance(found, str):
        return found
    if isinstance(found, dict):
        return "\n".join(f"{name}: {as_text(each)}" for name, each in found.items())
    return json.dumps(found, ensure_ascii=False)


def without_colours(drawing: str) -> str:
    """A drawing for terminals as plain text: what is coloured, such as the player's cell, is put in brackets."""
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", drawing)).strip("\n")


class GymnasiumPreset(NamedTuple):
    """``goal`` is the task for the model, ``actions`` are the names of a ``Discrete`` space in its order, and ``words``
    make the text of an observation and its info. ``success`` is when an episode is one."""

    goal: str = ""
    actions: tuple[str, ...] = ()
    words: Callable[[Any, dict[str, Any]], str] | None = None
    success: SuccessRule = SuccessRule()


def preset_of(name: str) -> GymnasiumPreset:
    """The preset of an environment's id, whatever its version and module; an empty one for others."""
    bare = name.rpartition(":")[2].rpartition("/")[2]
    found = next((preset for prefix, preset in PRESETS.items() if bare.startswith(prefix)), None)
    return found or GymnasiumPreset()


def _blackjack(observation: Any, info: dict[str, Any]) -> str:
    hand, dealer, ace = (int(each) for each in observation)
    return f"Your hand counts {hand}{' with an ace counted as 11' if ace else ''}. The dealer shows {dealer}."


def _cell(observation: Any, info: dict[str, Any]) -> str:
    return f"You are in cell {int(observation)} (cells are numbered row by row from the upper left, from 0)."


# Each move costs; only the goal ends these.
_AT_THE_GOAL = SuccessRule(at=None, ended=True)
# 1 - 0.9 x steps / limit at the goal, else 0 or less.
_MINIGRID_GOAL = SuccessRule(at=0.1)

PRESETS: dict[str, GymnasiumPreset] = {
    "FrozenLake": GymnasiumPreset(
        "Walk from the start S to the goal G over frozen cells F. A hole H ends the episode. The cell in brackets is "
        "yours. Where the ice is slippery you may slide to a side.",
        ("left", "down", "right", "up"),
        _cell,
    ),
    "CliffWalking": GymnasiumPreset(
        "Walk to the cell T in as few moves as you can: each costs 1. A step onto the cliff C costs 100 and puts you "
        "back to the start. x is you.",
        ("up", "right", "down", "left"),
        _cell,
        _AT_THE_GOAL,
    ),
    "Taxi": GymnasiumPreset(
        "Drive to the passenger, pick them up, drive to their destination and drop them off. R, G, Y and B are the "
        "stops, | is a wall; the taxi, the passenger and the destination are in brackets.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        lambda observation, info: f"State {int(observation)}.",
        _AT_THE_GOAL,
    ),
    "Blackjack": GymnasiumPreset(
        "Beat the dealer: come closer to 21 without going over it.", ("stick", "hit"), _blackjack
    ),
    "MiniGrid": GymnasiumPreset("Do what the mission says.", success=_MINIGRID_GOAL),
    "BabyAI": GymnasiumPreset("Do what the mission says.", success=_MINIGRID_GOAL),
}


class GymnasiumOptions(GymOptions):
    """``id`` is one of ``gymnasium.make``, also ``"module:Name-v0"``; a task's number is the seed of ``reset``, and its
    row, ``data["row"]``, the ``options`` of ``reset``.

    ``formatter`` is ``"module:function"`` of your own, called with observation and info, whose text is shown. By
    default the observation is, and the drawing (``render_mode = "ansi"``) where there is one.
    """

    formatter: str = ""


class GymnasiumEnvironment(GymEpisode):
    """``reset(seed)`` and ``step`` of one environment; ``terminated`` and ``truncated`` are its own.

    Observations become text, texts become actions (``gyms.spaces``). Popular environments have presets: goals, names of
    actions, and words for observations.
    """

    Options: ClassVar[type[GymOptions]] = GymnasiumOptions
    library = "gymnasium"

    def __init__(self, options: GymnasiumOptions | None = None) -> None:
        super().__init__(options)
        self._settings = options or GymnasiumOptions()
        self._env: Any = None
        self._actions: ActionSpace | None = None
        self._words: Callable[[Any, dict[str, Any]], str] | None = None

    @classmethod
    def success_rule(cls, name: str) -> SuccessRule:
        """When an episode of ``name`` is a success, by its preset; else a return of at least 1."""
        return preset_of(name).success

    def open(self, name: str, task: Task) -> ServerAnswer:
        """``make`` and ``reset(seed=...)``."""
        seed, row, preset = episode_index(task), task.data.get("row"), preset_of(name)
        self._words = load_object("formatter", self._settings.formatter) if self._settings.formatter else preset.words
        self._env = self._make(name)
        names = preset.actions or _own_names(self._env)
        self._actions = ActionSpace(self._env.action_space, names)
        found = self._env.reset(seed=seed, options=row)
        described = task if task.instruction else task.model_copy(update={"instruction": preset.goal})
        return seen(self.opening(described, self._shown(*found)), info=plain(found[1]))

    def actions(self, task: Task) -> str:
        """The action space, in words."""
        assert self._actions is not None
        return self._actions.language()

    def execute(self, action: str) -> ServerAnswer:
        """``step``."""
        assert self._actions is not None
        found = self._env.step(self._actions.read(action))
        if not isinstance(found, tuple) or len(found) != 5 or not isinstance(found[4], dict):
            raise BadEnvironmentError(
                f"{self.name}: step must return (observation, reward, terminated, truncated, info), not "
                f"{len(found) if isinstance(found, tuple) else type(found).__name__} values: wrap an environment of "
                "old Gym with shimmy"
            )
        observation, reward, terminated, truncated, info = found
        return seen(
            (Message(role="user", content=self._shown(observation, info)),),
            number(reward, self.name),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=plain(info),
        )

    def shut(self) -> None:
        """``close``."""
        if self._env is not None:
            self._env.close()

    @property
    def copies_safely(self) -> bool:
        """Gymnasium's own text environments keep all of their state in attributes."""
        return type(getattr(self._env, "unwrapped", None)).__module__.startswith("gymnasium.envs.toy_text.")

    def copied(self) -> dict[str, Any]:
        """A deep copy, which has its own random generator in the same state."""
        return {"_env": copy.deepcopy(self._env), "_actions": self._actions, "_words": self._words}

    def final(self) -> JsonObject:
        """The ``id`` and its arguments."""
        spec = getattr(self._env, "spec", None)
        return {
            "environment": {"id": getattr(spec, "id", self.name), "arguments": plain_object(self.options.arguments)}
        }

    def _make(self, name: str) -> Any:
        import gymnasium

        arguments: dict[str, Any] = dict(self.options.arguments)
        try:
            env = gymnasium.make(name, disable_env_checker=True, **arguments)
            drawn = "ansi" in env.metadata.get("render_modes", ()) and not self._settings.formatter
            if drawn and "render_mode" not in arguments:
                env.close()
                env = gymnasium.make(name, disable_env_checker=True, render_mode="ansi", **arguments)
            return env
        except (gymnasium.error.Error, ImportError, TypeError, AttributeError) as error:
            raise BadEnvironmentError(
                f"{self.name} cannot be made: {describe(error)}; correct the name, install the package that registers "
                'it and write "module:Name-v0", or correct arguments in [rl.environment]'
            ) from error

    def _shown(self, observation: Any, info: dict[str, Any]) -> str:
        text = self._words(observation, info) if self._words is not None else as_text(observation)
        if not isinstance(text, str):
            raise BadEnvironmentError(
                f"the formatter {self._settings.formatter} returned {type(text).__name__}, no text"
            )
        drawing = without_colours(str(self._env.render())) if self._env.render_mode == "ansi" else ""
        return "\n".join(part for part in (text, drawing) if part) or "(no observation)"


def _own_names(env: Any) -> tuple[str, ...]:
    """The names of an environment that has an enumeration of its actions (MiniGrid), in the order of their values."""
    actions = getattr(env.unwrapped, "actions", None)
    members = getattr(actions, "__members__", None)
    return tuple(members) if members and [int(each) for each in members.values()] == [*range(len(members))] else ()

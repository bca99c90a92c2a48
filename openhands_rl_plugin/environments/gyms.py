"""Gymnasium's environments, in this process: ``reset`` and ``step`` run in threads."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic import Field
from pydantic_core import to_jsonable_python

from openhands_rl_plugin.core.errors import (
    BadEnvironmentError,
    CaughtFailure,
    InfrastructureError,
    MissingExtraError,
    boundary,
    describe,
)
from openhands_rl_plugin.core.judgements import SuccessRule
from openhands_rl_plugin.core.types import FailureKind, JsonObject, Task
from openhands_rl_plugin.environments.http.client import (
    Episode,
    EpisodeOptions,
    RefusedActionError,
    ServerAnswer,
    episode_index,
)

_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
# Each move costs; only the goal ends these.
_AT_THE_GOAL = SuccessRule(at=None, ended=True)
# 1 - 0.9 x steps / limit at the goal, else 0 or less.
_MINIGRID_GOAL = SuccessRule(at=0.1)
_CRITERIA = {
    "CliffWalking": _AT_THE_GOAL,
    "Taxi": _AT_THE_GOAL,
    "MiniGrid": _MINIGRID_GOAL,
    "BabyAI": _MINIGRID_GOAL,
}


class GymnasiumOptions(EpisodeOptions):
    """``arguments`` are those of ``gymnasium.make``."""

    arguments: JsonObject = Field(default_factory=dict)


class GymnasiumEnvironment(Episode):
    """The environment after the slash of the task's ``gymnasium/ID``: any id of ``gymnasium.make``, also
    ``module:Name-v0``.

    A task's number is the seed of ``reset``, and its row, ``data["row"]``, the ``options`` of ``reset``. Observations
    become text: texts as they are, others as JSON, with the drawing where ``render_mode`` is "ansi". An action is the
    text for a ``Text`` space, else JSON of an element of the space. An invalid one is an observation of its error,
    takes a step and has reward 0; the environment is not stepped.
    """

    Options: ClassVar[type[GymnasiumOptions]] = GymnasiumOptions

    def __init__(self, options: GymnasiumOptions | None = None) -> None:
        """Raises ``MissingExtraError`` where Gymnasium is not installed."""
        if find_spec("gymnasium") is None:
            raise MissingExtraError("gymnasium", "gymnasium")
        super().__init__(options)
        self._env: Any = None
        self._busy = False

    @classmethod
    def success_rule(cls, name: str) -> SuccessRule:
        """When an episode of ``name`` is a success: by default a return of at least 1."""
        bare = name.rpartition(":")[2].rpartition("/")[2]
        return next((rule for prefix, rule in _CRITERIA.items() if bare.startswith(prefix)), SuccessRule())

    @property
    def where(self) -> str:
        """The environment's name."""
        return self._task.environment if self._task is not None else "gymnasium"

    @property
    def copies(self) -> bool:
        """Gymnasium's toy-text environments, whose state is in their attributes, are copied. In others the actions are
        executed again in a new episode of the same seed, and every observation is compared.
        """
        return type(getattr(self._env, "unwrapped", None)).__module__.startswith("gymnasium.envs.toy_text.")

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``make`` and ``reset(seed=...)``. Raises ``BadEnvironmentError`` where there is no such environment."""
        seed, data = episode_index(task), dict[str, Any](task.data)

        def opened() -> ServerAnswer:
            import gymnasium

            try:
                name, arguments = task.environment.partition("/")[2], dict[str, Any](self.options.arguments)
                self._env = gymnasium.make(name, disable_env_checker=True, **arguments)
            except (gymnasium.error.Error, ImportError, TypeError, AttributeError) as error:
                raise BadEnvironmentError(
                    f"{task.environment} cannot be made: {describe(error)}; correct the name, install the package that "
                    'registers it and write "gymnasium/module:Name-v0", or correct arguments in [rl.environment]'
                ) from error
            return self._answer(*self._env.reset(seed=seed, options=data.get("row")))

        return await self._call(opened, "reset")

    async def act(self, action: str) -> ServerAnswer:
        """``step``. Raises ``RefusedActionError`` for what is no element of the action space."""

        def stepped() -> ServerAnswer:
            observation, reward, terminated, truncated, info = self._env.step(_element(self._env.action_space, action))
            # A reward that is missing or no finite number is an error, never 0.
            ends = {"done": bool(terminated or truncated), "truncated": bool(truncated and not terminated)}
            return self._answer(observation, info, reward=float(reward), **ends)

        return await self._call(stepped, "step")

    async def release(self) -> None:
        """``close``, unless a call still runs."""
        if self._env is not None and not self._busy:
            await self._call(self._env.close, "close")

    async def fork_episode(self, twin: Episode) -> bool:
        """A deep copy, which has its own random generator in the same state."""
        assert isinstance(twin, GymnasiumEnvironment), "a twin is of the same class"
        if self.copies:
            twin._env = await self._call(lambda: copy.deepcopy(self._env), "copy")
        return self.copies

    def actions(self, task: Task) -> str:
        """The action space, in words."""
        return _language(self._env.action_space)

    def _answer(self, observation: Any, info: dict[str, Any], **more: Any) -> ServerAnswer:
        found = _plain(observation)
        text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
        if self._env.render_mode == "ansi":
            text = f"{text}\n{_ESCAPE.sub('', str(self._env.render()))}".strip("\n")
        return ServerAnswer(state=text or "(no observation)", info=_plain(info), **more)

    async def _call[T](self, call: Callable[[], T], what: str) -> T:
        """The result of ``call``, in a thread.

        Raises what it raises, and ``InfrastructureError`` after the timeout: the thread then goes on by itself, because
        Python cannot end it, so what it works on is not used again.
        """
        if self._busy:
            raise InfrastructureError(f"{self.where} still executes an earlier call, which took too long")

        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # so that nobody cancels it before the thread ends

        def run() -> None:
            try:
                with boundary(FailureKind.ENVIRONMENT, f"{self.where}.{what}"):
                    done.set_result(call())
            except CaughtFailure as caught:
                done.set_exception(caught.__cause__)
            except SystemExit as error:
                done.set_exception(BadEnvironmentError(f"{self.where} ended: {describe(error)}"))

        # A daemon, so that a call that hangs does not keep the process from ending.
        threading.Thread(target=run, daemon=True).start()
        try:
            async with asyncio.timeout(self.options.timeout):
                return await asyncio.wrap_future(done)
        except TimeoutError as error:
            raise InfrastructureError(
                f"{self.where}.{what} did not return within {self.options.timeout:g} s: raise timeout in "
                "[rl.environment], or mend the environment"
            ) from error
        finally:
            self._busy = not done.done()


def _plain(value: Any) -> Any:
    """Any value as JSON: arrays and tuples as lists, what JSON does not have as text."""

    def listed(other: Any) -> Any:
        return other.tolist() if hasattr(other, "tolist") else str(other)  # arrays and numbers of NumPy

    found = to_jsonable_python(value, fallback=listed, bytes_mode="base64")
    return json.loads(json.dumps(found), parse_constant=str)


def _language(space: Any) -> str:
    """The actions of a space, for the prompt."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Text):
        return f"a text of {space.min_length} to {space.max_length} characters"
    return f"JSON of an element of {space}"


def _element(space: Any, text: str) -> Any:
    """The element of ``space`` that ``text`` is. Raises ``RefusedActionError``, which describes the actions."""
    import numpy
    from gymnasium import spaces

    action: Any = None
    try:
        action = text.strip() if isinstance(space, spaces.Text) else json.loads(text)
        if space.shape and not isinstance(space, spaces.Text):
            # A fraction that an integer space would cut off is no element of it.
            action = numpy.asarray(action).astype(space.dtype, casting="same_kind")
        known = bool(space.contains(action))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        known = False
    if not known:
        raise RefusedActionError(f"Invalid action: it must be {_language(space)}.")
    return action

"""Gymnasium's environments in this process: any id that ``gymnasium.make`` knows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, describe
from openhands_rl_plugin.core.judgements import SuccessRule
from openhands_rl_plugin.core.types import JsonObject, Message, Task
from openhands_rl_plugin.environments.gyms.episode import (
    GymEpisode,
    GymOptions,
    Seen,
    TextGymOptions,
    load_function,
    number,
    plain,
    plain_object,
)
from openhands_rl_plugin.environments.gyms.presets import preset_of
from openhands_rl_plugin.environments.gyms.spaces import ActionSpace, as_text, without_colours
from openhands_rl_plugin.environments.http.client import episode_index


class GymnasiumOptions(TextGymOptions):
    """``id`` is one of ``gymnasium.make``, also ``"module:Name-v0"``; a task's number is the seed of ``reset``, and its
    row, ``data["row"]``, the ``options`` of ``reset``.

    ``show``: the observation, the environment's drawing (``render_mode = "ansi"``), or both; "auto" shows the drawing
    too where there is one. ``formatter`` is ``"module:function"`` of your own, called with observation and info, whose
    text is shown instead of the observation. ``action_names`` name the actions of a ``Discrete`` space in their order.
    """

    show: Literal["auto", "observation", "drawing", "both"] = "auto"
    formatter: str = ""
    action_names: tuple[str, ...] = ()


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
        self._draws = False

    @classmethod
    def success_rule(cls, name: str) -> SuccessRule:
        """When an episode of ``name`` is a success, by its preset; else a return of at least 1."""
        return preset_of(name).success

    def open(self, name: str, task: Task) -> Seen:
        """``make`` and ``reset(seed=...)``."""
        seed, row, preset = episode_index(task), task.data.get("row"), preset_of(name)
        self._words = load_function("formatter", self._settings.formatter) if self._settings.formatter else preset.words
        self._env = self._make(name)
        names = self._settings.action_names or preset.actions or _own_names(self._env)
        self._actions = ActionSpace(self._env.action_space, names)
        found = self._env.reset(seed=seed, options=row)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
            raise BadEnvironmentError(f"{self.name}: reset must return (observation, info), as in Gymnasium 1.0")
        described = task if task.instruction else task.model_copy(update={"instruction": preset.goal})
        state = self._shown(*found) or "(no observation)"
        return Seen(self._settings.opening(described, state, self._actions.language()), info=plain(found[1]))

    def act(self, action: str) -> Seen:
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
        return Seen(
            (Message(role="user", content=self._shown(observation, info) or "(no observation)"),),
            number(reward, self.name),
            bool(terminated),
            bool(truncated),
            plain(info),
        )

    def shut(self) -> None:
        """``close``."""
        if self._env is not None:
            self._env.close()

    def read(self, answer: Message) -> str:
        """The action in a model's text, by ``react_format``."""
        return self._settings.action_in(answer)

    @property
    def copies_safely(self) -> bool:
        """Gymnasium's own text environments keep all of their state in attributes."""
        return type(getattr(self._env, "unwrapped", None)).__module__.startswith("gymnasium.envs.toy_text.")

    def copied(self) -> dict[str, Any]:
        """A deep copy, which has its own random generator in the same state."""
        shared = {"_actions": self._actions, "_words": self._words, "_draws": self._draws}
        return {"_env": copy.deepcopy(self._env), **shared}

    def final(self) -> JsonObject:
        """The ``id`` and its arguments."""
        spec = getattr(self._env, "spec", None)
        return {
            "environment": {"id": getattr(spec, "id", self.name), "arguments": plain_object(self.options.arguments)}
        }

    def _make(self, name: str) -> Any:
        import gymnasium

        arguments: dict[str, Any] = dict(self.options.arguments)
        show = self._settings.show
        try:
            env = gymnasium.make(name, disable_env_checker=True, **arguments)
            drawn = "ansi" in env.metadata.get("render_modes", ())
            if show in ("drawing", "both") and not drawn:
                raise ConfigError(f'{self.name} draws nothing as text: set show = "observation", or a formatter')
            if drawn and show != "observation" and "render_mode" not in arguments:
                env.close()
                env = gymnasium.make(name, disable_env_checker=True, render_mode="ansi", **arguments)
            self._draws = env.render_mode == "ansi"
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
        drawing = without_colours(str(self._env.render())) if self._draws else ""
        if self._settings.show == "drawing":
            return drawing
        return "\n".join(part for part in (text, drawing) if part)


def _own_names(env: Any) -> tuple[str, ...]:
    """The names of an environment that has an enumeration of its actions (MiniGrid), in the order of their values."""
    actions = getattr(env.unwrapped, "actions", None)
    members = getattr(actions, "__members__", None)
    return tuple(members) if members and [int(each) for each in members.values()] == [*range(len(members))] else ()

"""SkyRL-Gym's environments in this process: ``init`` with a prompt, ``step`` with the model's whole text."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from pydantic import Field

from openhands_rl_plugin.core.errors import BadEnvironmentError, describe
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.types import JsonObject, Message, Task
from openhands_rl_plugin.environments.gyms import GymEpisode, GymOptions, number, plain, plain_object, seen
from openhands_rl_plugin.environments.http.client import ServerAnswer
from openhands_rl_plugin.environments.http.react import ParsedAction


class SkyRLGymOptions(GymOptions):
    """``id`` is one of ``skyrl_gym.make``, or ``"module:Class"`` of your own ``BaseTextEnv``. ``config`` is its
    ``env_config`` (``search_url``, ``db_path``, ...)."""

    config: JsonObject = Field(default_factory=dict)


class SkyRLGymEnvironment(GymEpisode):
    """``init(prompt)`` and ``step(text)`` of one environment, as SkyRL's generator calls them.

    A task's row, ``data["row"]``, is one of SkyRL's data set: ``prompt`` (chat messages), ``reward_spec``,
    ``extra_info`` and so on, all of which but the prompt are the ``extras``. The conversation is the environment's own:
    nothing is added to it, and an answer is passed on whole.
    """

    Options: ClassVar[type[GymOptions]] = SkyRLGymOptions
    library = "skyrl-gym"

    def __init__(self, options: SkyRLGymOptions | None = None) -> None:
        super().__init__(options)
        self._settings = options or SkyRLGymOptions()
        self._env: Any = None

    def open(self, name: str, task: Task) -> ServerAnswer:
        """``make`` and ``init``."""
        import skyrl_gym
        from omegaconf import OmegaConf

        row = task.data.get("row")
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(row, dict) or not isinstance(prompt, list):
            raise BadEnvironmentError(
                f"task '{task.id}' needs a row of SkyRL's data set with a 'prompt' of messages: give a file "
                "with them (evaluate: --dataset-file)"
            )
        if ":" in name and name not in skyrl_gym.registry:
            skyrl_gym.register(id=name, entry_point=name)
        extras = {key: value for key, value in row.items() if key != "prompt"}
        config = OmegaConf.create(self._settings.config)
        try:
            self._env = skyrl_gym.make(name, env_config=config, extras=copy.deepcopy(extras), **self.options.arguments)
        except (skyrl_gym.error.Error, AssertionError, ImportError, AttributeError, KeyError, TypeError) as error:
            raise BadEnvironmentError(f"{self.name} cannot be made with this row: {describe(error)}") from error
        messages, info = self._env.init(copy.deepcopy(prompt))
        return seen(self._messages(messages), info=plain(info))

    def execute(self, action: str) -> ServerAnswer:
        """``step``."""
        found = self._env.step(action)
        if not isinstance(found, dict) or not {"observations", "reward", "done"} <= found.keys():
            raise BadEnvironmentError(f"{self.name}: step must return observations, reward and done, not {found!r:.80}")
        info = {"metadata": plain(found.get("metadata")), "postprocessed_action": found.get("postprocessed_action")}
        reward, done = number(found["reward"], self.name), bool(found["done"])
        messages = self._messages(found["observations"] or [])
        if not messages and not done:
            # The environment has no observation for this answer; the next answer follows.
            messages = (Message(role="user", content="(no observation)"),)
        return seen(messages, reward, terminated=done, info=info)

    def parse(self, action: Message) -> ParsedAction:
        """The whole text."""
        return ParsedAction(action.content or "", None)

    def shut(self) -> None:
        """``close``."""
        if self._env is not None:
            self._env.close()

    def copied(self) -> dict[str, Any]:
        """A deep copy; with ``fork = "copy"`` only, as tools may hold connections."""
        return {"_env": copy.deepcopy(self._env)}

    def final(self) -> JsonObject:
        """``get_metrics``."""
        metrics = getattr(self._env, "get_metrics", dict)
        return {"environment": {"id": self.name}, "metrics": plain_object(metrics())}

    def _messages(self, found: object) -> tuple[Message, ...]:
        try:
            return tuple(to_message(dict(each)) for each in found)  # pyright: ignore[reportGeneralTypeIssues]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadEnvironmentError(f"{self.name} returned no chat messages: {describe(error)}") from error

"""AgentGym's environment servers: one ``/create`` per episode, and request keys that differ between environments."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar, NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.core.types import JsonObject, Task
from openhands_rl_plugin.environments.http.client import (
    BaseEnvClient,
    EndpointMissingError,
    HttpEnvironmentOptions,
    ServerAnswer,
    action_language,
    episode_index,
    excerpt,
)

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


class AgentGymOptions(HttpEnvironmentOptions):
    """``preset`` names one of ``DIALECTS``; without it, the last part of the task's environment does
    (``agentgym/babyai``)."""

    preset: str | None = None


class AgentGymClient(BaseEnvClient):
    """``/create``, ``/reset``, ``/step`` and, where the server has it, ``/close``. Every client has its own episode."""

    Options: ClassVar[type[HttpEnvironmentOptions]] = AgentGymOptions

    _dialect: AgentGymDialect
    _episode: int | str | None = None
    _level = 0.0

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``POST /create`` (once) and ``POST /reset``. Raises ``ConfigError`` where it is none of ``DIALECTS``."""
        index, name = episode_index(task), self._name(task)
        if name not in DIALECTS:
            raise ConfigError(f"unknown AgentGym server '{name}'; available: {', '.join(sorted(DIALECTS))} (preset)")
        self._dialect = DIALECTS[name]
        if self._episode is None:
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

    def actions(self, task: Task) -> str:
        """The action language of the preset, or of the task's environment."""
        return action_language(self._name(task))

    def _name(self, task: Task) -> str:
        return self.options.preset or task.environment.rsplit("/", 1)[-1]

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

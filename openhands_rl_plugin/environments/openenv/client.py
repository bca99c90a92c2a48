"""OpenEnv's environment servers, over WebSocket: over HTTP each of their requests starts a new episode."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import ClassVar

from pydantic import Field, JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError, EpisodeError
from openhands_rl_plugin.core.types import JsonObject, Task
from openhands_rl_plugin.environments.http.client import (
    BaseEnvClient,
    HttpEnvironmentOptions,
    ServerAnswer,
    episode_index,
)
from openhands_rl_plugin.environments.http.transport import EndpointMissingError, excerpt
from openhands_rl_plugin.environments.openenv.action import ActionForm
from openhands_rl_plugin.environments.openenv.websocket import OpenEnvSession

_NOT_SHOWN = frozenset({"metadata", "reward", "done"})


class OpenEnvOptions(HttpEnvironmentOptions):
    """``index_key`` is the argument of the server's ``reset`` for the task's index (empty: none). ``reset_arguments``
    are further arguments; those of one task are its row, ``data["row"]``.

    ``action_field`` is the action's field that a plain text fills, ``observation_field`` the field that is shown to the
    model. ``None``: chosen by the fields of the server's actions and observations.
    """

    index_key: str = "seed"
    reset_arguments: JsonObject = Field(default_factory=dict)
    action_field: str | None = None
    observation_field: str | None = None


class OpenEnvClient(BaseEnvClient):
    """``reset``, ``step``, ``state`` and ``close`` of one connection to ``/ws``.

    An observation with a single text field is shown to the model as that text, any other one as JSON of its fields
    without reward, done and metadata. The model answers with JSON of an action's fields, or with the value of the only
    field. An invalid action takes a step, and its error is the observation. The evidence holds the server's ``state``.
    """

    Options: ClassVar[type[HttpEnvironmentOptions]] = OpenEnvOptions

    def __init__(self, options: OpenEnvOptions | None = None) -> None:
        self._settings = options or OpenEnvOptions()
        super().__init__(self._settings)
        self._form: ActionForm | None = None
        self._session: OpenEnvSession | None = None

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``GET /schema``, a connection of its own, and ``reset``."""
        options = self._settings
        arguments = self._reset_arguments(task)
        if self._form is None:
            self._form = ActionForm(await self._action_schema(), options.action_field)
        await self._leave()
        self._session = OpenEnvSession(options.base_url, timeout=options.timeout, max_bytes=options.max_response_bytes)
        await self._session.open()
        return self._answer(await self._session.ask("reset", arguments), "reset")

    async def act(self, action: str) -> ServerAnswer:
        """``step``."""
        if self._session is None or self._form is None:
            raise RuntimeError("no episode is open")
        return self._answer(await self._session.ask("step", self._form.read(action)), "step")

    async def release(self) -> None:
        """``close``; the server ends the episode with its connection."""
        await self._leave()

    async def evidence(self) -> JsonObject:
        """The evidence of ``BaseEnvClient``, with the server's ``state`` while the connection is open."""
        found = await super().evidence()
        if found and self._session is not None and self._session.alive:
            with suppress(EpisodeError):
                found["state"] = await self._session.ask("state", answered_by="state")
        return found

    def actions(self, task: Task) -> str:
        """The format of actions, from the server's schema."""
        return self._form.language() if self._form is not None else ""

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

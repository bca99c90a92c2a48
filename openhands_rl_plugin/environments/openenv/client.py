"""OpenEnv's environment servers, over WebSocket: over HTTP each of their requests starts a new episode."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from pydantic import Field, JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError, EpisodeError
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.types import JsonObject, Message, Task, ToolCall
from openhands_rl_plugin.environments.http.calls import ServerTools, replies
from openhands_rl_plugin.environments.http.client import (
    BaseEnvClient,
    HttpEnvironmentOptions,
    RefusedActionError,
    ServerAnswer,
    episode_index,
)
from openhands_rl_plugin.environments.http.react import ParsedAction
from openhands_rl_plugin.environments.http.transport import EndpointMissingError, excerpt
from openhands_rl_plugin.environments.openenv.action import ActionForm
from openhands_rl_plugin.environments.openenv.mcp import LIST, action_of, is_mcp, output_of, tools_in
from openhands_rl_plugin.environments.openenv.places import ForkPlaces, PlaceWait
from openhands_rl_plugin.environments.openenv.websocket import NoPlaceError, OpenEnvSession

_NOT_SHOWN = frozenset({"metadata", "reward", "done"})


class OpenEnvOptions(HttpEnvironmentOptions):
    """``index_key`` is the argument of the server's ``reset`` for the task's index (empty: none). ``reset_arguments``
    are further arguments; those of one task are its row, ``data["row"]``.

    ``action_field`` is the action's field that a plain text fills, ``observation_field`` the field that is shown to the
    model. ``None``: chosen by the fields of the server's actions and observations.

    ``place_timeout``: seconds that an episode waits for a place on a server that is full.
    """

    index_key: str = "seed"
    reset_arguments: JsonObject = Field(default_factory=dict)
    action_field: str | None = None
    observation_field: str | None = None
    place_timeout: float = Field(default=1800.0, ge=0)


class OpenEnvClient(BaseEnvClient):
    """``reset``, ``step``, ``state`` and ``close`` of one connection to ``/ws``.

    An observation with a single text field is shown to the model as that text, any other one as JSON of its fields
    without reward, done and metadata. The model answers with JSON of an action's fields, or with the value of the only
    field. An invalid action takes a step, and its error is the observation. The evidence holds the server's ``state``.

    An environment that is driven by MCP is asked for its tools after the reset, and an action calls one of them. A step
    may say nothing of its reward; the one that ends the episode may not. Where no step of an episode did, the evidence
    says ``unrewarded``.
    """

    Options: ClassVar[type[HttpEnvironmentOptions]] = OpenEnvOptions

    def __init__(self, options: OpenEnvOptions | None = None) -> None:
        self._settings = options or OpenEnvOptions()
        super().__init__(self._settings)
        self._form: ActionForm | None = None
        self._driven = False
        self._tools: ServerTools | None = None
        self._told: tuple[tuple[ToolCall, str], ...] = ()
        self._paid = False
        self._session: OpenEnvSession | None = None
        self._places: ForkPlaces | None = None
        self._is_fork = False

    @property
    def info(self) -> EnvInfo:
        """The forks that the server has room for, and, after ``reset``, the tools, unless ``react_format`` describes
        them in the prompt."""
        tools = self._tools.offered if self._tools is not None and not self.options.react_format else ()
        most = None if self._places is None else self._places.most
        return replace(super().info, max_forks=most, tools=tools)

    def reserve(self, forks: int) -> None:
        """Let ``reset`` take the places of up to ``forks`` forks, too."""
        self._places = ForkPlaces(forks) if forks else None

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``GET /schema``, a connection of its own, and ``reset``; waits for a place."""
        arguments = self._reset_arguments(task)
        if self._form is None:
            schema = await self._action_schema()
            self._form, self._driven = ActionForm(schema, self._settings.action_field), is_mcp(schema)
        wait = PlaceWait(self._settings.base_url, 0.0 if self._is_fork else self._settings.place_timeout)
        while True:
            await self._leave()
            try:
                return await self._begin(arguments)
            except NoPlaceError as full:
                await self._leave()
                await wait.after(full)

    async def act(self, action: str) -> ServerAnswer:
        """``step``, once for each call where the environment is driven by tools."""
        if self._session is None or self._form is None:
            raise RuntimeError("no episode is open")
        self._told = ()
        if self._tools is None:
            return self._answer(await self._session.ask("step", self._form.read(action)), "step")
        calls = self._tools.read(action).calls
        if not calls:
            how = self._tools.language() if self.options.react_format else f"call {', '.join(self._tools.names)}"
            raise RefusedActionError(f"Invalid action: {how}")
        sent = [action_of(call, self._tools) for call in calls]
        earned, told, answer = 0.0, [], None
        for call, step in zip(calls, sent, strict=True):
            answer = self._answer(data := await self._session.ask("step", step), "step")
            earned += answer.reward
            told.append((call, output_of(data.get("observation"))))
            if answer.done:
                break
        assert answer is not None
        self._told = tuple(told)
        return answer.model_copy(update={"state": "\n\n".join(text for _, text in told), "reward": earned})

    def parse(self, action: Message) -> ParsedAction:
        """The response's own calls, where it has some."""
        if self._tools is not None and action.tool_calls:
            return ParsedAction(self._tools.of_message(action, action.content).written(), None)
        return super().parse(action)

    def reply(self, action: Message, state: str) -> tuple[Message, ...]:
        """The outputs of calls, of a tool's where the response had calls of its own."""
        if not self._told:
            return super().reply(action, state)
        return replies(action, [call for call, _ in self._told], [text for _, text in self._told])

    async def fork_episode(self, twin: BaseEnvClient) -> bool:
        """A fork replays, in a place that was taken for it where there is one."""
        assert isinstance(twin, OpenEnvClient), "a twin is of the same class"
        twin._places, twin._is_fork = self._places, True
        return False

    async def release(self) -> None:
        """``close``; the server ends the episode with its connection. A fork's is kept for the next fork."""
        if self._is_fork and self._places is not None and self._session is not None:
            session, self._session = self._session, None
            await self._places.give_back(session)
            return
        await self._leave()
        if self._places is not None and not self._is_fork:
            await self._places.close()

    async def evidence(self) -> JsonObject:
        """The evidence of ``BaseEnvClient``, with the server's ``state`` while the connection is open."""
        found = await super().evidence()
        if found and self._session is not None and self._session.alive:
            with suppress(EpisodeError):
                found["state"] = await self._session.ask("state", answered_by="state")
        if any(step.action is not None for step in self.steps) and not self._paid:
            found["unrewarded"] = True
        return found

    def actions(self, task: Task) -> str:
        """The format of actions, from the server's schema or its tools; none where these are offered themselves."""
        if self._tools is not None:
            return self._tools.language() if self.options.react_format else ""
        return self._form.language() if self._form is not None else ""

    async def _begin(self, arguments: JsonObject) -> ServerAnswer:
        options = self._settings
        if self._is_fork and self._places is not None and (kept := self._places.take()) is not None:
            self._session = kept
        else:
            self._session = self._connection()
            await self._session.open()
        answer = self._answer(await self._session.ask("reset", arguments), "reset")
        if self._places is not None and not self._is_fork:
            await self._places.fill(options.base_url, self._connection)
        if self._driven and self._tools is None:
            self._tools = tools_in(await self._session.ask("step", LIST), options.base_url)
        return answer

    def _connection(self) -> OpenEnvSession:
        options = self._settings
        bound, key = options.max_response_bytes, options.key()
        return OpenEnvSession(options.base_url, timeout=options.timeout, max_bytes=bound, key=key)

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
        if what == "step":
            if "done" not in data:
                raise BadEnvironmentError("step answered no 'done'")
            if reward is None and data["done"] is True:
                raise BadEnvironmentError(
                    "step ended the episode without a reward, which is not 0.0: let the server pay its last step"
                )
            self._paid |= reward is not None
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

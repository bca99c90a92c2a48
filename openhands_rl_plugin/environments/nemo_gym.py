"""NeMo Gym's resources servers: a cookie identifies the episode, and an action is a response in OpenAI's format."""

from __future__ import annotations

from typing import ClassVar

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.types import JsonObject, Task
from openhands_rl_plugin.environments.http.client import (
    BaseEnvClient,
    HttpEnvironmentOptions,
    ServerAnswer,
    episode_index,
)
from openhands_rl_plugin.environments.http.transport import (
    CookieTransport,
    EndpointMissingError,
    JsonTransport,
    excerpt,
)

_SILENCE = "(no observation)"
_PARAMETERS = "responses_create_params"


class NeMoGymOptions(HttpEnvironmentOptions):
    """``index_key`` is the key of the task's index in requests, for tasks without a dataset row."""

    index_key: str = "seed"


class NeMoGymClient(BaseEnvClient):
    """``/reset`` and ``/step`` of a gymnasium-style server. A server that has no ``/reset`` gets ``/seed_session`` and,
    with the first answer, which ends the episode, ``/verify``.

    A task's dataset row is ``data["row"]``; every request contains it, and its prompt precedes the first observation.
    A server does not report an unknown episode (after a restart, for example), so it must not be restarted while
    episodes run.
    """

    Options: ClassVar[type[HttpEnvironmentOptions]] = NeMoGymOptions

    def __init__(self, options: NeMoGymOptions | None = None) -> None:
        options = options or NeMoGymOptions()
        super().__init__(options)
        self._index_key = options.index_key
        self._row: JsonObject = {}
        self._verifies = False
        self._acted = 0

    def make_transport(self) -> JsonTransport:
        """A transport with cookies; a copy of the episode gets its own."""
        options = self.options
        return CookieTransport(options.base_url, timeout=options.timeout, max_bytes=options.max_response_bytes)

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``POST /reset``, or ``POST /seed_session``."""
        self._row = self._row_of(task)
        path = "/reset"
        try:
            answer = await self.post(path, self._row)
        except EndpointMissingError:
            path, self._verifies = "/seed_session", True
            answer = await self.post(path, self._row)
        transport = self._open_transport()
        if not isinstance(transport, CookieTransport) or not transport.has_session:
            raise BadEnvironmentError(f"{path} set no cookie, so the server cannot distinguish episodes")
        observation = _observed(answer, path)
        opening = "\n\n".join([*_prompt(self._row), *([observation] if observation else [])])
        if not opening:
            raise BadEnvironmentError(f"{path} answered no observation: give the task a row with a prompt")
        return ServerAnswer(state=opening)

    async def act(self, action: str) -> ServerAnswer:
        """``POST /step``, or ``POST /verify``."""
        path = "/verify" if self._verifies else "/step"
        self._acted += 1
        answer = await self.post(path, {**self._row, "response": _response(action, self._acted)})
        if not isinstance(answer, dict):
            raise BadEnvironmentError(f"{path} answered {excerpt(str(answer))}, which is not a JSON object")
        if "reward" not in answer:
            raise BadEnvironmentError(f"{path} answered no 'reward': {excerpt(str(answer))}")
        if self._verifies:
            return ServerAnswer.parse({"state": _SILENCE, "reward": answer["reward"], "terminated": True}, path)
        return ServerAnswer.parse({**answer, "state": _observed(answer, path) or _SILENCE}, path)

    def _row_of(self, task: Task) -> JsonObject:
        row = task.data.get("row")
        if row is None:
            row = {self._index_key: episode_index(task)}
        if not isinstance(row, dict):
            raise BadEnvironmentError(f"task '{task.id}' needs an object in data['row'], not {excerpt(repr(row))}")
        return {_PARAMETERS: {"input": []}, **row}


def _observed(answer: JsonValue, path: str) -> str | None:
    if not isinstance(answer, dict):
        raise BadEnvironmentError(f"{path} answered {excerpt(str(answer))}, which is not a JSON object")
    observation = answer.get("observation")
    if observation is not None and not isinstance(observation, str):
        raise BadEnvironmentError(f"{path} answered a wrong 'observation': {excerpt(str(observation))}")
    return observation


def _prompt(row: JsonObject) -> list[str]:
    """The texts of the row's prompt, which is one text or a list of messages."""
    parameters = row[_PARAMETERS]
    prompt = parameters.get("input") if isinstance(parameters, dict) else None
    if isinstance(prompt, str):
        return [prompt] if prompt else []
    messages = prompt if isinstance(prompt, list) else []
    contents = (each.get("content") for each in messages if isinstance(each, dict))
    return [content for content in contents if isinstance(content, str) and content]


def _response(text: str, number: int) -> JsonObject:
    content: JsonObject = {"type": "output_text", "text": text, "annotations": []}
    message: JsonObject = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [content],
    }
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "output": [message],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }

"""Environments of OpenEnv: its protocol over a WebSocket, with simulation actions or MCP tools."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any, Never
from urllib.parse import urlsplit

from pydantic import JsonValue
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.messages import json_object
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.servers import is_loopback
from openhands_rl_plugin.core.types import JsonObject, Message, Task, ToolCall
from openhands_rl_plugin.environments.http.client import (
    MOST_BYTES,
    BaseEnvClient,
    HttpEnvironmentOptions,
    RefusedActionError,
    ServerAnswer,
    check_status,
    decode_json,
    episode_index,
    excerpt,
)
from openhands_rl_plugin.environments.http.react import ParsedAction
from openhands_rl_plugin.environments.tools.environment import read_arguments

_LONGEST_CLOSING = 5.0
# Failures of the server itself, or of the machines behind it, rather than of the environment.
_BROKEN = frozenset({"CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"})


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception:
        """Follow none: the key would go elsewhere."""
        return exc


async def _connected(options: HttpEnvironmentOptions) -> ClientConnection:
    where, key = f"{options.base_url}/ws", options.key()
    try:
        return await _Connect(
            f"ws{where.removeprefix('http')}",
            additional_headers={"authorization": f"Bearer {key}"} if key else {},
            # As for HTTP: no proxy between this process and its own machine.
            proxy=None if is_loopback(urlsplit(where).hostname or "") else True,
            compression=None,
            open_timeout=options.timeout,
            # An environment may block its server's event loop for minutes.
            ping_interval=None,
            close_timeout=_LONGEST_CLOSING,
            max_size=MOST_BYTES,
        )
    except InvalidStatus as error:
        found = error.response
        check_status(where, found.status_code, bytes(found.body or b""))
        raise BadEnvironmentError(f"{where} answered {found.status_code} instead of a WebSocket") from error
    except (TimeoutError, InvalidHandshake) as error:
        raise InfrastructureError(f"{where} could not be connected to ({type(error).__name__})") from error
    except OSError as error:
        raise InfrastructureError(
            f"nothing answers at {options.base_url}: start the OpenEnv server or set env_server_base and env_port"
        ) from error


def _raise_error(where: str, data: dict[str, Any], kind: str) -> Never:
    code = data.get("code")
    # Those of pydantic: ``action: Input should be 'UP' or 'DOWN'``.
    found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in data.get("errors") or ()]
    reasons = excerpt("; ".join(found) or str(data.get("message")))
    text = f"{where} answered a {kind} with the error {code}: {reasons}"
    if code == "CAPACITY_REACHED":
        text += "; lower max_workers or open_worlds in [rl.strategy], or raise max_concurrent_envs of the server"
    if code in _BROKEN:
        raise InfrastructureError(text)
    if code == "VALIDATION_ERROR" and kind == "step":
        raise RefusedActionError(f"Invalid action: {reasons}")
    raise BadEnvironmentError(text)


def _output(observation: JsonValue) -> str:
    """The output of a tool call as text: the texts of the result, else its JSON, or the error."""
    error, result = json_object(observation).get("error"), json_object(observation).get("result")
    if isinstance(error, dict):
        return f"{error.get('error_type')}: {error.get('message')}"
    content = json_object(result).get("content")
    texts = [json_object(part).get("text") for part in content] if isinstance(content, list) else [result]
    if texts and all(isinstance(text, str) for text in texts):
        return "\n".join(map(str, texts))
    return json.dumps(result, ensure_ascii=False)


def _fields(schema: JsonObject) -> JsonObject:
    """The fields of a server's actions that have a choice, with their schemas."""
    found = json_object(schema.get("properties"))
    return {name: each for name, each in found.items() if name != "metadata" and "const" not in json_object(each)}


def read_action(text: str, schema: JsonObject) -> JsonObject:
    """The action in ``text``, whose values the server checks: a JSON object with names of fields only, else the value
    of the only field that has to be there, or that there is.

    Raises ``RefusedActionError``, whose message describes valid actions to the model.
    """
    fields, required = _fields(schema), schema.get("required")
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, dict) and json_object(schema.get("properties")).keys() >= value.keys():
        return value
    needed = [name for name in fields if isinstance(required, list) and name in required] or [*fields]
    if len(needed) != 1:
        raise RefusedActionError(f"Invalid action: it must be {described(schema)}")
    return {needed[0]: text if json_object(fields[needed[0]]).get("type", "string") == "string" else value}


def described(schema: JsonObject) -> str:
    """The description of the actions for the prompt."""
    shown = {"properties": _fields(schema), **{name: schema[name] for name in ("required", "$defs") if name in schema}}
    return f"JSON of this schema: {json.dumps(shown, ensure_ascii=False)}"


class OpenEnvClient(BaseEnvClient):
    """``reset``, ``step`` and ``close`` of one connection to ``/ws``. A fork replays, in one of its own.

    An observation with a single text field is shown to the model as that text, any other one as JSON of its fields
    without reward, done and metadata. The model answers with JSON of an action's fields, or with the value of the only
    field. An invalid action takes a step, and its error is the observation. The arguments of ``reset`` are the task's
    row, ``data["row"]``, with its index as ``seed`` unless the row has one.

    An environment that is driven by MCP is asked for its tools after the reset, and an action calls one of them. A step
    may have no reward; the one that ends the episode needs one. Where no step of an episode had one, the evidence
    has ``unrewarded``.
    """

    def __init__(self, options: HttpEnvironmentOptions | None = None) -> None:
        super().__init__(options)
        self._schema: JsonObject = {}
        self._tools: dict[str, JsonObject] = {}
        self._results: list[tuple[ToolCall, str]] = []
        self._rewarded = False
        self._socket: ClientConnection | None = None

    @property
    def info(self) -> EnvInfo:
        """The environment's info; it has the tools after ``reset``."""
        offered: list[JsonObject] = [{"type": "function", "function": function} for function in self._tools.values()]
        return replace(super().info, tools=tuple(offered))

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``GET /schema``, a connection of its own, and ``reset``."""
        row = task.data.get("row", {})
        if not isinstance(row, dict):
            raise BadEnvironmentError(f"task '{task.id}' needs an object in data['row'], not {excerpt(repr(row))}")
        schema = self._schema = json_object(json_object(await self.request("/schema")).get("action"))
        self._socket = await _connected(self.options)
        answer = self._answer(await self._ask("reset", {"seed": episode_index(task), **row}), "reset")
        kind = json_object(json_object(schema.get("properties")).get("type"))
        if "call_tool" in (kind.get("const"), kind.get("default")):
            listed: Any = await self._ask("step", {"type": "list_tools"})
            self._tools = {
                tool["name"]: {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or {"type": "object"},
                }
                for tool in listed["observation"]["tools"]
            }
        return answer

    async def act(self, action: str | list[tuple[ToolCall, JsonObject]]) -> ServerAnswer:
        """``step``, once for each call where the environment is driven by tools."""
        if isinstance(action, str):
            return self._answer(await self._ask("step", read_action(action, self._schema)), "step")
        self._results, answers = [], list[ServerAnswer]()
        for call, arguments in action:
            step: JsonObject = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
            answers.append(self._answer(data := await self._ask("step", step), "step"))
            self._results.append((call, _output(data.get("observation"))))
            if answers[-1].done:
                break
        state = "\n\n".join(text for _, text in self._results)
        return answers[-1].model_copy(update={"state": state, "reward": sum(each.reward for each in answers)})

    def parse(self, action: Message) -> ParsedAction:
        """The response's calls, where the environment has tools."""
        if not self._tools:
            return super().parse(action)
        try:
            calls = [(call, read_arguments(call.arguments)) for call in action.tool_calls]
        except ValueError as error:
            return ParsedAction(None, f"Invalid action: the arguments of a call are {error}")
        return ParsedAction(calls or None, f"Invalid action: call one of {', '.join(self._tools)}")

    def reply(self, action: Message, state: str) -> tuple[Message, ...]:
        """The outputs of calls."""
        outputs = (
            Message(role="tool", content=text, tool_call_id=call.id, name=call.name) for call, text in self._results
        )
        return tuple(outputs) or super().reply(action, state)

    async def release(self) -> None:
        """``close``; the server ends the episode with its connection, which is waited for."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(TimeoutError, ConnectionClosed):
                async with asyncio.timeout(min(self.options.timeout, _LONGEST_CLOSING)):
                    await socket.send('{"type": "close"}')
                    await socket.wait_closed()
            await socket.close()

    async def evidence(self) -> JsonObject:
        """The evidence of ``BaseEnvClient``; ``unrewarded`` where no step had a reward."""
        found = await super().evidence()
        if any(step.answer is not None for step in self.steps) and not self._rewarded:
            found["unrewarded"] = True
        return found

    def actions(self, task: Task) -> str:
        """The format of actions, from the server's schema; none for tools, which are offered themselves."""
        return "" if self._tools else described(self._schema)

    async def _ask(self, kind: str, data: JsonObject) -> JsonObject:
        """The data of the answer to a message, which is sent once.

        Raises ``RefusedActionError`` when a step was not executed because its action is invalid.
        """
        where, socket, seconds = f"{self.where}/ws", self._socket, self.options.timeout
        assert socket is not None, "no episode is open"
        try:
            async with asyncio.timeout(seconds):
                # When sending fails, receiving says why: a full server sends its error first.
                with suppress(ConnectionClosed):
                    await socket.send(json.dumps({"type": kind, "data": data}))
                received = await socket.recv()
        except (TimeoutError, ConnectionClosed) as error:
            # What comes later would be taken for another answer.
            socket.transport.abort()
            if isinstance(error, TimeoutError):
                raise InfrastructureError(f"{where} did not answer a {kind} within {seconds:g} s") from error
            raise InfrastructureError(
                f"the connection to {where} broke ({error}): check whether the server is still running"
            ) from error
        answer = decode_json(where, received)
        found, shown = (answer.get("type"), answer.get("data")) if isinstance(answer, dict) else (None, None)
        if found not in ("observation", "error") or not isinstance(shown, dict):
            raise BadEnvironmentError(f"{where} answered a {kind} with {excerpt(received)}")
        if found == "error":
            _raise_error(where, shown, kind)
        return shown

    def _answer(self, data: JsonObject, what: str) -> ServerAnswer:
        reward, observation = data.get("reward"), data.get("observation")
        if what == "step":
            if reward is None and data.get("done") is True:
                raise BadEnvironmentError(
                    "step ended the episode without a reward, which is not 0.0: let the server give its last step one"
                )
            self._rewarded |= reward is not None
        if not isinstance(observation, dict):
            raise BadEnvironmentError(f"{what} answered the 'observation' {excerpt(str(observation))}")
        hidden = ("metadata", "reward", "done")
        shown = {name: value for name, value in observation.items() if name not in hidden}
        alone = next(iter(shown.values()), None)
        answer = {
            "state": alone if len(shown) == 1 and isinstance(alone, str) else json.dumps(shown, ensure_ascii=False),
            "reward": float(reward or 0) if reward is None or isinstance(reward, bool) else reward,
            "info": data.get("metadata"),
            **({"done": data["done"]} if "done" in data else {}),
        }
        return ServerAnswer.parse(answer, f"/{what}")

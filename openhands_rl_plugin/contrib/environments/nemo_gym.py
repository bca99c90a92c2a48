"""NeMo Gym's resources servers: a cookie identifies the episode, and an action is a response in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError, describe
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.types import JsonObject, Message, Observation, Task, ToolCall
from openhands_rl_plugin.environments.http.calls import ServerTools, arguments_of, replies
from openhands_rl_plugin.environments.http.client import (
    BaseEnvClient,
    HttpEnvironmentOptions,
    ServerAnswer,
    episode_index,
    excerpt,
)
from openhands_rl_plugin.environments.http.react import ParsedAction, parse_plain, parse_react

_SILENCE = "(no observation)"
_NO_ROUTE = '{"detail":"NotFound"}'  # without spaces
PARAMETERS = "responses_create_params"

_RESERVED = frozenset({"verify", "seed_session", "aggregate_metrics", "reset", "step", "close", "mcp"})
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal"})
# Servers whose verification looks at the call itself, and that have no endpoint for it.
_CALL_IS_ANSWER = frozenset(
    {
        "example_tool_call_multireward",
        "single_step_tool_use_with_argument_comparison",
        "structured_outputs",
        "swe_pivot",
        "xlam_fc",
    }
)


@dataclass(frozen=True)
class GymRow:
    """A checked row. ``body`` is sent with every request; ``system`` are the texts of its instructions, ``turns`` the
    rest of its prompt. ``call_is_answer``: known to be graded by its call, which nobody executes."""

    body: JsonObject
    system: tuple[str, ...]
    turns: tuple[Message, ...]
    tools: ServerTools
    call_is_answer: bool

    @classmethod
    def of(cls, body: JsonObject, task: str, environment: str) -> GymRow:
        """Check a row. Raises ``BadEnvironmentError`` for one that is no conversation in text, with the reason."""
        where = f"task '{task}' cannot be rolled out"
        parameters = body.get(PARAMETERS)
        found: JsonObject = parameters if isinstance(parameters, dict) else {}
        turns = tuple(_turns(found.get("input"), where))
        instructions = found.get("instructions")
        system = [instructions] if isinstance(instructions, str) and instructions else []
        system += [each.content for each in turns if each.role == "system" and each.content]
        return cls(
            body=body,
            system=tuple(system),
            turns=tuple(each for each in turns if each.role != "system"),
            tools=_tools(found, where),
            call_is_answer=bool(body.keys() & {"expected_action", "expected_call"})
            or body.get("response_mode") == "tool_call"
            or environment.rpartition("/")[2] in _CALL_IS_ANSWER,
        )


def _tools(parameters: JsonObject, where: str) -> ServerTools:
    given = parameters.get("tools")
    tools: list[JsonObject] = []
    # The prompt describes tools that the model may not use, but no call of them is wanted.
    for tool in given if isinstance(given, list) and parameters.get("tool_choice") != "none" else ():
        kind = tool.get("type", "function") if isinstance(tool, dict) else tool
        if not isinstance(tool, dict) or kind != "function":
            raise BadEnvironmentError(f"{where}: its tool of type {excerpt(repr(kind))} is no function of its server")
        tools.append(tool)
    return ServerTools(tools, where, _RESERVED)


def _turns(prompt: JsonValue, where: str) -> Iterator[Message]:
    if isinstance(prompt, str) and prompt:
        yield Message(role="user", content=prompt)
    for item in prompt if isinstance(prompt, list) else ():
        given: JsonObject = item if isinstance(item, dict) else {"type": "no message"}
        kind, content, call = given.get("type", "message"), given.get("content"), given.get("call_id")
        wire: JsonObject = {"role": given.get("role"), "content": content}
        parts = content if isinstance(content, list) else []
        if kind == "reasoning":  # of an earlier turn: chat templates leave it out
            continue
        if kind == "function_call":
            wire = {"role": "assistant", "tool_calls": [{**given, "id": call}]}
        elif kind == "function_call_output":
            wire = {"role": "tool", "tool_call_id": call, "content": given.get("output")}
        elif kind != "message" or not all(isinstance(each, dict) and each.get("type") in _TEXTS for each in parts):
            raise BadEnvironmentError(f"{where}: its prompt holds {excerpt(repr(item))}, and a prompt here is text")
        try:
            message = to_message(wire)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadEnvironmentError(f"{where}: its prompt holds {excerpt(repr(item))}: {describe(error)}") from error
        if message.content or message.role in ("assistant", "tool"):
            yield message


class NeMoGymOptions(HttpEnvironmentOptions):
    """``index_key`` is the key of the task's index in requests, for tasks without a dataset row."""

    index_key: str = "seed"


class NeMoGymClient(BaseEnvClient):
    """``/reset`` and ``/step`` of a gymnasium-style server. A server that has no ``/reset`` gets ``/seed_session``, the
    calls of the row's tools, each at an endpoint of its own, and with the first response without a call ``/verify``,
    which ends the episode.

    A task's dataset row is ``data["row"]``; every request contains it, and its prompt precedes the first observation.
    ``/verify`` gets all responses, calls and their outputs, as NeMo Gym's ``simple_agent`` sends them. What a call's
    endpoint refuses (400, 422, 500) is shown to the model; ``reset`` refuses a row that is no conversation in text.
    A server does not report an unknown episode (after a restart, for example), so it must not be restarted while
    episodes run.
    """

    Options: ClassVar[type[HttpEnvironmentOptions]] = NeMoGymOptions
    shares_connection = False

    def __init__(self, options: NeMoGymOptions | None = None) -> None:
        options = options or NeMoGymOptions()
        super().__init__(options)
        self._index_key = options.index_key
        self._row: GymRow | None = None
        self._verifies = False
        self._acted = 0
        self._output: list[JsonValue] = []
        self._results: list[tuple[ToolCall, str]] = []
        self._verified_as: ServerAnswer | None = None

    @property
    def info(self) -> EnvInfo:
        """With the row's tools, after ``reset``."""
        return replace(super().info, tools=() if self._row is None else self._row.tools.offered)

    async def open_episode(self, task: Task) -> ServerAnswer:
        """``POST /reset``, or ``POST /seed_session``."""
        row = self._row = GymRow.of(self._row_of(task), task.id, task.environment)
        # Not tried: a server with one route for all its tools would take "/reset" for a call of one.
        self._verifies = await self._has_no_reset()
        path = "/seed_session" if self._verifies else "/reset"
        answer = await self.post(path, row.body)
        if not self.open_transport().client.cookies:
            raise BadEnvironmentError(f"{path} set no cookie, so the server cannot distinguish episodes")
        observation = _observed(answer, path)
        if not row.turns and not row.system and not observation:
            raise BadEnvironmentError(f"{path} answered no observation: give the task a row with a prompt")
        return ServerAnswer(state=observation or "")

    def opening(self, task: Task, state: str) -> tuple[Message, ...]:
        """The instructions, then the row's messages; the first observation continues the last one.

        A row that is verified speaks for itself, unless the answer has to have the form of ``react_format``.
        """
        row, options = self._known_row(), self.options
        general = options.system_prompt or task.instruction
        if not self._verifies or (options.react_format and not row.tools.functions):
            general = super().opening(task, state)[0].content or ""
        text = "\n\n".join(part for part in (general, *row.system) if part)
        turns = list(row.turns)
        if state and turns and turns[-1].role == "user":
            turns[-1] = Message(role="user", content=f"{turns[-1].content}\n\n{state}")
        elif state or not turns:
            turns.append(Message(role="user", content=state or "Begin."))
        return (*([Message(role="system", content=text)] if text else []), *turns)

    def actions(self, task: Task) -> str:
        """None for tools, which are offered themselves."""
        return "" if self.info.tools else super().actions(task)

    def parse(self, action: Message) -> ParsedAction:
        """An answer with its calls, or its text: that which is verified with its fences, which graders look for."""
        tools = self._known_row().tools
        if calls := tools.calls_in(action):
            return ParsedAction(Message(role="assistant", content=action.content, tool_calls=calls), None)
        read = parse_react if self.options.react_format and not tools.functions else parse_plain
        text, error = read(action.content, unwrap=not self._verifies)
        return ParsedAction(None if text is None else Message(role="assistant", content=text), error)

    async def act(self, action: Message) -> ServerAnswer:
        """``POST /step``, or the action's calls, or ``POST /verify``."""
        self._acted += 1
        items, self._results = _items(action, self._acted), []
        if not self._verifies:
            return self._stepped(await self._graded("/step", items), action)
        self._output += items
        if not action.tool_calls or self._known_row().call_is_answer:
            return await self._verified()
        for at, call in enumerate(action.tool_calls, 1):
            self._results.append((call, output := await self._output_of(call)))
            self._output.append({"type": "function_call_output", "call_id": _id(self._acted, at), "output": output})
        return ServerAnswer(state="\n\n".join(output for _, output in self._results), reward=0.0)

    def reply(self, action: Message, state: str) -> tuple[Message, ...]:
        """The outputs of calls, then what else was observed."""
        if not self._results:
            return super().reply(action, state)
        shown = replies([(call, output or _SILENCE) for call, output in self._results])
        return (*shown, Message(role="user", content=state)) if state and not self._verifies else shown

    async def cut_short(self) -> Observation | None:
        """``POST /verify`` for an episode that a limit cut, as NeMo Gym's agents do at their limit of steps."""
        if not self._verifies or not self._output or self._verified_as is not None:
            return None
        return Observation(reward=(await self._verified()).reward, truncated=True)

    async def evidence(self) -> JsonObject:
        """The evidence of ``BaseEnvClient``; ``unrewarded`` where a server that verifies was never asked to."""
        found = await super().evidence()
        if found and self._verifies:
            verdict = self._verified_as
            found |= {"unrewarded": True} if verdict is None else {"return": verdict.reward, "info": verdict.info}
        return found

    async def _has_no_reset(self) -> bool:
        """By the server's own description of its routes, which NeMo Gym's servers all have."""
        try:
            described = await self.open_transport().request("/openapi.json")
        except BadEnvironmentError:
            return False
        paths = described.get("paths") if isinstance(described, dict) else None
        return isinstance(paths, dict) and "/reset" not in paths

    async def _output_of(self, call: ToolCall) -> str:
        """The body of the endpoint's answer, whatever its status: so NeMo Gym's own agents hand it on."""
        try:
            arguments = arguments_of(call)
        except ValueError as error:
            return json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        status, content = await self.open_transport().ask(f"/{call.name}", arguments)
        text = content.decode("utf-8", errors="replace")
        if status == 404 and text.replace(" ", "") == _NO_ROUTE:
            raise BadEnvironmentError(f"{self.options.base_url} has no endpoint for the tool {call.name!r}")
        return text

    async def _graded(self, path: str, items: list[JsonValue]) -> JsonObject:
        response = _response(items, self._acted)
        answer = await self.post(path, {**self._known_row().body, "response": response})
        if not isinstance(answer, dict):
            raise BadEnvironmentError(f"{path} answered {excerpt(str(answer))}, which is not a JSON object")
        if "reward" not in answer:
            raise BadEnvironmentError(f"{path} answered no 'reward': {excerpt(str(answer))}")
        return answer

    def _stepped(self, answer: JsonObject, called: Message) -> ServerAnswer:
        info = answer.get("info")
        given = info.get("tool_outputs") if isinstance(info, dict) else None
        given = given if isinstance(given, list) else []
        outputs = [str(each.get("output")) for each in given if isinstance(each, dict)]
        if called.tool_calls and len(outputs) == len(called.tool_calls):
            self._results = [*zip(called.tool_calls, outputs, strict=True)]
        state = _observed(answer, "/step") or ("" if self._results else _SILENCE)
        return ServerAnswer.parse({**answer, "state": state}, "/step")

    async def _verified(self) -> ServerAnswer:
        answer = await self._graded("/verify", self._output)
        sent = {*self._known_row().body, "response", "reward"}
        info = {name: value for name, value in answer.items() if name not in sent}
        self._verified_as = ServerAnswer.parse(
            {"state": _SILENCE, "reward": answer["reward"], "terminated": True, "info": info}, "/verify"
        )
        return self._verified_as

    def _known_row(self) -> GymRow:
        if self._row is None:
            raise RuntimeError("the row is known only after reset")
        return self._row

    def _row_of(self, task: Task) -> JsonObject:
        row = task.data.get("row")
        if row is None:
            row = {self._index_key: episode_index(task)}
        if not isinstance(row, dict):
            raise BadEnvironmentError(f"task '{task.id}' needs an object in data['row'], not {excerpt(repr(row))}")
        return {PARAMETERS: {"input": []}, **row}


def _observed(answer: JsonValue, path: str) -> str | None:
    if not isinstance(answer, dict):
        raise BadEnvironmentError(f"{path} answered {excerpt(str(answer))}, which is not a JSON object")
    observation = answer.get("observation")
    if observation is not None and not isinstance(observation, str):
        raise BadEnvironmentError(f"{path} answered a wrong 'observation': {excerpt(str(observation))}")
    return observation


def _id(turn: int, number: int) -> str:
    return f"call_{turn}_{number}"


def _items(called: Message, turn: int) -> list[JsonValue]:
    """One turn of the model in OpenAI's format for responses: its text, then its calls."""
    items: list[JsonValue] = []
    if called.content or not called.tool_calls:
        text: JsonObject = {"type": "output_text", "text": called.content or "", "annotations": []}
        items.append(
            {"id": f"msg_{turn}", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        )
    for at, call in enumerate(called.tool_calls, 1):
        own = {"id": f"fc_{turn}_{at}", "type": "function_call", "call_id": _id(turn, at), "status": "completed"}
        items.append({**own, "name": call.name, "arguments": call.arguments})
    return items


def _response(output: list[JsonValue], number: int) -> JsonObject:
    fixed: JsonObject = {"object": "response", "created_at": 0, "model": "policy", "tool_choice": "auto", "tools": []}
    return {"id": f"resp_{number}", "output": output, "parallel_tool_calls": False, **fixed}

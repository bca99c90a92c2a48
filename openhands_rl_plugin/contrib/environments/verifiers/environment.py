"""One episode of a taskset of verifiers: verifiers plays it and scores it, and the model's answers come from here."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field, JsonValue

from openhands_rl_plugin.contrib.environments.verifiers.process import (
    VerifiersProcess,
    environment_for,
    find_interpreter,
    process_for,
)
from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.messages import to_message, to_wire
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.types import Frozen, JsonObject, Message, Observation, Task, ToolCall
from openhands_rl_plugin.environments.http.client import episode_index
from openhands_rl_plugin.environments.tools.dialects import Dialect, NativeDialect, TextDialect

# Failures of machines and servers behind a task, rather than of the task.
_INFRASTRUCTURE = frozenset({"SandboxError", "InterceptionError", "ProviderError", "ToolsetError", "TunnelError"})


class VerifiersOptions(Frozen):
    """``python``: the one that has verifiers and the tasksets (default: the environment variable
    ``OPENHANDS_RL_VERIFIERS_PYTHON``, or this one). ``path`` are further folders with modules of tasksets.

    ``taskset``: its id, a module or package (default: what follows the slash in ``env_name``); ``taskset_options`` are
    its config, and ``env`` further settings of verifiers' ``[env]``, such as the models of other roles. ``role``: the
    one that is played (default: the first). ``harness``: one of verifiers' own instead of a chat loop in its process;
    ``runtime``: where its programs run.

    ``template``: the model family in whose format tools are called in the text; empty: by the server's own tool calls.

    Tasksets see the variables of places, locale, caches and proxies only; ``pass_env`` names others, such as
    ``["OPENAI_API_KEY"]`` for a judge's key.

    ``max_turns``: after so many answers verifiers ends and scores the episode (default: that of ``[rl]``). ``timeout``
    is in seconds, for the taskset's part of one turn, ``start_timeout`` for loading it.
    """

    python: str = ""
    path: tuple[str, ...] = ()
    taskset: str = ""
    taskset_options: JsonObject = Field(default_factory=dict)
    env: JsonObject = Field(default_factory=dict)
    role: str = ""
    harness: str = ""
    runtime: JsonObject = Field(default_factory=lambda: {"type": "subprocess"})
    pass_env: tuple[str, ...] = ()
    template: str = "hermes"
    max_turns: int = Field(default=0, ge=0)
    timeout: float = Field(default=300.0, gt=0)
    start_timeout: float = Field(default=180.0, gt=0)


class VerifiersEnvironment:
    """A task's number is its position in the taskset. The conversation is verifiers' own: system prompt, user turns,
    tool results. The last step pays ``trace.reward``; the evidence has each reward function's score and weight.

    An episode cannot be forked: verifiers holds its state. A trace without a reward fails; it is never a 0.
    """

    Options: ClassVar[type[VerifiersOptions]] = VerifiersOptions

    def __init__(self, options: VerifiersOptions | None = None) -> None:
        """Raises ``ConfigError`` where no Python has verifiers, or for an unknown template."""
        self.options = options or VerifiersOptions()
        self._python = find_interpreter(self.options.python)
        environment_for(self.options.pass_env)
        template = self.options.template
        self._dialect: Dialect = TextDialect(template) if template else NativeDialect()
        self._tools: tuple[JsonObject, ...] = ()
        self._process: VerifiersProcess | None = None
        self._episode = -1
        self._idx: int | None = None
        self._name = "verifiers"
        self._said: list[JsonObject] = []
        self._rewards: list[float] = []
        self._end: JsonObject | None = None
        self._running = False  # it waits for an answer
        self._open = False  # its process plays it

    @property
    def info(self) -> EnvInfo:
        """With the taskset's tools, known after ``reset``; none where they are called in the text."""
        return EnvInfo(tools=self._dialect.offered(self._tools))

    async def reset(self, task: Task) -> Observation:
        """Start the episode; the observation is verifiers' first request to the model."""
        if self._process is not None:
            raise RuntimeError("an environment runs one episode: make a new one")
        options = self.options
        taskset = options.taskset or task.environment.partition("/")[2]
        if not taskset:
            raise BadEnvironmentError(
                "verifiers needs the id of a taskset: write it after a slash, as in "
                'env_name = "verifiers/ID", or as taskset in [rl.environment]'
            )
        self._idx, self._name = episode_index(task), f"verifiers/{taskset}"
        setup: JsonObject = {
            "env": {**options.env, "taskset": {**options.taskset_options, "id": taskset}},
            "role": options.role,
            "harness": options.harness,
            "runtime": options.runtime,
            "max_turns": options.max_turns,
            "path": [*options.path],
        }
        self._process = process_for(self._python, setup, environment_for(options.pass_env, options.path))
        await self._process.ready(options.start_timeout)
        self._episode = self._process.number()
        line = await self._ask({"start": self._idx})
        request = line.get("request")
        if not isinstance(request, dict):
            self._finish(line)
            raise BadEnvironmentError(f"{self._name}: task {self._idx} ended before the model was asked")
        tools = request.get("tools")
        self._tools = tuple(each for each in tools if isinstance(each, dict)) if isinstance(tools, list) else ()
        return Observation(messages=self._opening(self._heard(request)))

    async def step(self, action: Message) -> Observation:
        """Give verifiers the answer; the observation is what is new in its next request, or the end."""
        if not self._running:
            raise RuntimeError("no episode is open")
        read = self._dialect.read(action)
        number = len(self._rewards)
        calls = tuple(
            call if call.id else call.model_copy(update={"id": f"call_{number}_{at}"})
            for at, call in enumerate(read.calls)
        )
        # Around calls in the text stands speech; without calls the text is passed as it was sampled.
        content = (read.speech if calls and not action.tool_calls else action.content) or ""
        answer = to_wire(Message(role="assistant", content=content, tool_calls=calls))
        self._said.append(answer)
        line = await self._ask({"answer": answer})
        request = line.get("request")
        if isinstance(request, dict):
            self._rewards.append(0.0)
            return Observation(messages=self._told(calls, self._heard(request)))
        self._rewards.append(reward := self._finish(line))
        truncated = bool((self._end or {}).get("truncated"))
        return Observation(reward=reward, terminated=not truncated, truncated=truncated)

    async def cut_short(self) -> Observation | None:
        """Have verifiers score the episode as it stands, as it does at a limit of its own."""
        if not self._running or not self._rewards:
            return None
        reward = self._rewards[-1] = self._finish(await self._ask({"cut": True}))
        return Observation(reward=reward, truncated=True)

    async def evidence(self) -> JsonObject:
        """The rewards by function, metrics and why it stopped.

        An episode that was cut is scored now. Raises ``BadEnvironmentError`` where that gives a reward which no step
        can pay any more: it would count as 0.
        """
        if self._episode < 0:
            return {}
        paid = self._end is not None
        if self._running and self._rewards and (reward := self._finish(await self._ask({"cut": True}))):
            raise BadEnvironmentError(
                f"{self._name}: the episode was cut before its end, and earns {reward:g}: raise max_turns, "
                "max_prompt_length or the time limit"
            )
        end = self._end or {}
        return {
            "idx": self._idx,
            "return": sum(self._rewards),
            "rewards": [*self._rewards],
            "steps": len(self._rewards),
            "done": paid,
            "truncated": bool(end.get("truncated")),
            "verifiers": {key: end.get(key) for key in ("reward", "rewards", "metrics", "stop", "task")},
        }

    async def close(self) -> None:
        """Leave the episode; its process goes on for others."""
        if self._open and self._process is not None:
            self._running = self._open = False
            self._process.tell(self._episode, {"cut": True})

    async def _ask(self, line: JsonObject) -> JsonObject:
        assert self._process is not None
        self._running, self._open = False, True  # until it has answered
        found = await self._process.ask(self._episode, line, self.options.timeout)
        self._open = "request" in found
        if "failed" in found:
            raise BadEnvironmentError(f"{self._name}: {found['failed']}")
        self._running = "request" in found
        return found

    def _finish(self, line: JsonObject) -> float:
        """The episode's reward. Raises ``EpisodeError`` for a trace that failed or has none."""
        end = line.get("end")
        if not isinstance(end, dict):
            raise BadEnvironmentError(f"{self._name}: the episode goes on although it was ended")
        self._end = end
        errors, rewards, reward = end.get("errors"), end.get("rewards"), end.get("reward")
        if isinstance(errors, list) and errors:
            first = errors[0] if isinstance(errors[0], dict) else {}
            kind = InfrastructureError if first.get("type") in _INFRASTRUCTURE else BadEnvironmentError
            raise kind(f"{self._name}: {first.get('type')}: {first.get('message')}")
        missing = [name for name, each in rewards.items() if each is None] if isinstance(rewards, dict) else []
        if not rewards or missing or not isinstance(reward, int | float) or not math.isfinite(reward):
            what = f"no value of {', '.join(missing)}" if missing else "no reward"
            raise BadEnvironmentError(f"{self._name}: verifiers recorded {what} for task {self._idx}")
        return float(reward)

    def _heard(self, request: JsonObject) -> list[Message]:
        """The messages of a request after those that are known. Raises ``BadEnvironmentError`` for another history."""
        messages = request.get("messages")
        found: list[JsonValue] = messages if isinstance(messages, list) else []
        answers = [each for each in found if isinstance(each, dict) and each.get("role") == "assistant"]
        known = max((at + 1 for at, each in enumerate(found) if each in answers), default=0) if self._said else 0
        if self._said and [_words(each) for each in answers[-len(self._said) :]] != [
            _words(each) for each in self._said
        ]:
            raise BadEnvironmentError(f"{self._name}: the harness rewrote the conversation, which cannot be recorded")
        return [to_message(each) for each in found[known:] if isinstance(each, dict)]

    def _opening(self, messages: list[Message]) -> tuple[Message, ...]:
        given = "\n\n".join(each.content or "" for each in messages if each.role == "system")
        text = self._dialect.system(given, self._tools)
        system = (Message(role="system", content=text),) if text else ()
        return (*system, *(each for each in messages if each.role != "system"))

    def _told(self, calls: tuple[ToolCall, ...], messages: list[Message]) -> tuple[Message, ...]:
        by_id = {call.id: call for call in calls}
        results = [
            (by_id[each.tool_call_id or ""], each.content or "") for each in messages if each.tool_call_id in by_id
        ]
        others = tuple(each for each in messages if each.tool_call_id not in by_id)
        return (*self._dialect.results(results), *others)


def _words(message: JsonValue) -> tuple[str, tuple[str, ...]]:
    """What a message says and calls, apart from the form it is written in."""
    said = to_message(message) if isinstance(message, dict) else Message(role="assistant")
    return said.content or "", tuple(f"{call.name}({call.arguments})" for call in said.tool_calls)

"""Tasksets of verifiers: episodes and scores are its own, in a Python of its own; the completions come from here."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import httpx
from pydantic import Field, JsonValue

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.core.messages import to_message, to_wire
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import Frozen, JsonObject, Message, Observation, Task, ToolCall
from openhands_rl_plugin.environments.http.client import episode_index
from openhands_rl_plugin.environments.tools.environment import Dialect

VARIABLE = "OPENHANDS_RL_VERIFIERS_PYTHON"
_HOW = (
    "verifiers conflicts with OpenHands (both pin openai, differently), so it needs another Python environment: "
    "`uv venv VERIFIERS && uv pip install --python VERIFIERS verifiers`, with your tasksets, then "
    f'python = "VERIFIERS/bin/python" in [rl.environment], or export {VARIABLE}=VERIFIERS/bin/python'
)
# What a program needs of its user's settings; keys and tokens are given by name (``pass_env``).
_PASSED = """
PATH HOME USER LOGNAME SHELL TMPDIR TEMP TMP LANG LANGUAGE TZ LD_LIBRARY_PATH VIRTUAL_ENV PYTHONPATH
HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE HF_ENDPOINT
UV_CACHE_DIR PIP_CACHE_DIR SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CUDA_VISIBLE_DEVICES DOCKER_HOST NLTK_DATA
HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
"""
# Failures of machines and servers behind a task, rather than of the task.
_INFRASTRUCTURE = frozenset({"SandboxError", "InterceptionError", "ProviderError", "ToolsetError", "TunnelError"})


def find_interpreter(named: str = "") -> str:
    """The Python that has verifiers: the one named, the variable's, or this one. Raises ``ConfigError``."""
    found = named or os.environ.get(VARIABLE, "")
    # A folder of that name on the path, without an ``__init__.py``, has no origin.
    if not found and (spec := find_spec("verifiers")) is not None and spec.origin is not None:
        return sys.executable
    found = os.path.expanduser(found)
    if not os.access(found, os.X_OK):
        raise ConfigError(f"{found} is no Python: {_HOW}" if found else _HOW)
    return found


def environment_for(pass_env: Sequence[str], path: Sequence[str] = ()) -> dict[str, str]:
    """The variables that tasksets see: places and settings of the machine, locale, and those that ``pass_env`` names.

    Raises ``ConfigError`` for a name that is not set.
    """
    if missing := [name for name in pass_env if name not in os.environ]:
        raise ConfigError(f"pass_env names {', '.join(missing)}, which is not set: export it, or leave it out")
    wanted = {*_PASSED.split(), *pass_env}
    passed = {name: value for name, value in os.environ.items() if name in wanted or name.startswith(("LC_", "XDG_"))}
    # Tool servers are processes of their own, which import the taskset's modules too.
    found = [*path, passed.get("PYTHONPATH", "")]
    return {**passed, "PYTHONPATH": os.pathsep.join(each for each in found if each)}


class VerifiersProcess:
    """Runs the episodes of one set-up, until this process ends. Thread-safe.

    Raises ``InfrastructureError`` where it cannot be started or has ended.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, python: str, setup: JsonObject, env: Mapping[str, str]) -> None:
        source = (Path(__file__).parent / "verifiers_bridge.py").read_text(encoding="utf-8")
        self._printed, self._setup = tempfile.TemporaryFile(), json.dumps(setup).encode()  # noqa: SIM115
        self._url, self._loading = "", threading.Lock()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._printed}
        try:
            self.process = subprocess.Popen([python, "-c", source], env=dict(env), start_new_session=True, **pipes)
        except OSError as error:
            raise InfrastructureError(f"{python} cannot be started: {error}") from error

    async def ready(self, seconds: float) -> None:
        """Wait until tasks can be run. Raises ``BadEnvironmentError`` for a taskset that cannot be loaded."""
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.to_thread(self._loaded)), seconds)
        except TimeoutError as error:
            self._kill()
            raise InfrastructureError(
                f"verifiers did not load the taskset within {seconds:g} s, so its process was ended: raise "
                "start_timeout in [rl.environment]"
            ) from error

    async def ask(self, path: str, body: JsonObject, seconds: float) -> dict[str, Any]:
        """POST ``body``, which starts or continues an episode; returns the next response."""
        try:
            async with httpx.AsyncClient(timeout=seconds, trust_env=False) as client:
                found = await client.post(f"{self._url}/{path}", content=json.dumps(body))
                return found.raise_for_status().json()
        except httpx.TimeoutException as error:
            raise InfrastructureError(
                f"verifiers did not answer within {seconds:g} s: raise timeout in [rl.environment]"
            ) from error
        except httpx.HTTPError as error:
            raise self._gone() from error

    def _loaded(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._loading:
            if self._url:
                return
            try:
                self.process.stdin.write(self._setup + b"\n")
                self.process.stdin.flush()
                found = json.loads(self.process.stdout.readline())
            except (OSError, ValueError) as error:
                self._kill()
                raise self._gone() from error
            if "refused" in found:
                self._kill()
                raise BadEnvironmentError(f"verifiers cannot run this: {redact_text(str(found['refused']))}")
            self._url = found["url"]

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # a session of its own: its tool servers are in it
        self.process.wait()

    def _gone(self) -> InfrastructureError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self._printed.seek(0)
        printed = " ".join(redact_text(self._printed.read().decode("utf-8", "replace")[-10_000:]).split())[-300:]
        return InfrastructureError(f"the process of verifiers ended: {printed or self.process.poll()}")


_PROCESSES: dict[tuple[int, str, str], VerifiersProcess] = {}
_MAKING = threading.Lock()


def process_for(python: str, setup: JsonObject, env: Mapping[str, str]) -> VerifiersProcess:
    """The process of this set-up, with the variables ``env``: one is shared by all episodes of this process."""
    key = (os.getpid(), python, json.dumps([setup, dict(env)], sort_keys=True))
    with _MAKING:
        found = _PROCESSES.get(key)
        if found is None or found.process.poll() is not None:
            found = _PROCESSES[key] = VerifiersProcess(python, setup, env)
        return found


class VerifiersOptions(Frozen):
    """``python``: the one that has verifiers and the tasksets (default: the environment variable
    ``OPENHANDS_RL_VERIFIERS_PYTHON``, or this one). ``path`` are further folders with modules of tasksets.

    ``taskset_options`` are the taskset's config, and ``env`` further settings of verifiers' ``[env]``, such as the
    models of other roles, or a harness of its own in place of a chat loop:
    ``{agent = {harness = {id = ...}, runtime = {type = ...}}}``. ``role``: the one of the policy (default: the first).

    ``template``: the model family in whose format tools are called in the text; empty: by the server's own tool calls.

    Tasksets see the variables of places, locale, caches and proxies only; ``pass_env`` names others, such as
    ``["OPENAI_API_KEY"]`` for a judge's key.

    ``max_turns``: after so many answers verifiers ends and scores the episode (default: that of ``[rl]``). ``timeout``
    is in seconds, for the taskset's part of one turn, ``start_timeout`` for loading it.
    """

    python: str = ""
    path: tuple[str, ...] = ()
    taskset_options: JsonObject = Field(default_factory=dict)
    env: JsonObject = Field(default_factory=dict)
    role: str = ""
    pass_env: tuple[str, ...] = ()
    template: str = "hermes"
    max_turns: int = Field(default=0, ge=0)
    timeout: float = Field(default=300.0, gt=0)
    start_timeout: float = Field(default=180.0, gt=0)


class VerifiersEnvironment:
    """The taskset after the slash of ``verifiers/TASKSET``, a module or package; a task's number is its position there.

    The conversation is verifiers' own: system prompt, user turns, tool results. The reward of the last step is
    ``trace.reward``; the evidence has each function's score and weight. An episode cannot be forked: verifiers holds
    its state. A trace without a reward fails; it is never a 0.
    """

    Options: ClassVar[type[VerifiersOptions]] = VerifiersOptions

    def __init__(self, options: VerifiersOptions | None = None) -> None:
        """Raises ``ConfigError`` where no Python has verifiers, or for an unknown template."""
        self.options = options or VerifiersOptions()
        self._python = find_interpreter(self.options.python)
        environment_for(self.options.pass_env)
        self._dialect = Dialect(self.options.template)
        self._tools: tuple[JsonObject, ...] = ()
        self._process: VerifiersProcess | None = None
        self._episode: JsonValue = None
        self._idx: int | None = None
        self._name = "verifiers"
        self._answers: list[Message] = []
        self._rewards: list[float] = []
        self._end: dict[str, Any] | None = None
        self._running = False  # it waits for an answer

    @property
    def info(self) -> EnvInfo:
        """The environment's info, with the taskset's tools after ``reset``; no tools if calls are in the text."""
        return EnvInfo(tools=self._dialect.offered(self._tools))

    async def reset(self, task: Task) -> Observation:
        """Start the episode; the observation is verifiers' first request to the model."""
        if self._process is not None:
            raise RuntimeError("an environment runs one episode: make a new one")
        options, taskset = self.options, task.environment.partition("/")[2]
        self._idx, self._name = episode_index(task), task.environment
        setup: JsonObject = {
            "env": {**options.env, "taskset": {**options.taskset_options, "id": taskset}},
            "role": options.role,
            "max_turns": options.max_turns,
        }
        self._process = process_for(self._python, setup, environment_for(options.pass_env, options.path))
        await self._process.ready(options.start_timeout)
        found = await self._ask("start", {"index": self._idx})
        self._episode = found["episode"]
        if "request" not in found:
            self._finish(found)
            raise BadEnvironmentError(f"{self._name}: task {self._idx} ended before the model was asked")
        self._tools = tuple(found["request"]["tools"])
        messages = self._new_messages(found["request"])
        given = "\n\n".join(each.content or "" for each in messages if each.role == "system")
        text = self._dialect.system(given, self._tools)
        system = (Message(role="system", content=text),) if text else ()
        return Observation(messages=(*system, *(each for each in messages if each.role != "system")))

    async def step(self, action: Message) -> Observation:
        """Give verifiers the answer; the observation is what is new in its next request, or the end."""
        if not self._running:
            raise RuntimeError("no episode is open")
        read, number = self._dialect.read(action), len(self._rewards)
        calls = tuple(
            call if call.id else call.model_copy(update={"id": f"call_{number}_{at}"})
            for at, call in enumerate(read.calls)
        )
        # Around calls in the text stands speech; without calls the text is passed as it was sampled.
        content = (read.speech if calls and not action.tool_calls else action.content) or ""
        answer = Message(role="assistant", content=content, tool_calls=calls)
        self._answers.append(answer)
        found = await self._ask("answer", {"episode": self._episode, "answer": to_wire(answer)})
        if "request" in found:
            self._rewards.append(0.0)
            return Observation(messages=self._results_of(calls, self._new_messages(found["request"])))
        self._rewards.append(reward := self._finish(found))
        truncated = found["end"]["truncated"]
        return Observation(reward=reward, terminated=not truncated, truncated=truncated)

    async def cut_short(self) -> Observation | None:
        """Have verifiers score the episode as it stands, as it does at a limit of its own."""
        if not self._running or not self._rewards:
            return None
        found = await self._ask("answer", {"episode": self._episode, "answer": None})
        reward = self._rewards[-1] = self._finish(found)
        return Observation(reward=reward, truncated=True)

    async def evidence(self) -> JsonObject:
        """The rewards by function, metrics and why it stopped.

        ``unrewarded`` where the episode was left before verifiers scored it.
        """
        if self._episode is None:
            return {}
        end = self._end or {}
        return {
            "idx": self._idx,
            "return": sum(self._rewards),
            "rewards": [*self._rewards],
            "steps": len(self._rewards),
            "done": self._end is not None,
            **({} if self._end is not None else {"unrewarded": True}),
            "truncated": bool(end.get("truncated")),
            "verifiers": {key: end.get(key) for key in ("reward", "rewards", "metrics", "stop", "task")},
        }

    async def close(self) -> None:
        """Leave the episode; its process goes on for others."""
        if self._process is not None and self._episode is not None and self._end is None:
            self._running = False
            with suppress(InfrastructureError):
                left: JsonObject = {"episode": self._episode, "answer": None, "left": True}
                await self._process.ask("answer", left, self.options.timeout)

    async def _ask(self, path: str, body: JsonObject) -> dict[str, Any]:
        assert self._process is not None
        self._running = False  # until it has answered
        found = await self._process.ask(path, body, self.options.timeout)
        self._running = "request" in found
        if "failed" in found:
            raise BadEnvironmentError(f"{self._name}: {found['failed']}")
        return found

    def _finish(self, found: dict[str, Any]) -> float:
        """The episode's reward. Raises ``EpisodeError`` for a trace that failed or has none."""
        if "end" not in found:
            raise BadEnvironmentError(f"{self._name}: the episode goes on although it was ended")
        end = self._end = found["end"]
        if end["errors"]:
            first = end["errors"][0]
            kind = InfrastructureError if first["type"] in _INFRASTRUCTURE else BadEnvironmentError
            raise kind(f"{self._name}: {first['type']}: {first['message']}")
        missing = [name for name, each in end["rewards"].items() if each is None]
        if not end["rewards"] or missing or not math.isfinite(end["reward"]):
            what = f"no value of {', '.join(missing)}" if missing else "no reward"
            raise BadEnvironmentError(f"{self._name}: verifiers recorded {what} for task {self._idx}")
        return end["reward"]

    def _new_messages(self, request: dict[str, Any]) -> list[Message]:
        """The messages of a request after those that are known. Raises ``BadEnvironmentError`` for another history."""
        found = [to_message(each) for each in request["messages"]]
        answers = [at for at, each in enumerate(found) if each.role == "assistant"]
        own = [*map(_words, self._answers)]
        if own and [_words(found[at]) for at in answers[-len(own) :]] != own:
            raise BadEnvironmentError(f"{self._name}: the harness rewrote the conversation, which cannot be recorded")
        return found[answers[-1] + 1 :] if own else found

    def _results_of(self, calls: tuple[ToolCall, ...], messages: list[Message]) -> tuple[Message, ...]:
        by_id = {call.id: call for call in calls}
        results = [
            (by_id[each.tool_call_id or ""], each.content or "") for each in messages if each.tool_call_id in by_id
        ]
        others = tuple(each for each in messages if each.tool_call_id not in by_id)
        return (*self._dialect.results(results), *others)


def _words(message: Message) -> tuple[str, tuple[str, ...]]:
    """The content and calls of a message, to compare two messages without their ids and format."""
    return message.content or "", tuple(f"{call.name}({call.arguments})" for call in message.tool_calls)

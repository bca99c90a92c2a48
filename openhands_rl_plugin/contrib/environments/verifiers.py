"""Tasksets of verifiers: episodes and scores are its own, in a Python of its own; the completions come from here."""

from __future__ import annotations

import asyncio
import atexit
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
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
    "verifiers cannot be installed beside OpenHands (both pin openai, differently), so it runs in a Python of its own: "
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
_LAST_WORDS = 20
_END_PATIENCE = 10.0


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
    """Starts at once; ``ready`` waits for it. Waiting is by any event loop.

    Raises ``InfrastructureError`` where the process ends.
    """

    def __init__(self, python: str, setup: JsonObject, env: Mapping[str, str]) -> None:
        source = (Path(__file__).parent / "verifiers_bridge.py").read_text(encoding="utf-8")
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                [python, "-c", source],
                env=dict(env),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(f"{python} cannot be started: {error}") from error
        self._url: Future[str] = Future()
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        for hear in (self._hear_errors, lambda: self._hear(setup)):
            threading.Thread(target=hear, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether episodes can be started."""
        return self._process.poll() is None

    async def ready(self, seconds: float) -> None:
        """Wait until tasks can be run. Raises ``BadEnvironmentError`` for a taskset that cannot be loaded."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(asyncio.wrap_future(self._url))
        except TimeoutError as error:
            self.discard()
            raise InfrastructureError(
                f"verifiers did not load the taskset within {seconds:g} s, so its process was ended: raise "
                "start_timeout in [rl.environment]"
            ) from error

    async def ask(self, path: str, body: JsonObject, seconds: float) -> dict[str, Any]:
        """What comes next in the episode that ``body`` starts or goes on with."""
        try:
            async with httpx.AsyncClient(timeout=seconds, trust_env=False) as client:
                found = await client.post(f"{self._url.result()}/{path}", content=json.dumps(body))
                return found.raise_for_status().json()
        except httpx.TimeoutException as error:
            raise InfrastructureError(
                f"verifiers did not answer within {seconds:g} s: raise timeout in [rl.environment]"
            ) from error
        except httpx.HTTPError as error:
            raise self._gone() from error

    def close(self) -> None:
        """End the process and what it started."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_PATIENCE)
        self.discard()

    def discard(self) -> None:
        """End the process and what it started, at once; episodes that wait fail."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own: its tool servers are in it
        self._process.wait()

    def _hear(self, setup: JsonObject) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(setup) + "\n")
            self._process.stdin.flush()
            found = json.loads(self._process.stdout.readline())
            if "refused" not in found:
                self._url.set_result(found["url"])
                return
            why = redact_text(str(found["refused"]))
            self._url.set_exception(BadEnvironmentError(f"verifiers cannot run this: {why}"))
        except (OSError, ValueError, TypeError, LookupError):
            self._url.set_exception(self._gone())
        self.discard()

    def _hear_errors(self) -> None:
        assert self._process.stderr is not None
        for text in self._process.stderr:
            self._words.append(text[:500])

    def _gone(self) -> InfrastructureError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # what it wrote last is read meanwhile
        printed = " ".join(redact_text("".join(self._words)).split())[-300:]
        return InfrastructureError(f"the process of verifiers ended: {printed or self._process.poll()}")


_PROCESSES: dict[tuple[int, str, str], VerifiersProcess] = {}
_MAKING = threading.Lock()


def process_for(python: str, setup: JsonObject, env: Mapping[str, str]) -> VerifiersProcess:
    """The process of this set-up, with the variables ``env``: one is shared by all episodes of this process."""
    key = (os.getpid(), python, json.dumps([setup, dict(env)], sort_keys=True))
    with _MAKING:
        found = _PROCESSES.get(key)
        if found is None or not found.alive:
            if found is not None:
                atexit.unregister(found.close)
            found = _PROCESSES[key] = VerifiersProcess(python, setup, env)
            atexit.register(found.close)
        return found


# Failures of machines and servers behind a task, rather than of the task.
_INFRASTRUCTURE = frozenset({"SandboxError", "InterceptionError", "ProviderError", "ToolsetError", "TunnelError"})


class VerifiersOptions(Frozen):
    """``python``: the one that has verifiers and the tasksets (default: the environment variable
    ``OPENHANDS_RL_VERIFIERS_PYTHON``, or this one). ``path`` are further folders with modules of tasksets.

    ``taskset``: its id, a module or package (default: what follows the slash in ``env_name``); ``taskset_options`` are
    its config, and ``env`` further settings of verifiers' ``[env]``, such as the models of other roles, or a harness of
    its own in place of a chat loop: ``{agent = {harness = {id = ...}, runtime = {type = ...}}}``. ``role``: the one of
    the policy (default: the first).

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
    pass_env: tuple[str, ...] = ()
    template: str = "hermes"
    max_turns: int = Field(default=0, ge=0)
    timeout: float = Field(default=300.0, gt=0)
    start_timeout: float = Field(default=180.0, gt=0)


class VerifiersEnvironment:
    """A task's number is its position in the taskset. The conversation is verifiers' own: system prompt, user turns,
    tool results. The reward of the last step is ``trace.reward``; the evidence has each function's score and weight.

    An episode cannot be forked: verifiers holds its state. A trace without a reward fails; it is never a 0.
    """

    Options: ClassVar[type[VerifiersOptions]] = VerifiersOptions

    def __init__(self, options: VerifiersOptions | None = None) -> None:
        """Raises ``ConfigError`` where no Python has verifiers, or for an unknown template."""
        self.options = options or VerifiersOptions()
        self._python = find_interpreter(self.options.python)
        environment_for(self.options.pass_env)
        template = self.options.template
        self._dialect = Dialect(template)
        self._tools: tuple[JsonObject, ...] = ()
        self._process: VerifiersProcess | None = None
        self._episode: JsonValue = None
        self._idx: int | None = None
        self._name = "verifiers"
        self._answers: list[Message] = []
        self._rewards: list[float] = []
        self._end: dict[str, Any] | None = None
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
            "max_turns": options.max_turns,
            "path": [*options.path],
        }
        self._process = process_for(self._python, setup, environment_for(options.pass_env, options.path))
        await self._process.ready(options.start_timeout)
        line = await self._ask("start", {"index": self._idx})
        self._episode = line["episode"]
        if "request" not in line:
            self._finish(line)
            raise BadEnvironmentError(f"{self._name}: task {self._idx} ended before the model was asked")
        self._tools = tuple(line["request"]["tools"])
        return Observation(messages=self._opening(self._new_messages(line["request"])))

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
        answer = Message(role="assistant", content=content, tool_calls=calls)
        self._answers.append(answer)
        line = await self._ask("answer", {"episode": self._episode, "answer": to_wire(answer)})
        if "request" in line:
            self._rewards.append(0.0)
            return Observation(messages=self._results_of(calls, self._new_messages(line["request"])))
        self._rewards.append(reward := self._finish(line))
        truncated = line["end"]["truncated"]
        return Observation(reward=reward, terminated=not truncated, truncated=truncated)

    async def cut_short(self) -> Observation | None:
        """Have verifiers score the episode as it stands, as it does at a limit of its own."""
        if not self._running or not self._rewards:
            return None
        reward = self._rewards[-1] = self._finish(await self._ask("answer", self._cut()))
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
        if self._open and self._process is not None:
            self._running = self._open = False
            with suppress(InfrastructureError):
                await self._process.ask("answer", {**self._cut(), "left": True}, _END_PATIENCE)

    def _cut(self) -> JsonObject:
        return {"episode": self._episode, "answer": None}

    async def _ask(self, path: str, body: JsonObject) -> dict[str, Any]:
        assert self._process is not None
        self._running, self._open = False, self._episode is not None  # until it has answered
        found = await self._process.ask(path, body, self.options.timeout)
        self._open = self._running = "request" in found
        if "failed" in found:
            raise BadEnvironmentError(f"{self._name}: {found['failed']}")
        return found

    def _finish(self, line: dict[str, Any]) -> float:
        """The episode's reward. Raises ``EpisodeError`` for a trace that failed or has none."""
        if "end" not in line:
            raise BadEnvironmentError(f"{self._name}: the episode goes on although it was ended")
        end = self._end = line["end"]
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

    def _opening(self, messages: list[Message]) -> tuple[Message, ...]:
        given = "\n\n".join(each.content or "" for each in messages if each.role == "system")
        text = self._dialect.system(given, self._tools)
        system = (Message(role="system", content=text),) if text else ()
        return (*system, *(each for each in messages if each.role != "system"))

    def _results_of(self, calls: tuple[ToolCall, ...], messages: list[Message]) -> tuple[Message, ...]:
        by_id = {call.id: call for call in calls}
        results = [
            (by_id[each.tool_call_id or ""], each.content or "") for each in messages if each.tool_call_id in by_id
        ]
        others = tuple(each for each in messages if each.tool_call_id not in by_id)
        return (*self._dialect.results(results), *others)


def _words(message: Message) -> tuple[str, tuple[str, ...]]:
    """What a message says and calls, apart from the form it is written in."""
    return message.content or "", tuple(f"{call.name}({call.arguments})" for call in message.tool_calls)

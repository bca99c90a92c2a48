"""The Python that has verifiers, as a process of this one: one for each set-up, shared by its episodes."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import JsonObject

VARIABLE = "OPENHANDS_RL_VERIFIERS_PYTHON"
_HOW = (
    "verifiers cannot be installed beside OpenHands (both pin openai, differently), so it runs in a Python of its own: "
    "`uv venv VERIFIERS && uv pip install --python VERIFIERS verifiers`, with your tasksets, then "
    f'python = "VERIFIERS/bin/python" in [rl.environment], or export {VARIABLE}=VERIFIERS/bin/python'
)
_LAST_WORDS = 20
_END_PATIENCE = 10.0


def find_interpreter(named: str = "") -> str:
    """The Python that has verifiers: the one named, the variable's, or this one. Raises ``ConfigError``."""
    found = named or os.environ.get(VARIABLE, "")
    if not found and find_spec("verifiers") is not None:
        return sys.executable
    found = os.path.expanduser(found)
    if not os.access(found, os.X_OK):
        raise ConfigError(f"{found} is no Python: {_HOW}" if found else _HOW)
    return found


class VerifiersProcess:
    """Starts at once; ``ready`` waits for it. Thread-safe; waiting is by any event loop.

    Raises ``InfrastructureError`` where the process ends.
    """

    def __init__(self, python: str, setup: JsonObject) -> None:
        source = files("openhands_rl_plugin.environments.verifiers").joinpath("bridge.py").read_text(encoding="utf-8")
        # Tool servers are processes of their own, which import the taskset's modules too.
        path = [*setup["path"], os.environ.get("PYTHONPATH", "")] if isinstance(setup["path"], list) else []
        try:
            self._process = subprocess.Popen(
                [python, "-c", source],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(str(each) for each in path if each)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            raise InfrastructureError(f"{python} cannot be started: {error}") from error
        self._started: Future[None] = Future()
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._waiting: dict[int, Future[JsonObject]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ended = False
        threading.Thread(target=self._hear_errors, daemon=True).start()
        threading.Thread(target=self._hear, daemon=True).start()
        self._send(setup)

    @property
    def alive(self) -> bool:
        """Whether episodes can be started."""
        return not self._ended

    async def ready(self, seconds: float) -> None:
        """Wait until tasks can be played. Raises ``BadEnvironmentError`` for a taskset that cannot be loaded."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(asyncio.wrap_future(self._started))
        except TimeoutError as error:
            raise InfrastructureError(f"verifiers did not load the taskset within {seconds:g} s") from error

    def number(self) -> int:
        """A new episode's number."""
        return next(self._numbers)

    async def ask(self, episode: int, line: JsonObject, seconds: float) -> JsonObject:
        """Send a line of an episode and wait for its next one."""
        answer: Future[JsonObject] = Future()
        with self._lock:
            if self._ended:
                raise self._gone()
            self._waiting[episode] = answer
        self._send({"episode": episode, **line})
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(answer)
        except TimeoutError as error:
            raise InfrastructureError(
                f"verifiers did not answer within {seconds:g} s: raise timeout in [rl.environment]"
            ) from error
        finally:
            self._waiting.pop(episode, None)

    def tell(self, episode: int, line: JsonObject) -> None:
        """Send a line that nobody waits for."""
        with suppress(InfrastructureError):
            self._send({"episode": episode, **line})

    def close(self) -> None:
        """End the process and what it started."""
        process = self._process
        with suppress(OSError, ValueError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            process.wait(_END_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _send(self, line: JsonObject) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(line) + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._gone() from error

    def _hear(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line: dict[str, Any] = json.loads(text)
            if "ready" in line:
                self._started.set_result(None)
            elif "refused" in line:
                said = redact_text(str(line["refused"]))
                self._started.set_exception(BadEnvironmentError(f"verifiers cannot play this: {said}"))
            elif (answer := self._waiting.get(line["episode"])) is not None and not answer.done():
                answer.set_result(line)
        with self._lock:
            self._ended = True
            left = [each for each in (self._started, *self._waiting.values()) if not each.done()]
        for each in left:
            each.set_exception(self._gone())

    def _hear_errors(self) -> None:
        assert self._process.stderr is not None
        for text in self._process.stderr:
            self._words.append(text[:500])

    def _gone(self) -> InfrastructureError:
        said = " ".join(redact_text("".join(self._words)).split())[-300:]
        return InfrastructureError(f"the process of verifiers ended: {said or self._process.poll()}")


_PROCESSES: dict[tuple[int, str, str], VerifiersProcess] = {}
_MAKING = threading.Lock()


def process_for(python: str, setup: JsonObject) -> VerifiersProcess:
    """The process of this set-up: a running one is shared by all episodes of this process."""
    key = (os.getpid(), python, json.dumps(setup, sort_keys=True))
    with _MAKING:
        found = _PROCESSES.get(key)
        if found is None or not found.alive:
            found = _PROCESSES[key] = VerifiersProcess(python, setup)
            atexit.register(found.close)
        return found

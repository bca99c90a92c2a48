"""The Python that has verifiers, as a process of this one: one for each set-up, shared by its episodes."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError, describe
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import JsonObject

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
_ALIVE_PATIENCE = 5.0


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
    """Starts at once; ``ready`` waits for it. Thread-safe; waiting is by any event loop.

    Raises ``InfrastructureError`` where the process ends.
    """

    def __init__(self, python: str, setup: JsonObject, env: Mapping[str, str]) -> None:
        source = (Path(__file__).parent / "bridge.py").read_text(encoding="utf-8")
        try:
            self._process = subprocess.Popen(
                [python, "-c", source],
                env=dict(env),
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
        self._ended = self._killed = False
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
            self.discard()
            raise InfrastructureError(
                f"verifiers did not load the taskset within {seconds:g} s, so its process was ended: raise "
                "start_timeout in [rl.environment]"
            ) from error

    def number(self) -> int:
        """A new episode's number."""
        return next(self._numbers)

    async def ask(self, episode: int, line: JsonObject, seconds: float) -> JsonObject:
        """Send a line of an episode and wait for its next one.

        A process that does not answer is asked whether its loop still turns; one that is stuck is ended, because all
        of its episodes are lost.
        """
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
            await self._end_if_stuck()
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
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_PATIENCE)
        self.discard()

    def discard(self) -> None:
        """End the process and what it started, at once; episodes that wait fail."""
        with self._lock:
            first, self._ended = not self._killed, True
            self._killed = True
        if first:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own: its tool servers are in it
        self._process.wait()

    async def _end_if_stuck(self) -> None:
        alive = self.number()
        answer: Future[JsonObject] = Future()
        self._waiting[alive] = answer
        try:
            self._send({"episode": alive, "alive": True})
            async with asyncio.timeout(_ALIVE_PATIENCE):
                await asyncio.wrap_future(answer)
        except (TimeoutError, InfrastructureError):
            self.discard()
        finally:
            self._waiting.pop(alive, None)

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
        try:
            for text in self._process.stdout:
                self._hear_line(json.loads(text))
        except (ValueError, TypeError, LookupError, InvalidStateError) as error:
            self._words.append(f"it broke the protocol ({describe(error)})")
        finally:
            self.discard()
            with self._lock:
                left = [each for each in (self._started, *self._waiting.values()) if not each.done()]
            for each in left:
                each.set_exception(self._gone())

    def _hear_line(self, line: dict[str, Any]) -> None:
        if "ready" in line:
            self._started.set_result(None)
        elif "refused" in line:
            said = redact_text(str(line["refused"]))
            self._started.set_exception(BadEnvironmentError(f"verifiers cannot play this: {said}"))
        elif (answer := self._waiting.get(line["episode"])) is not None and not answer.done():
            answer.set_result(line)

    def _hear_errors(self) -> None:
        assert self._process.stderr is not None
        for text in self._process.stderr:
            self._words.append(text[:500])

    def _gone(self) -> InfrastructureError:
        said = " ".join(redact_text("".join(self._words)).split())[-300:]
        return InfrastructureError(f"the process of verifiers ended: {said or self._process.poll()}")


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

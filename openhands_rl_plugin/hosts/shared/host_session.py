"""One session of a host, for one episode of a runner: from the task to the trajectory."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from typing import Any

from pydantic import SecretStr

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import RLError, boundary
from openhands_rl_plugin.core.records import LAST_ERROR
from openhands_rl_plugin.core.types import Failure, FailureKind, Limits, StopReason, Trajectory
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.hosts.shared.sessions import end_evidence, runtime_of
from openhands_rl_plugin.session.session import Session, bind_episode

ITERATIONS_A_TURN = 4
"""Of OpenHands: one, or several with several tool calls, a summary, or an answer that cannot be read."""

# Characters of OpenHands' last error in the evidence: enough for its message, without a long response body.
_LONGEST_ERROR = 2000


class HostSession(ABC):
    """``open``, ``conclude`` and ``close`` block and are called on threads; the constructor on the event loop."""

    def __init__(self, episode: Session, options: HostOptions, sid: str) -> None:
        self._episode = episode
        self._options = options
        self._sid = sid
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._lock = threading.Lock()
        # ``close`` waits for an ``open`` that is still running.
        self._opening = threading.Lock()
        self._end: Failure | RLError | str | None = None

    def open(self) -> None:
        """Create the session and give it the task. Raises ``CaughtFailure``."""
        task = self._episode.request.task
        with self._opening, boundary(FailureKind.INFRASTRUCTURE, "openhands.start"), bind_episode(self._episode):
            self._start(task.instruction or task.id)

    async def ended(self) -> None:
        """Wait until the session has ended, or a part of it has failed."""
        await self._ended.wait()

    def conclude(self, *, timed_out: bool = False, failure: Failure | None = None) -> Trajectory:
        """The episode's trajectory. Raises the ``RLError`` that ended the session, if it must stop the run."""
        self._cancel()
        episode, end = self._episode, self._end
        if (error := episode.error or (end if isinstance(end, RLError) else None)) is not None:
            raise error
        failure = failure or (end if isinstance(end, Failure) else None)
        stop, failure = self._reason(timed_out, None if timed_out else failure)
        evidence, failure = end_evidence(runtime_of(self._sid), episode, failure)
        if said := self._last_error():
            evidence = {**(evidence or episode.evidence or {}), LAST_ERROR: said[:_LONGEST_ERROR]}
        return episode.freeze(stop=stop, failure=failure, evidence=evidence)

    def close(self) -> None:
        """Release the session, and wait until its threads have finished their current call."""
        with self._opening:
            # After opening: before, the runtime may not be registered.
            self._cancel()
            self._release()

    def _finish(self, end: Failure | RLError | str) -> None:
        """The session has ended, by a failure or in a state of the host. Only the first reason counts."""
        with self._lock:
            if self._end is not None:
                return
            self._end = end
        self._loop.call_soon_threadsafe(self._ended.set)

    def _reply(self, said: int, otherwise: str) -> str:
        """What the simulated user says, after so many replies."""
        replies = self._options.replies
        return otherwise if replies is None else replies.first + (replies.later if said else "")

    @abstractmethod
    def _start(self, instruction: str) -> None: ...

    @abstractmethod
    def _cancel(self) -> None:
        """End a decision that is under way."""

    @abstractmethod
    def _reason(self, timed_out: bool, failure: Failure | None) -> tuple[StopReason | None, Failure | None]:
        """Why the episode ended; ``None``: as its agent noted."""

    @abstractmethod
    def _last_error(self) -> str: ...

    @abstractmethod
    def _release(self) -> None: ...


def llm_settings(settings: RLSettings, options: HostOptions, served: str, limits: Limits) -> dict[str, Any]:
    """Fields of OpenHands' LLM, which both hosts have; ``served``: the name of the model on its server."""
    serving = settings.serving
    return {
        "model": f"openai/{served}",
        "base_url": serving.base_url,
        "api_key": SecretStr(serving.api_key() or "none"),
        "native_tool_calling": options.native_tool_calling,
        "timeout": max(1, round(serving.request_timeout)),
        "num_retries": options.llm_retries,
        "retry_min_wait": 1,
        "retry_max_wait": 2,
        "max_output_tokens": limits.max_response_length,
        "caching_prompt": False,
        "disable_vision": True,
    }

"""The Ray actor of the service: rolls out episodes, several at a time, and stores them."""

from __future__ import annotations

import os
import platform
import time

from openhands_rl_plugin.apps.rollout.play import play
from openhands_rl_plugin.apps.rollout.rollout import PlayedRollout
from openhands_rl_plugin.apps.stores import storage_at
from openhands_rl_plugin.contrib.rollouts.requests import Result, ServiceOptions, TaskRequest, session_result
from openhands_rl_plugin.core.errors import CaughtFailure, RLError, StorageError, boundary
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import FailureKind


class Player:
    """Episodes of ``service``, stored at ``store`` as this machine sees it."""

    def __init__(self, service: ServiceOptions, store: str) -> None:
        os.environ.setdefault("LOG_LEVEL", "ERROR")  # otherwise OpenHands logs every step
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        self._service = service
        self._where = store
        self._storage: TrajectoryStorage | None = None

    async def play(self, request: TaskRequest, session_id: str, run_id: str, sample: int) -> Result:
        """One episode. A stored one is not rolled out again."""
        began, node = time.monotonic(), platform.node()
        outcome = await self._try(request, run_id, sample)
        timing = {"e2e_ms": 1000 * (time.monotonic() - began)}
        if isinstance(outcome, PlayedRollout):
            timing["run_ms"] = 1000 * outcome.seconds
        return session_result(request, session_id, outcome, timing=timing, node=node)

    async def _try(self, request: TaskRequest, run_id: str, sample: int) -> PlayedRollout | tuple[str, str]:
        """The episode, or the kind and the reason of its failure."""
        try:
            self._storage = self._storage or storage_at(self._where)
            options = request.options(self._service, sample, run_id)
            with boundary(FailureKind.INFRASTRUCTURE, "rollout.play"):
                found = await play(request.task, options, storage=self._storage)
        except CaughtFailure as caught:
            return caught.failure.kind, caught.failure.message
        except StorageError as error:
            return FailureKind.INFRASTRUCTURE, str(error)
        except RLError as error:
            return "configuration", f"{error} (on {platform.node()})"
        if (failure := found.failure) is not None:
            # A failure names the option that is to be raised, which here is the task's.
            failure = failure.model_copy(update={"message": failure.message.replace("--timeout", "timeout_seconds")})
        return found.model_copy(update={"failure": failure})

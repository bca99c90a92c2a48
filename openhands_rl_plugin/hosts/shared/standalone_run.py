"""An episode without a runner, as under ``python -m openhands.core.main``: from ``[rl]``, stored while it runs.

A killed process leaves an unfinished episode that can be read; ``TrajectoryStorage.drop`` removes it.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import threading
import uuid
import zlib

from openhands_rl_plugin.config.build import make_reward, make_strategy, open_storage, strategy_spec
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.redaction import redact_trajectory
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, StopReason, Task, Trajectory
from openhands_rl_plugin.hosts.shared.end_evidence import workspace_command
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.run_summary import run_summary
from openhands_rl_plugin.rollout.scoring import judge

WORKSPACE = "workspace"

_TITLE, _WORDS, _SHORT = 36, 7, 8

# OpenHands' own logger, by its name: nothing here imports OpenHands.
log = logging.getLogger("openhands")

TASK_INDEX_VARIABLE = "OPENHANDS_RL_TASK_INDEX"
"""The index of the environment's task for ``python -m openhands.core.main``; default 0."""


def standalone_episode(
    settings: RLSettings,
    *,
    session: str,
    instruction: str,
    base_model: str,
    environment_mode: bool,
    served_model: str | None = None,
) -> HostEpisode:
    """The episode of an OpenHands session. Raises ``ConfigError`` for a strategy that cannot be loaded.

    ``served_model``: the adapter's name on the server, if the session samples from one.

    In environment mode its task is the environment's, else the session itself. With a ``[rl.sampling] seed`` the same
    task is sampled the same way in every run; without one every run differs.
    """
    task = Task(id=workspace_task_id(instruction, session), environment=WORKSPACE, instruction=instruction)
    if environment_mode:
        task = task_from_environment_variable(settings).model_copy(update={"instruction": instruction})
    run_id = f"standalone-{uuid.uuid4().hex}"
    given = "seed" in settings.sampling.model_fields_set
    seed = (str(settings.sampling.seed), task.environment, str(task.data), instruction) if given else (run_id,)
    request = EpisodeRequest(
        task=task,
        run_id=run_id,
        group_id=session,
        seed=zlib.crc32("\0".join(seed).encode()),
        served_model=served_model,
    )
    return HostEpisode(
        request,
        settings,
        strategy=make_strategy(settings),
        strategy_spec=strategy_spec(settings),
        base_model=base_model,
        environment_mode=environment_mode,
    )


def workspace_task_id(instruction: str, session: str) -> str:
    """The instruction's first words and the session's first characters: ``make-the-failing-test-pass-1f0c2a9b``."""
    words = re.findall(r"\w+", instruction[:_TITLE])[:_WORDS]
    return "-".join([*(word.lower() for word in words), session[:_SHORT]])


def task_from_environment_variable(settings: RLSettings) -> Task:
    """The task for a plain OpenHands run. Raises ``ConfigError`` when the variable is no whole number."""
    text = os.environ.get(TASK_INDEX_VARIABLE, "0")
    if not text.isdecimal():
        raise ConfigError(f"{TASK_INDEX_VARIABLE} must be a whole number from 0, not {text!r}")
    # The same id as ``RLAgent.run`` gives it.
    return Task(id=f"{settings.env_name}-{int(text)}", environment=settings.env_name, data={"idx": int(text)})


class StandaloneRun:
    """Stores an episode while it runs; closes it when it or the process ends. Raises ``ConfigError``."""

    def __init__(self, episode: HostEpisode) -> None:
        self._episode = episode
        self._storage = open_storage(episode.settings)
        self._kept = False
        self._lock = threading.Lock()
        episode.keep_in(self._storage, background().loop)
        atexit.register(self._keep_at_exit)

    def keep(self, stop: StopReason | None = None, failure: Failure | None = None) -> None:
        """Close the episode; later calls do nothing. Raises ``StorageError``."""
        if self._claim():
            log.info("%s", background().wait_for(self._store(self._episode.freeze(stop=stop, failure=failure))))

    def _keep_at_exit(self) -> None:
        # The interpreter no longer starts threads, so a new storage is used here, and left open.
        if self._episode.tree.nodes and self._claim():
            trajectory = self._episode.freeze()
            asyncio.run(open_storage(self._episode.settings).add(trajectory))
            log.info("%s", run_summary(redact_trajectory(trajectory), (), self._episode.settings))

    def _claim(self) -> bool:
        with self._lock:
            kept, self._kept = self._kept, True
        atexit.unregister(self._keep_at_exit)
        return not kept

    async def _store(self, trajectory: Trajectory) -> str:
        try:
            await self._episode.end(trajectory)
            await self._judge(trajectory)
            return await self._summary(trajectory)
        finally:
            await self._storage.close()

    async def _judge(self, trajectory: Trajectory) -> None:
        """By the reward's command, if it has one; other rewards are computed when they are needed."""
        reward = self._episode.settings.reward
        if trajectory.failure is None and workspace_command(reward) is not None:
            outcome = await judge(make_reward(reward), trajectory)
            if isinstance(outcome, Failure):
                log.warning("no reward: %s", outcome.message)
            else:
                await self._storage.add_scores([outcome])

    async def _summary(self, trajectory: Trajectory) -> str:
        """Of what is stored, which says less than the episode did where a secret was taken out."""
        settings = self._episode.settings
        async for stored, scores in self._storage.find(TrajectoryFilter(ids=(trajectory.id,))):
            return run_summary(stored, scores, settings)
        return run_summary(redact_trajectory(trajectory), (), settings)


class RunBeside:
    """Stores a sub-agent's episode while it runs, where the runner of ``parent`` stores that one."""

    def __init__(self, episode: HostEpisode, parent: HostEpisode) -> None:
        self._episode = episode
        episode.keep_beside(parent)

    def keep(self, failure: Failure | None = None) -> None:
        """Close the episode; called once. Raises ``StorageError``."""
        background().wait_for(self._episode.end(self._episode.freeze(failure=failure)))

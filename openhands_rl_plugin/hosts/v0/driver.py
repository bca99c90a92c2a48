"""Runs episodes with OpenHands' own controller: many sessions in one process.

Importing this module does not import OpenHands (seconds and hundreds of megabytes); a ``ControllerRunner`` does.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError
from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.core.validation import unknown_name
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions, check_engine_setting
from openhands_rl_plugin.rollout.journal import EpisodeSink

if TYPE_CHECKING:
    from openhands.core.config import OpenHandsConfig

    from openhands_rl_plugin.hosts.v0.controller_session import ControllerSession

_UNUSED = "StandardReAct"
# Seconds to wait for a session's threads. They end at once, except during a model call; then they end by themselves.
_CLOSE_PATIENCE = 5.0


class ControllerRunner:
    """An ``EpisodeRunner`` over real OpenHands sessions in this process.

    With a ``storage``, which is used on the event loop that ``run`` is called on, episodes are stored while they run.
    An unfinished one is dropped and restarted, because OpenHands' state cannot be restored exactly. Raises
    ``ConfigError`` when ``[rl.serving]`` has no server or model, or the strategy cannot be created.
    """

    def __init__(
        self, settings: RLSettings, options: HostOptions | None = None, *, storage: EpisodeSink | None = None
    ) -> None:
        _require_server(settings)
        _quieten()
        self._settings = settings
        self._options = options or HostOptions()
        self._storage = storage
        self._spec = self._options.strategy_spec(settings)
        _check_agent(self._options)
        self._make_strategy()
        sessions = self._options.sessions or settings.max_workers
        self._gate = asyncio.Semaphore(sessions)
        # Opening and closing block; twice the sessions, because some may still be closing.
        self._threads = ThreadPoolExecutor(2 * sessions, thread_name_prefix="rl-session")
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        async with self._gate:
            return await self._run_episode(request, workspace)

    async def close(self) -> None:
        """Wait for the sessions that are still closing, and end the threads."""
        await asyncio.gather(*self._closing)
        await asyncio.to_thread(self._threads.shutdown)

    async def _run_episode(self, request: EpisodeRequest, workspace: TaskWorkspace | None) -> Trajectory:
        from openhands_rl_plugin.hosts.v0.controller_session import ControllerSession

        episode = self._episode(request, workspace)
        if self._storage is not None:
            episode.keep_in(self._storage, asyncio.get_running_loop())
        sid = f"rl-{uuid.uuid4().hex[:24]}"
        session = ControllerSession(self._config(episode), episode, sid, self._options.replies)
        try:
            trajectory = await self._run_session(session, episode.limits.timeout)
            await episode.end(trajectory)
            return trajectory
        finally:
            await self._release(session)

    async def _run_session(self, session: ControllerSession, timeout: float | None) -> Trajectory:
        timed_out, failure = False, None
        try:
            async with asyncio.timeout(timeout):
                await self._in_thread(session.open)
                await session.ended()
        except TimeoutError:
            timed_out = True
        except CaughtFailure as caught:
            failure = caught.failure
        return await self._in_thread(lambda: session.conclude(timed_out=timed_out, failure=failure))

    def _make_strategy(self) -> Strategy:
        # An agent of OpenHands uses no strategy; its episode has the simplest one, which is never called.
        stock = self._options.agent != RL_AGENT
        return registry.build("strategies", _UNUSED if stock else self._spec.name, self._spec.options)

    def _episode(self, request: EpisodeRequest, workspace: TaskWorkspace | None) -> HostEpisode:
        return HostEpisode(
            request,
            self._settings,
            strategy=self._make_strategy(),
            strategy_spec=self._spec,
            base_model=self._settings.serving.model,
            environment_mode=self._options.environment_mode,
            workspace=workspace,
            token_ids=self._options.token_ids,
        )

    def _config(self, episode: HostEpisode) -> OpenHandsConfig:
        from openhands_rl_plugin.hosts.v0.controller_config import controller_config

        return controller_config(
            self._settings,
            self._options,
            model=episode.request.served_model,
            limits=episode.limits,
            sampling=episode.sampling_for(None, 0),
        )

    async def _release(self, session: ControllerSession) -> None:
        closing = asyncio.create_task(self._in_thread(session.close))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.wait({closing}, timeout=_CLOSE_PATIENCE)

    async def _in_thread[T](self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, contextvars.copy_context().run, call)


def _check_agent(options: HostOptions) -> None:
    if options.agent == RL_AGENT:
        return
    from openhands.agenthub import Agent

    if options.environment_mode:
        raise ConfigError(f"{options.agent} works in workspaces only; environment mode needs {RL_AGENT}")
    if options.agent not in Agent.list_agents():
        raise ConfigError(unknown_name("agent", options.agent, Agent.list_agents()))


def _require_server(settings: RLSettings) -> None:
    check_engine_setting(settings)
    for key in ("base_url", "model"):
        if not getattr(settings.serving, key):
            raise ConfigError(f"[rl.serving] {key}: OpenHands' controller needs a policy server; set it")


def _quieten() -> None:
    """Prevent OpenHands' download of model prices and its log line for every step."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from openhands.core.logger import openhands_logger

    import openhands_rl_plugin.hosts.v0.agent  # noqa: F401  # registers RLAgent

    if "LOG_LEVEL" not in os.environ:
        openhands_logger.setLevel(logging.ERROR)

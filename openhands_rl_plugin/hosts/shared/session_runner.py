"""Runs episodes in sessions of a host, many side by side in this process; those of environments without a host."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import make_environment
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError
from openhands_rl_plugin.core.machine import without_collection
from openhands_rl_plugin.core.protocols import LLMEngine, Strategy
from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.host_session import HostSession
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions, check_engine_setting
from openhands_rl_plugin.models.engines.seeded import SeededEngine, merge_sampling
from openhands_rl_plugin.models.engines.server_models import ServedEngines
from openhands_rl_plugin.rollout.journal import EpisodeSink
from openhands_rl_plugin.rollout.session import SessionRunner
from openhands_rl_plugin.session.session import Session

_UNUSED = "StandardReAct"
# Seconds to wait for a session's threads. They end at once, except during a model call; then they end by themselves.
_CLOSE_PATIENCE = 5.0


class SessionHostRunner(ABC):
    """An ``EpisodeRunner`` over sessions of a host in this process.

    With a ``storage``, which is used on the event loop that ``run`` is called on, episodes are stored while they run.
    An unfinished one is dropped and restarted, because a host's state cannot be restored exactly. Raises
    ``ConfigError`` when ``[rl.serving]`` has no server or model, or the strategy cannot be created.
    """

    def __init__(
        self, settings: RLSettings, options: HostOptions | None = None, *, storage: EpisodeSink | None = None
    ) -> None:
        require_server(settings)
        self._options = options or HostOptions()
        if (isolation := self._options.isolation) is not None:
            workspace = settings.workspace.model_copy(update={"isolation": isolation})
            settings = settings.model_copy(update={"workspace": workspace})
        self._settings = settings
        self._storage = storage
        self._spec = self._options.strategy_spec(settings)
        with without_collection():
            self._prepare()
        self._make_strategy()
        sessions = self._options.sessions or settings.max_workers
        self._gate = asyncio.Semaphore(sessions)
        # Opening and closing block; twice the sessions, because some may still be closing.
        self._threads = ThreadPoolExecutor(2 * sessions, thread_name_prefix="rl-session")
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        async with self._gate:
            episode = Session(
                request,
                self._settings,
                strategy=self._make_strategy(),
                strategy_spec=self._spec,
                base_model=self._settings.serving.model,
                environment_mode=self._options.environment_mode,
                workspace=workspace,
                token_ids=self._options.token_ids,
            )
            if self._storage is not None:
                episode.keep_in(self._storage, asyncio.get_running_loop())
            session = self._session(episode)
            try:
                trajectory = await self._run_session(session, episode.limits.timeout)
                await episode.end(trajectory)
                return trajectory
            finally:
                await self._release(session)

    async def close(self) -> None:
        """Wait for the sessions that are still closing, and end the threads."""
        await asyncio.gather(*self._closing)
        await asyncio.to_thread(self._threads.shutdown)

    @abstractmethod
    def _prepare(self) -> None:
        """Import the host. Raises ``ConfigError`` for options that it cannot fulfil."""

    @abstractmethod
    def _session(self, episode: Session) -> HostSession:
        """A session for one episode, not opened. Called on the event loop."""

    async def _run_session(self, session: HostSession, timeout: float | None) -> Trajectory:
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
        # An agent of OpenHands uses no strategy; its episode has the simplest one.
        stock = self._options.agent != RL_AGENT
        return registry.build("strategies", _UNUSED if stock else self._spec.name, self._spec.options)

    async def _release(self, session: HostSession) -> None:
        closing = asyncio.create_task(self._in_thread(session.close))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.wait({closing}, timeout=_CLOSE_PATIENCE)

    async def _in_thread[T](self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, contextvars.copy_context().run, call)


def require_server(settings: RLSettings) -> None:
    """Raise ``ConfigError`` when ``[rl.serving]`` has no server or model, or another engine is set."""
    check_engine_setting(settings)
    for key in ("base_url", "model"):
        if not getattr(settings.serving, key):
            raise ConfigError(f"[rl.serving] {key}: OpenHands needs a policy server; set it")


class EnvironmentSessions(SessionRunner):
    """A ``SessionRunner`` over the server of ``[rl.serving]``. Imports no OpenHands.

    Raises ``ConfigError`` when there is no server or model, the strategy cannot be created, or another agent than
    ``RLAgent`` is asked for.
    """

    def __init__(
        self, settings: RLSettings, options: HostOptions | None = None, *, storage: EpisodeSink | None = None
    ) -> None:
        require_server(settings)
        options = options or HostOptions()
        if options.agent != RL_AGENT:
            raise ConfigError(f"{options.agent} works in workspaces only; environment mode needs {RL_AGENT}")
        spec, base_model = options.strategy_spec(settings), settings.serving.model
        self._gate = asyncio.Semaphore(options.sessions or settings.max_workers)
        self._engines = engines = ServedEngines(settings, token_ids=options.token_ids)

        def make_strategy(request: EpisodeRequest | None = None) -> Strategy:
            return registry.build("strategies", spec.name, spec.options)

        def make_engine(request: EpisodeRequest) -> LLMEngine:
            sampling = merge_sampling(request.sampling, settings.sampling_params())
            return SeededEngine(engines(request.served_model or base_model), sampling, request.seed)

        make_strategy()
        super().__init__(
            make_environment=lambda request: make_environment(settings),
            make_strategy=make_strategy,
            make_engine=make_engine,
            strategy_spec=spec,
            base_model=base_model,
            limits=settings.limits(),
            storage=storage,
        )

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        async with self._gate:
            return await super().run(request)

    async def close(self) -> None:
        """Close the connections to the model server."""
        await self._engines.close()

"""Runs episodes in sessions of a host, many side by side in this process; those of environments without a host."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import SecretStr

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import make_engine, make_environment, make_strategy
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary, unknown_name
from openhands_rl_plugin.core.protocols import LLMEngine, Strategy
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, FailureKind, Limits, StopReason, Trajectory
from openhands_rl_plugin.environments.workspace.sandbox import check_bubblewrap
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions, check_engine_setting
from openhands_rl_plugin.hosts.shared.sessions import end_episode
from openhands_rl_plugin.models.engines.seeded import SeededEngine, merge_sampling
from openhands_rl_plugin.rollout.journal import EpisodeSink
from openhands_rl_plugin.rollout.session import SessionRunner
from openhands_rl_plugin.session.session import Session, bind_episode

ITERATIONS_A_TURN = 4
"""Of OpenHands: one, or several with several tool calls, a summary, or an answer that cannot be read."""


class HostSession(ABC):
    """One session of a host, for one episode of a runner. ``ended``: it has ended, or a part of it has failed.

    ``open``, ``conclude`` and ``close`` block and are called on threads; the constructor on the event loop.
    """

    def __init__(self, episode: Session, options: HostOptions, sid: str) -> None:
        self._episode = episode
        self._options = options
        self._sid = sid
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        # ``close`` waits for an ``open`` that is still running.
        self._opening = threading.Lock()
        self._end: Failure | RLError | str | None = None

    def open(self) -> None:
        """Create the session and give it the task. Raises ``CaughtFailure``."""
        task = self._episode.request.task
        with self._opening, boundary(FailureKind.INFRASTRUCTURE, "openhands.start"), bind_episode(self._episode):
            self._start(task.instruction or task.id)

    def conclude(self, *, timed_out: bool = False, failure: Failure | None = None) -> Trajectory:
        """The episode's trajectory. Raises the ``RLError`` that ended the session, if it must stop the run."""
        self._cancel()
        episode, end = self._episode, self._end
        if (error := episode.error or (end if isinstance(end, RLError) else None)) is not None:
            raise error
        failure = failure or (end if isinstance(end, Failure) else None)
        stop, failure = self._reason(timed_out, None if timed_out else failure)
        return end_episode(self._sid, episode, stop, failure, last_error=self._last_error())

    def close(self) -> None:
        """Release the session, and wait until its threads have finished their current call."""
        with self._opening:
            # After opening: before, the runtime may not be registered.
            self._cancel()
            self._release()

    def _finish(self, end: Failure | RLError | str) -> None:
        """The session has ended, by a failure or in a state of the host. Only the first reason counts."""
        if self._end is None:
            self._end = end
        self._loop.call_soon_threadsafe(self.ended.set)

    def _reply(self, said: int, otherwise: str) -> str:
        """What the simulated user says, after so many replies."""
        replies = self._options.replies
        return replies[min(said, len(replies) - 1)] if replies else otherwise

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
        self._settings = settings
        self._storage = storage
        self._spec = self._options.strategy_spec(settings)
        if "LOG_LEVEL" not in os.environ:
            logging.getLogger("openhands").setLevel(logging.ERROR)
        if self._options.agent not in (agents := self._agents()):
            raise ConfigError(unknown_name("agent", self._options.agent, agents))
        if settings.workspace.isolation != "none":
            check_bubblewrap()
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
                environment_mode=False,
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
    def _agents(self) -> Sequence[str]:
        """The names of the agents that can be asked for."""

    @abstractmethod
    def _session(self, episode: Session) -> HostSession:
        """A session for one episode, not opened. Called on the event loop."""

    async def _run_session(self, session: HostSession, timeout: float | None) -> Trajectory:
        timed_out, failure = False, None
        try:
            async with asyncio.timeout(timeout):
                await self._in_thread(session.open)
                await session.ended.wait()
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
        engine_options = {"token_ids": options.token_ids, **settings.engine_options}
        served = settings.model_copy(update={"engine": "openai", "engine_options": engine_options})
        base_model, base_url = settings.serving.model, settings.serving.base_url
        self._gate = asyncio.Semaphore(options.sessions or settings.max_workers)
        self._engines = engines = dict[str, Any]()

        def engine_for(request: EpisodeRequest) -> LLMEngine:
            model = request.served_model or base_model
            if model not in engines:
                engines[model] = make_engine(served, model=model, base_model=base_model, base_url=base_url)
            sampling = merge_sampling(request.sampling, settings.sampling_params())
            return SeededEngine(engines[model], sampling, request.seed)

        make_strategy(settings)
        super().__init__(
            make_environment=lambda request: make_environment(settings),
            make_strategy=lambda request: make_strategy(settings),
            make_engine=engine_for,
            strategy_spec=options.strategy_spec(settings),
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
        for engine in self._engines.values():
            await engine.aclose()

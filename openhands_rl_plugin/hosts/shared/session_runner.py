"""Runs episodes in sessions of a host, many side by side in this process; those of environments without a host.

``HostOptions`` are what a host needs beside ``[rl]``: where an episode runs, with which agent, and within which limits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import make_engine, make_environment, make_strategy, strategy_spec
from openhands_rl_plugin.config.rl import AUTO, RLSettings
from openhands_rl_plugin.core.concurrency import shielded
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary, problems, unknown_name
from openhands_rl_plugin.core.protocols import LLMEngine, Strategy
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Failure,
    FailureKind,
    Frozen,
    JsonObject,
    Limits,
    StopReason,
    StrategySpec,
    Trajectory,
)
from openhands_rl_plugin.environments.workspace.sandbox import check_bubblewrap
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.sessions import end_episode
from openhands_rl_plugin.models.engines.seeded import SeededEngine, merge_sampling
from openhands_rl_plugin.rollout.journal import EpisodeSink
from openhands_rl_plugin.rollout.session import SessionRunner
from openhands_rl_plugin.session.session import Session, bind_episode

log = logging.getLogger("openhands")

ITERATIONS_A_TURN = 4
"""Of OpenHands: one, or several with several tool calls, a summary, or an answer that cannot be read."""

RL_AGENT = "RLAgent"


class HostOptions(Frozen):
    """How a host runs its sessions.

    ``environment_mode``: the model sees only an environment's observations; else it works in a workspace with
    OpenHands' own tools. ``sessions``: how many a worker of a pool runs at a time (default: ``[rl] max_workers``
    divided by the workers). ``command_timeout`` is in seconds. ``agent`` is ``RLAgent`` or an agent of OpenHands, which
    does not use the strategy. ``token_ids``: request token ids and logprobs, which some servers reject.
    ``stuck_detection`` is OpenHands' own. ``replies``: what a simulated user replies to each message without a tool
    call, the last of them from then on (default: OpenHands' own text). ``condenser`` is a section
    ``[agent.NAME.condenser]`` of OpenHands, whose model is the policy; by default there is none, so that every prompt
    is a prefix of the next one. ``llm``, of this process only: keys of ``[llm]`` in place of ``[rl.serving]``.
    ``folder``: where a session without a workspace of its own works; default: one that is removed with it.
    """

    environment_mode: bool = True
    sessions: int | None = None
    command_timeout: int = 60
    native_tool_calling: bool = True
    agent: str = RL_AGENT
    token_ids: bool = True
    stuck_detection: bool = False
    llm_retries: int = Field(default=2, ge=1)
    replies: tuple[str, ...] = ()
    condenser: JsonObject = Field(default_factory=dict)
    llm: JsonObject = Field(default_factory=dict, repr=False)
    folder: Path | None = None

    def strategy_spec(self, settings: RLSettings) -> StrategySpec:
        """The strategy with all its options. For an agent of OpenHands it names that agent."""
        if self.agent != RL_AGENT:
            return StrategySpec(name=self.agent)
        return strategy_spec(settings)


def check_engine_setting(settings: RLSettings) -> None:
    """OpenHands' controller asks its model server itself. Raises ``ConfigError`` for another engine."""
    if settings.engine not in (AUTO, "openai"):
        raise ConfigError(
            f"[rl] engine: OpenHands asks its model by itself, so {settings.engine!r} would not be used; it is for "
            "RLAgent in Python. Remove the line from this config.toml"
        )


type End = Failure | RLError | StopReason | None
"""Why a session ended: a failure, what must stop the run, a limit, or (``None``) what its host's state says."""


class HostSession:
    """One session of a host, for one episode of a runner. ``ended`` has its ``End``, ``opened`` what ``close`` closes.

    ``open``, ``conclude`` and ``close`` block and are called on threads.
    """

    def __init__(self, episode: Session, options: HostOptions) -> None:
        self.episode, self.options, self.id = episode, options, str(uuid.uuid4())
        self.ended, self.opened = Future[End](), ExitStack()

    def start(self, instruction: str) -> None:
        """Create the session and give it the task."""
        raise NotImplementedError

    def reason(self, end: Failure | StopReason | None) -> tuple[StopReason | None, Failure | None, str]:
        """Why the episode ended (``None``: as its agent noted), its failure, and the host's last error."""
        raise NotImplementedError

    def cancel(self) -> None:
        """End a decision that is under way."""
        self.episode.cancel(math.inf)

    def open(self) -> None:
        """As ``start``. Raises ``CaughtFailure``."""
        task = self.episode.request.task
        with boundary(FailureKind.INFRASTRUCTURE, "openhands.start"), bind_episode(self.episode):
            self.start(task.instruction or task.id)

    def finish(self, end: End) -> None:
        """The session has ended, or a part of it has failed. Only the first reason counts."""
        with suppress(InvalidStateError):
            self.ended.set_result(end)

    def conclude(self) -> Trajectory:
        """The trajectory of the ended episode. Raises the ``RLError`` that ended it, if it must stop the run."""
        self.cancel()
        end = self.episode.error or self.ended.result()
        if isinstance(end, RLError):
            raise end
        stop, failure, last_error = self.reason(end)
        return end_episode(self.id, self.episode, stop, failure, last_error=last_error)

    def close(self) -> None:
        """Release the session, and wait until its threads have finished their current call."""
        self.cancel()
        self.opened.close()

    def reply(self, number: int, otherwise: str) -> str:
        """What the simulated user replies, after so many replies."""
        replies = self.options.replies
        return replies[min(number, len(replies) - 1)] if replies else otherwise


def make_llm[LLM: BaseModel](kind: type[LLM], section: JsonObject, **own: object) -> LLM:
    """OpenHands' LLM with ``own`` fields and those of ``[llm]`` over them. Unknown keys are left out, with a warning.

    Raises ``ConfigError`` for a value that OpenHands refuses.
    """
    known = {key: value for key, value in section.items() if key in kind.model_fields}
    if unknown := sorted(set(section) - set(known)):
        log.warning("openhands_rl_plugin: [llm] %s: not a setting of this OpenHands, ignored", ", ".join(unknown))
    try:
        return kind.model_validate({**own, **known})
    except ValidationError as error:
        # Never the value: it may be a key.
        lines = (f"[llm] {at[-1] if at else ''}: {what.partition(', got ')[0]}" for at, what in problems(error, kind))
        raise ConfigError("\n".join(lines)) from None


def llm_settings(settings: RLSettings, options: HostOptions, served: str, limits: Limits) -> dict[str, Any]:
    """Fields of OpenHands' LLM, which both hosts have: those of ``options``, if it has any.

    ``served``: the name of the model on its server.
    """
    if options.llm:
        return options.llm
    serving = settings.serving
    return {
        "model": f"openai/{served}",
        "base_url": serving.base_url,
        "api_key": serving.api_key() or "none",
        "native_tool_calling": options.native_tool_calling,
        "timeout": max(1, round(serving.request_timeout)),
        "num_retries": options.llm_retries,
        "retry_min_wait": 1,
        "retry_max_wait": 2,
        "max_output_tokens": limits.max_response_length,
        "caching_prompt": False,
        "disable_vision": True,
    }


class SessionHostRunner:
    """An ``EpisodeRunner`` over sessions of a host in this process. Its caller limits how many run side by side.

    With a ``storage``, which is used on the event loop that ``run`` is called on, episodes are stored while they run.
    An unfinished one is dropped and restarted, because a host's state cannot be restored exactly. Raises
    ``ConfigError`` when ``[rl.serving]`` has no server or model, or the strategy cannot be created.

    A host sets ``session``, which makes the session of an episode, and ``agents``, the names that can be asked for.
    """

    session: Callable[[Session, HostOptions], HostSession]
    agents: Callable[[], Sequence[str]]

    def __init__(
        self, settings: RLSettings, options: HostOptions | None = None, *, storage: EpisodeSink | None = None
    ) -> None:
        self._options = options or HostOptions()
        if not self._options.llm:
            require_server(settings)
        self._settings = settings
        self._storage = storage
        self._spec = self._options.strategy_spec(settings)
        if "LOG_LEVEL" not in os.environ:
            logging.getLogger("openhands").setLevel(logging.ERROR)
        if self._options.agent not in (agents := self.agents()):
            raise ConfigError(unknown_name("agent", self._options.agent, agents))
        if settings.workspace.isolation != "none":
            check_bubblewrap()
        self._make_strategy()

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
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
        session = self.session(episode, self._options)
        try:
            try:
                async with asyncio.timeout(episode.limits.timeout):
                    # Also where a limit comes first: what is half open cannot be closed.
                    await shielded(asyncio.to_thread(session.open))
                    await asyncio.shield(asyncio.wrap_future(session.ended))
            except TimeoutError:
                session.finish(StopReason.TIMEOUT)
            except CaughtFailure as caught:
                session.finish(caught.failure)
            trajectory = await asyncio.to_thread(session.conclude)
            await episode.end(trajectory)
            return trajectory
        finally:
            await shielded(asyncio.to_thread(session.close))

    async def close(self) -> None:
        """Does nothing: no resource outlives an episode."""

    def _make_strategy(self) -> Strategy:
        # An agent of OpenHands uses no strategy; its episode has the simplest one.
        stock = self._options.agent != RL_AGENT
        return registry.build("strategies", "StandardReAct" if stock else self._spec.name, self._spec.options)


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
        return await super().run(request)

    async def close(self) -> None:
        """Close the connections to the model server."""
        for engine in self._engines.values():
            await engine.aclose()

"""The sessions of a host: their runtimes, how an episode ends, episodes with a runner, and episodes without one.

OpenHands creates agent and runtime of a session separately, without references. Both know the session's id.

An episode without a runner, as under ``python -m openhands.core.main``, follows ``[rl]`` and is stored while it runs. A
killed process leaves an unfinished episode that can be read; ``TrajectoryStorage.drop`` removes it. It samples from the
adapter version that was published last. One line at its end says what was recorded.

A runner has many sessions side by side in this process; those of environments have no host. ``HostOptions`` are a
host's options in addition to ``[rl]``: where an episode runs, with which agent, and within which limits.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import logging
import math
import os
import re
import shlex
import threading
import uuid
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from pydantic import BaseModel, Field, ValidationError

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import (
    make_engine,
    make_environment,
    make_reward,
    make_strategy,
    open_storage,
    strategy_spec,
    success_rule,
)
from openhands_rl_plugin.config.rl import AUTO, RewardSettings, RLSettings
from openhands_rl_plugin.core.concurrency import background, bound, shielded
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary, problems, unknown_name
from openhands_rl_plugin.core.judgements import FOLDER, newest_outcome
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.protocols import LLMEngine, Strategy, TrajectoryStorage
from openhands_rl_plugin.core.records import CHECKED, LAST_ERROR, WorkspaceCommand
from openhands_rl_plugin.core.redaction import redact_trajectory
from openhands_rl_plugin.core.statistics import pass_at_k
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Failure,
    FailureKind,
    Frozen,
    JsonObject,
    Limits,
    Node,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.environments.workspace.sandbox import check_bubblewrap
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.models.engines.client import SeededEngine, merge_sampling
from openhands_rl_plugin.rollout import scoring
from openhands_rl_plugin.rollout.episode import LiveEnvironment, SessionRunner, on_its_loop
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.session.session import Session, session_here

# Characters of OpenHands' last error in the evidence: enough for its message, without a long response body.
_LONGEST_ERROR = 2000

_runtimes: WeakValueDictionary[str, object] = WeakValueDictionary()


def register_runtime(session: str, runtime: object) -> None:
    """Register the runtime of a session, by a weak reference."""
    _runtimes[session] = runtime


def runtime_of(session: str) -> object | None:
    """The runtime that is registered for this session; ``None`` for a runtime of another package."""
    return _runtimes.get(session)


def workspace_command(settings: RewardSettings) -> WorkspaceCommand | None:
    """The command that the reward needs at the end of an episode, if any. Raises ``ConfigError``."""
    # Other rewards are not made: a verifier would load its model.
    judges = hasattr(registry.load("rewards", settings.name), "workspace_command")
    return scoring.workspace_command(make_reward(settings)) if judges else None


def protected_by(settings: RewardSettings) -> tuple[str, ...]:
    """The files that the reward's command protects, if any. Raises ``ConfigError``."""
    asked = workspace_command(settings)
    return asked.protected if asked is not None else ()


def end_episode(
    session: str,
    episode: Session,
    stop: StopReason | None = None,
    failure: Failure | None = None,
    *,
    last_error: str = "",
) -> Trajectory:
    """The ended episode, with the evidence of its host's session. Blocks.

    It fails with its own failure, ``failure``, or else the environment's. Evidence is ``last_error`` and what
    ``conclude`` of the runtime, or of its ``workspace``, returns, if it has one; ``check`` runs the reward's command.

    An episode that a limit cut gets its reward here, where its environment gives it at the end only.
    The reward's command comes last, so that what it writes is no part of the session's patch. It judges whatever a run
    that ended has left, also at a limit of iterations; it is not run after a failure, such as a stop in the middle.
    """
    runtime, evidence, broken = runtime_of(session), None, None
    place = getattr(runtime, "workspace", runtime)
    if (conclude := getattr(place, "conclude", None)) is not None:
        evidence, broken = conclude()
    failure = episode.failure or failure or broken
    live = getattr(runtime, "live", None)
    if isinstance(live, LiveEnvironment) and live.owed is not None:
        episode.reward_last_action(live.owed)
    evidence = {**(evidence or episode.evidence or {})}
    asked = workspace_command(episode.settings.reward)
    if asked is not None and failure is None:
        missing = asked.did(error="this runtime has no workspace of openhands_rl_plugin")
        ran = check(asked) if (check := getattr(place, "check", None)) is not None else missing
        evidence[CHECKED] = ran.model_dump(mode="json")
    if last_error:
        evidence[LAST_ERROR] = last_error[:_LONGEST_ERROR]
    return episode.freeze(stop=stop, failure=failure, evidence=evidence)


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
    workspace: str | Path = "",
) -> Session:
    """The episode of an OpenHands session. Raises ``ConfigError`` for a strategy that cannot be loaded.

    ``served_model``: the adapter's name on the server, if the session samples from one.

    In environment mode its task is the environment's, else that of this ``instruction`` in this ``workspace``.
    """
    task = workspace_task(instruction, str(Path(workspace).resolve()))
    if environment_mode:
        task = task_from_environment_variable(settings).model_copy(update={"instruction": instruction})
    return Session(
        own_request(settings, task, f"standalone-{uuid.uuid4().hex}", session, served_model=served_model),
        settings,
        strategy=make_strategy(settings),
        strategy_spec=strategy_spec(settings),
        base_model=base_model,
        environment_mode=environment_mode,
    )


def own_request(
    settings: RLSettings, task: Task, run_id: str, group_id: str, *, sample: int = 0, served_model: str | None = None
) -> EpisodeRequest:
    """The request of an attempt without a rollout plan.

    With a ``[rl.sampling] seed`` the same attempt is sampled the same way in every run; without one every run differs.
    """
    data = {} if task.environment == WORKSPACE else task.data
    seed = [str(settings.sampling.seed), task.environment, str(data), task.instruction]
    seed = [*(seed if "seed" in settings.sampling.model_fields_set else [run_id]), *([str(sample)] if sample else [])]
    return EpisodeRequest(
        task=task,
        run_id=run_id,
        group_id=group_id,
        sample=sample,
        seed=zlib.crc32("\0".join(seed).encode()),
        served_model=served_model,
    )


def workspace_task(instruction: str, place: str) -> Task:
    """The task of an instruction in a folder. Attempts share its id: first words, and a digest of text and folder, as
    ``make-the-failing-test-pass-1f0c2a9b``.
    """
    words = re.findall(r"\w+", instruction[:_TITLE])[:_WORDS]
    digest = hashlib.sha256(f"{place}\0{instruction}".encode("utf-8", "surrogatepass")).hexdigest()
    name = "-".join([*(word.lower() for word in words), digest[:_SHORT]])
    return Task(id=name, environment=WORKSPACE, instruction=instruction, data={FOLDER: digest[:16]})


def task_from_environment_variable(settings: RLSettings) -> Task:
    """The task for a plain OpenHands run. Raises ``ConfigError`` when the variable is no whole number."""
    text = os.environ.get(TASK_INDEX_VARIABLE, "0")
    if not text.isdecimal():
        raise ConfigError(f"{TASK_INDEX_VARIABLE} must be a whole number from 0, not {text!r}")
    # The same id as ``RLAgent.run`` gives it.
    return Task(id=f"{settings.env_name}-{int(text)}", environment=settings.env_name, data={"idx": int(text)})


class StandaloneRun:
    """Stores an episode while it runs; ends it once, by a call or when the process ends. Raises ``ConfigError``.

    ``session``: the host's, which has the evidence. ``parent``: the episode above a sub-agent's, whose runner stores
    both; such an episode is neither judged nor summed up here. ``before_exit`` is called when the process ends first,
    to note why the episode ended.
    """

    def __init__(self, episode: Session, session: str = "", *, parent: Session | None = None) -> None:
        self._episode, self._session, self.parent = episode, session, parent
        self._storage = open_storage(episode.settings) if parent is None else None
        self._first = threading.Lock()
        self.before_exit: Callable[[], None] = lambda: None
        if self._storage is not None:
            episode.store_in(on_its_loop(self._storage, background().loop))
        elif parent is not None and parent.sink is not None:
            episode.store_in(parent.sink)
        atexit.register(self._end_at_exit)

    def end(self, stop: StopReason | None = None, failure: Failure | None = None) -> None:
        """End the episode as ``end_episode`` and store it; later calls store nothing. Raises ``StorageError``."""
        trajectory = end_episode(self._session, self._episode, stop, failure)
        if self._claim():
            background().wait_for(self._store(trajectory))

    def _end_at_exit(self) -> None:
        # The interpreter no longer starts threads, so a new storage is used here, and left open.
        self.before_exit()
        if self._storage is not None and self._episode.tree.nodes and self._claim():
            trajectory = self._episode.freeze()
            asyncio.run(open_storage(self._episode.settings).add(trajectory))
            self._sum_up(trajectory)

    def _claim(self) -> bool:
        """Whether the caller is the first to end the episode, and so the one that stores it."""
        atexit.unregister(self._end_at_exit)
        return self._first.acquire(blocking=False)

    async def _store(self, trajectory: Trajectory) -> None:
        if self._storage is None:
            return await self._episode.end(trajectory)
        try:
            await self._episode.end(trajectory)
            scores = await judged(self._storage, trajectory, self._episode.settings.reward)
        finally:
            await self._storage.close()
        self._sum_up(trajectory, *scores)

    def _sum_up(self, trajectory: Trajectory, *scores: Score) -> None:
        # The summary is of the redacted trajectory, as it is stored.
        log.info("%s", run_summary(redact_trajectory(trajectory), scores, self._episode.settings))


async def judged(storage: TrajectoryStorage, trajectory: Trajectory, settings: RewardSettings) -> tuple[Score, ...]:
    """Judge a stored episode by the reward's command, if it has one; other rewards are computed when they are needed.

    Raises ``StorageError``.
    """
    if trajectory.failure is not None or workspace_command(settings) is None:
        return ()
    outcome = await scoring.judge(make_reward(settings), trajectory)
    if isinstance(outcome, Failure):
        log.warning("no reward: %s", outcome.message)
        return ()
    await storage.add_scores((outcome,))
    return (outcome,)


SHORT_ID = 8


def run_summary(trajectory: Trajectory, scores: Sequence[Score], settings: RLSettings) -> str:
    """``trajectory`` and ``scores`` as they are stored."""
    store, short = store_name(settings), trajectory.id[:SHORT_ID]
    sampled = [node for node in trajectory.nodes if node.sampled]
    parts = [
        f"recorded in {store} as {short}: {len(sampled)} completions",
        f"token ids: {_token_ids(sampled, store)}",
        _outcome(trajectory, scores, store),
        f"openhands-rl show {store} {short}",
    ]
    return "; ".join(parts)


def group_summary(recorded: Sequence[tuple[Trajectory, tuple[Score, ...]]], settings: RLSettings) -> str:
    """One line on the attempts at one task: how many succeeded, pass@k, and what can be done with them."""
    ended = [(episode, scores) for episode, scores in recorded if episode.stop is not StopReason.UNFINISHED]
    valid = [(episode, scores) for episode, scores in ended if episode.failure is None]
    task, store = recorded[0][0].task if recorded else None, store_name(settings)
    if task is None or not valid:
        return "no attempt counts: all failed"
    scored = [(episode, reward) for episode, scores in valid if (reward := _reward(episode, scores)) is not None]
    line = f"{len(valid)} attempts at {task.id}: "
    if len(scored) < len(valid):
        return f"{line}{len(scored)} scored; openhands-rl studio {store} compares them"
    rule = success_rule(task.environment, settings.reward)
    won, tried = sum(rule.holds(reward, episode.stop) for episode, reward in scored), len(scored)
    passes = ", ".join(f"pass@{k} {pass_at_k(tried, won, k):.2f}" for k in sorted({1, tried}))
    return f"{line}{won} of {tried} succeeded; {passes}; openhands-rl list {store} --task {task.id} --by task,version"


def store_name(settings: RLSettings) -> str:
    """The store as an argument of ``openhands-rl``."""
    if settings.storage_backend == "mongodb":
        storage = settings.storage
        return f"env:{storage.uri_env}" if storage.uri_env else "mongodb://localhost:27017/openhands_rl"
    path = settings.storage.path
    # A shell expands the tilde only outside of quotes.
    return path if path.startswith("~/") and shlex.quote(path[2:]) == path[2:] else shlex.quote(path)


def _token_ids(sampled: Sequence[Node], store: str) -> str:
    with_ids = sum(node.tokens is not None for node in sampled)
    if with_ids == len(sampled):
        return "yes" if sampled else "none"
    return f"{f'{with_ids} of them' if with_ids else 'no'} (openhands-rl list {store} --by says why)"


def _reward(trajectory: Trajectory, scores: Sequence[Score]) -> float | None:
    judged = newest_outcome(scores)
    return trajectory.known_return if judged is None else judged.reward


def _outcome(trajectory: Trajectory, scores: Sequence[Score], store: str) -> str:
    if trajectory.stop is StopReason.UNFINISHED:
        return "stopped before its end, so never trained on"
    if (failure := trajectory.failure) is not None:
        return f"failed, so never trained on ({failure.kind.value}: {one_line(failure.message, 120)})"
    if (reward := _reward(trajectory, scores)) is not None:
        return f"reward: {reward:g}"
    return f"reward: not scored (openhands-rl score {store} --id {trajectory.id[:SHORT_ID]} --value 1)"


ITERATIONS_A_TURN = 4
"""OpenHands' iterations for one turn: several for several tool calls, a summary or a malformed completion."""

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
        with boundary(FailureKind.INFRASTRUCTURE, "openhands.start"), bound(session_here, self.episode):
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
        """The simulated user's reply after ``number`` earlier replies."""
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
        self, settings: RLSettings, options: HostOptions | None = None, *, storage: TrajectoryStorage | None = None
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
            episode.store_in(on_its_loop(self._storage, asyncio.get_running_loop()))
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
        return make_strategy(self._settings) if self._options.agent == RL_AGENT else StandardReActStrategy()


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
        self, settings: RLSettings, options: HostOptions | None = None, *, storage: TrajectoryStorage | None = None
    ) -> None:
        require_server(settings)
        options = options or HostOptions()
        if options.agent != RL_AGENT:
            raise ConfigError(f"{options.agent} works in workspaces only; environment mode needs {RL_AGENT}")
        served = settings.model_copy(update={"engine": "openai"})
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

"""The sessions of a host: their runtimes, how an episode ends, and episodes without a runner.

OpenHands creates agent and runtime of a session separately, without references. Both know the session's id.

An episode without a runner, as under ``python -m openhands.core.main``, follows ``[rl]`` and is stored while it runs. A
killed process leaves an unfinished episode that can be read; ``TrajectoryStorage.drop`` removes it. It samples from the
adapter version that was published last. One line at its end says what was recorded.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import logging
import os
import re
import shlex
import threading
import uuid
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import make_reward, make_strategy, open_storage, strategy_spec
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings
from openhands_rl_plugin.config.success import success_rule
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.judgements import FOLDER, newest_outcome
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import CHECKED, LAST_ERROR, WorkspaceCommand
from openhands_rl_plugin.core.redaction import redact_trajectory
from openhands_rl_plugin.core.statistics import pass_at_k
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, Node, Score, StopReason, Task, Trajectory
from openhands_rl_plugin.rollout import scoring
from openhands_rl_plugin.rollout.session import LiveEnvironment
from openhands_rl_plugin.session.session import Session

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
    that ended has left, also at a limit of iterations; after a failure, which a stop in the middle is, it is not run.
    """
    runtime, evidence, broken = runtime_of(session), None, None
    place = getattr(runtime, "workspace", runtime)
    if (conclude := getattr(place, "conclude", None)) is not None:
        evidence, broken = conclude()
    failure = episode.failure or failure or broken
    live = getattr(runtime, "live", None)
    if isinstance(live, LiveEnvironment) and live.owed is not None:
        episode.pay(live.owed)
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
    """The request of an attempt that nobody planned.

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
    """What is asked in a folder. The id has the first words and a digest of text and folder, which attempts share:
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
            episode.keep_in(self._storage, background().loop)
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
        # What is stored says less than the episode did where a secret was taken out.
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
    judged = [(episode, reward) for episode, scores in valid if (reward := _reward(episode, scores)) is not None]
    line = f"{len(valid)} attempts at {task.id}: "
    if len(judged) < len(valid):
        return f"{line}{len(judged)} scored; openhands-rl label {store} --pairs --task {task.id}"
    rule = success_rule(task.environment, settings.reward)
    won, tried = sum(rule.holds(reward, episode.stop) for episode, reward in judged), len(judged)
    passes = ", ".join(f"pass@{k} {pass_at_k(tried, won, k):.2f}" for k in sorted({1, tried}))
    return f"{line}{won} of {tried} succeeded; {passes}; openhands-rl stats {store} --task {task.id} --by task,version"


def store_name(settings: RLSettings) -> str:
    """The store as an argument of ``openhands-rl``."""
    if settings.storage_backend == "mongodb":
        storage = settings.storage
        return f"env:{storage.uri_env}" if storage.uri_env else f"mongodb://localhost:27017/{storage.database}"
    path = settings.storage.path
    # A shell expands the tilde only outside of quotes.
    return path if path.startswith("~/") and shlex.quote(path[2:]) == path[2:] else shlex.quote(path)


def _token_ids(sampled: Sequence[Node], store: str) -> str:
    with_ids = sum(node.tokens is not None for node in sampled)
    if with_ids == len(sampled):
        return "yes" if sampled else "none"
    return f"{f'{with_ids} of them' if with_ids else 'no'} (openhands-rl stats {store} says why)"


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

"""Runs a host's episodes in this process, or in several workers with many sessions each.

One process is limited by its interpreter lock. Workers are new Python processes, not forks, so they inherit no state,
or actors on a Ray cluster with a CPU each, whose machines need this package and access to the model server and the
environment. They get the settings and read secrets from the environment variables that the settings name. One process
writes for all workers: their episodes share a flush, and workers need no secrets of the storage.

Only this module names hosts, and importing it does not import OpenHands.

python -m openhands_rl_plugin.hosts.pool       # a worker: calls on the socket that is its stdin; ends with that
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partialmethod
from pathlib import Path
from typing import Any, Protocol, cast

from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import OwnWork
from openhands_rl_plugin.core.concurrency import shielded
from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    ConfigError,
    InfrastructureError,
    RLError,
    StorageError,
    boundary,
    describe,
    from_extra,
)
from openhands_rl_plugin.core.files import remove_tree, temporary_folder
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import EpisodeGrowth, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, FailureKind, Message, Node, StopReason, Trajectory
from openhands_rl_plugin.environments.workspace.copies import copy_tree
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.sessions import (
    RL_AGENT,
    EnvironmentSessions,
    HostOptions,
    check_engine_setting,
    judged,
)
from openhands_rl_plugin.rollout.episode import failed_episode, stored_episode

# No price list from the network, no banner; read when OpenHands is imported.
_QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}


class HostRunner(Protocol):
    """An ``EpisodeRunner`` over OpenHands, which can also be given the workspace of an episode."""

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        ...

    async def close(self) -> None:
        """Release sessions, threads and workers."""
        ...


def local_runner(
    settings: RLSettings, options: HostOptions | None = None, *, storage: TrajectoryStorage | None = None
) -> HostRunner:
    """A runner whose sessions run in this process, of the host that ``[rl] host`` says.

    OpenHands has no part in episodes of an environment. Raises ``ConfigError`` for settings that the host cannot use.
    """
    options = options or HostOptions()
    if settings.workspace.is_compact and not options.environment_mode and options.agent != RL_AGENT:
        raise ConfigError(
            f"[rl.workspace] prompt: \"compact\" is RLAgent's, and {options.agent} has OpenHands' own instructions; "
            "choose RLAgent (evaluate: --agent RLAgent), or remove the line"
        )
    if options.environment_mode:
        return EnvironmentSessions(settings, options, storage=storage)
    os.environ.update({**_QUIET, **os.environ})
    if host_of(settings) == "v0":
        from openhands_rl_plugin.hosts.v0.controller_session import ControllerRunner as Runner
    else:
        from openhands_rl_plugin.hosts.v1.runs import ConversationRunner as Runner
    return Runner(settings, options, storage=storage)


def task_attempts(
    task: str, workspace: Path, work: OwnWork, run_id: str, count: int
) -> tuple[RLSettings, list[tuple[EpisodeRequest, HostOptions]]]:
    """The attempts at one task in a folder, for ``local_runner`` with these settings, which name the model.

    Several form a group: each has a copy of the folder, ``FOLDER-attempt-1`` and so on next to it. Raises ``RLError``
    for invalid settings, a model server that is unreachable or does not serve the model, and a strategy that cannot
    search here.
    """
    os.environ.update({"LOG_LEVEL": "WARNING", **_QUIET, **os.environ})
    from openhands_rl_plugin.hosts.shared import litellm_calls, sessions

    named = work.settings.serving.model or litellm_calls.split_provider(str(work.llm["model"]))[1]
    serving = work.settings.serving.model_copy(update={"model": named})
    settings, workspace = work.settings.model_copy(update={"serving": serving}), workspace.resolve()
    if host_of(settings) == "v0":
        check_engine_setting(settings)
    served = litellm_calls.check_model(settings, work.llm)
    litellm_calls.check_workspace_strategy(settings)
    asked, attempts = sessions.workspace_task(task, str(workspace)), list[tuple[EpisodeRequest, HostOptions]]()
    for sample, folder in enumerate([workspace] if count == 1 else _copies(workspace, settings, count)):
        request = sessions.own_request(settings, asked, run_id, run_id, sample=sample, served_model=served)
        attempts.append((request, HostOptions(environment_mode=False, llm=work.llm, folder=folder)))
    return settings, attempts


class _Watched:
    """The storage of an episode that shows its answers when the agent acts on them."""

    def __init__(self, storage: TrajectoryStorage, show: Callable[[Message], object]) -> None:
        self._storage, self._show, self._nodes, self._head = storage, show, list[Node](), cast(int | None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def grow(self, growth: EpisodeGrowth) -> None:
        await self._storage.grow(growth)
        self._nodes += growth.nodes
        if growth.head is not None and growth.head != self._head and self._nodes[growth.head].sampled:
            self._show(self._nodes[growth.head].message)
        self._head = growth.head


async def run_attempts(
    settings: RLSettings,
    attempts: Sequence[tuple[EpisodeRequest, HostOptions]],
    storage: TrajectoryStorage,
    show: Callable[[Message], object],
) -> bool:
    """Run what ``task_attempts`` returned, one after the other, and judge it by the reward's command, if it has one.

    ``show`` gets each completion when the agent acts on it. Returns whether no attempt failed.
    """
    failures: list[Failure | None] = []
    for request, options in attempts:
        runner = local_runner(settings, options, storage=cast(TrajectoryStorage, _Watched(storage, show)))
        trajectory = await runner.run(request)
        await judged(storage, trajectory, settings.reward)
        failures.append(trajectory.failure)
    return not any(failures)


def _copies(workspace: Path, settings: RLSettings, attempts: int) -> list[Path]:
    """A new copy of the folder for each attempt, without a store that lies in it."""
    free = (workspace.with_name(f"{workspace.name}-attempt-{number}") for number in itertools.count(1))
    made = list(itertools.islice((folder for folder in free if not folder.exists()), attempts))
    store = settings.storage.directory.resolve() if settings.storage_backend == "file" else workspace
    own = frozenset({store.relative_to(workspace).parts[0]}) if workspace in store.parents else frozenset[str]()
    for folder in made:
        copy_tree(workspace, folder, seconds=600.0, leave_out=own)
    return made


# Seconds beyond an episode's time limit, which the worker enforces: to start the worker (importing OpenHands takes ten
# on an idle machine, and a cluster may have to start a machine first), and to open, close and store the session.
_TIME_BEYOND_LIMIT = 600.0
# Seconds for a worker to close its sessions.
_CLOSE_TIMEOUT = 10.0
_LENGTH_BYTES = 8
"""An answer is sent after its length."""
# What open sessions have to close in, when the pool is gone.
_CLOSE_SECONDS = 2.0
# OpenHands has a dozen threads a session: at Python's 0.005 most time goes into switches when many sessions begin.
_SWITCH_SECONDS = 0.1

# Bytes of the output that are read: a traceback ends with its cause.
_LONGEST_LINE = 10_000


type Outcome = tuple[Any, RLError | None]
type Given = tuple[RLSettings, HostOptions, bool]
"""Settings and options for a worker's runner, and whether the pool has a storage."""


async def outcome(work: Awaitable[Any]) -> Outcome:
    """The result of ``work``, or its error, of a class that can be pickled."""
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "worker"):
            return await work, None
    except CaughtFailure as caught:
        return None, InfrastructureError(str(caught))
    except RLError as error:
        return None, error


class EpisodeWorker:
    """Runs episodes in this process. A pool calls its methods by ``answer``.

    To its runner it is a storage, of which it has what writes; its calls return when the pool has stored the record.
    """

    def __init__(self) -> None:
        self._runner: HostRunner | None = None
        self._episodes: set[asyncio.Task[Trajectory]] = set()
        self._records = asyncio.Queue[tuple[str, Any, asyncio.Future[Outcome]]]()
        self._sent: list[asyncio.Future[Outcome]] = []

    async def answer(self, call: bytes) -> bytes:
        """Call a method by its name and arguments; returns its ``outcome``. Both are pickled."""
        method, arguments = pickle.loads(call)
        return pickle.dumps(await outcome(getattr(self, method)(*arguments)))

    async def run(self, given: Given, request: EpisodeRequest, workspace: TaskWorkspace | None) -> Trajectory:
        """As a host's runner, which the first call makes of what is ``given``."""
        if self._runner is None:
            settings, options, stores = given
            self._runner = local_runner(settings, options, storage=cast(TrajectoryStorage, self) if stores else None)
        episode = asyncio.create_task(self._runner.run(request, workspace))
        self._episodes.add(episode)
        episode.add_done_callback(self._episodes.discard)
        return await episode

    async def records(self, stored: Sequence[Outcome]) -> list[tuple[str, Any]]:
        """The next records for the pool's storage, each with its method; ``stored``: what became of the last ones."""
        for done, result in zip(self._sent, stored, strict=True):
            if not done.done():
                done.set_result(result)
        waiting = [await self._records.get()]
        while not self._records.empty():
            waiting.append(self._records.get_nowait())
        self._sent = [done for *_, done in waiting]
        return [(method, record) for method, record, _ in waiting]

    async def close(self) -> None:
        """Cancel the episodes; returns when their sessions are closed."""
        episodes = tuple(self._episodes)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        remove_tree(temporary_folder("worker").parent)  # who is killed next runs no handler that would

    async def _store(self, method: str, record: Any) -> Any:
        """Hand a record to the pool's storage."""
        done = asyncio.get_running_loop().create_future()
        self._records.put_nowait((method, record, done))
        value, error = await done
        if error is not None:
            raise error
        return value


for _method in ("add", "begin", "grow", "end", "drop", "add_scores"):
    setattr(EpisodeWorker, _method, partialmethod(EpisodeWorker._store, _method))


async def _serve(calls: socket.socket) -> None:
    """Answer each call on the socket that comes with it, until the pool closes its end."""
    worker, answering = EpisodeWorker(), set[asyncio.Task[None]]()
    while sockets := (await asyncio.to_thread(socket.recv_fds, calls, 1, 1, socket.MSG_CMSG_CLOEXEC))[1]:
        task = asyncio.create_task(_answer(worker, socket.socket(fileno=sockets[0])))
        answering.add(task)
        task.add_done_callback(answering.discard)
    await asyncio.wait({asyncio.create_task(worker.close())}, timeout=_CLOSE_SECONDS)
    # Sessions may hang, and OpenHands' threads may still wait for a model call.
    os._exit(0)


async def _answer(worker: EpisodeWorker, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        with suppress(ConnectionError):  # the caller is gone
            answer = await worker.answer(await reader.read())
            writer.write(len(answer).to_bytes(_LENGTH_BYTES) + answer)
            await writer.drain()
    finally:
        writer.close()


def _main() -> None:
    """Serve a pool on stdin. The pool handles signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # what is ignored would be ignored in the agent's shells, too
    sys.setswitchinterval(_SWITCH_SECONDS)
    calls = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    asyncio.run(_serve(calls))


class Worker(ABC):
    """One worker, and the storage of its records. ``load`` is the number of its running episodes.

    It is sent the settings, with names of environment variables, but no secrets.
    """

    def __init__(self, settings: RLSettings, options: HostOptions, storage: TrajectoryStorage | None) -> None:
        self.load = 0
        self._given: Given = settings, options, storage is not None
        self._storage = storage
        self._cancelled: set[str] = set()
        self._storing = asyncio.create_task(self._store_records())

    @property
    def alive(self) -> bool:
        """Whether it can still be called."""
        return not self._storing.done()

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None, timeout: float | None) -> Trajectory:
        """Run an episode. Raises ``InfrastructureError`` when the worker dies or does not answer within ``timeout``
        seconds (it is killed then), and errors that must stop the run."""
        self.load += 1
        self._cancelled.discard(trajectory_id(request))
        try:
            async with asyncio.timeout(timeout):
                return await self._call("run", self._given, request, workspace)
        except TimeoutError as error:
            self.kill()
            await asyncio.wait({self._storing})
            raise InfrastructureError(f"a worker did not answer within {timeout:g} s and was ended") from error
        except asyncio.CancelledError:
            # The worker goes on while the caller takes the workspace away: what becomes of it is nobody's episode.
            self._cancelled.add(trajectory_id(request))
            raise
        finally:
            self.load -= 1

    async def close(self) -> None:
        """Let the worker close its sessions, then end it."""
        with suppress(TimeoutError, InfrastructureError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._call("close")
        self.kill()
        await asyncio.wait({self._storing})

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once."""

    @abstractmethod
    async def _answer(self, call: bytes) -> bytes:
        """As ``EpisodeWorker.answer``. Raises ``InfrastructureError`` when the worker is gone."""

    async def _call(self, method: str, *arguments: object) -> Any:
        value, error = pickle.loads(await self._answer(pickle.dumps((method, arguments))))
        if error is not None:
            raise error
        return value

    async def _store_records(self) -> None:
        """Store what the worker's episodes record, until it is gone."""
        stored = []
        with suppress(InfrastructureError):
            while True:
                records = await self._call("records", stored)
                stored = await asyncio.gather(*(outcome(self._store(*each)) for each in records))

    async def _store(self, method: str, record: Any) -> Any:
        if {getattr(record, "id", ""), getattr(record, "trajectory_id", "")} & self._cancelled:
            raise StorageError("the episode was cancelled")
        return await getattr(self._storage, method)(record)


class ProcessWorker(Worker):
    """A process of this machine. Each call has a socket of its own, which is sent to the process."""

    def __init__(self, *given: Any) -> None:
        self._calls, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the worker
        command = [sys.executable, "-P", "-m", "openhands_rl_plugin.hosts.pool"]
        try:
            with theirs:
                self.process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=self._output, stderr=self._output, start_new_session=True
                )
        except OSError as error:
            raise InfrastructureError(f"no worker process could be started: {error}") from error
        super().__init__(*given)

    def kill(self) -> None:
        """As in ``Worker``."""
        self._calls.close()
        self.process.kill()

    async def _answer(self, call: bytes) -> bytes:
        own, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=own)
        try:
            with theirs:
                socket.send_fds(self._calls, [b"c"], [theirs.fileno()])
            writer.write(call)
            writer.write_eof()
            return await reader.readexactly(int.from_bytes(await reader.readexactly(_LENGTH_BYTES)))
        except (OSError, asyncio.IncompleteReadError) as error:
            status = await asyncio.to_thread(self.process.wait)
            raise InfrastructureError(f"a worker process {self._end(status)}") from error
        finally:
            writer.close()

    def _end(self, status: int) -> str:
        """The signal, or the status and the last line that the process printed."""
        if status < 0:
            return f"was ended by signal {-status}"
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _LONGEST_LINE))
        lines = self._output.read().decode("utf-8", "replace").strip().splitlines()
        return f"ended with status {status}" + (f": {lines[-1][:300]!r}" if lines else "")


ADDRESS = "RAY_ADDRESS"
"""The environment variable that names the cluster; without it a local one is started."""

# Send no usage statistics. On a busy machine Ray's own processes need longer than its 30 seconds to register.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}


def _ray() -> Any:
    with from_extra("ray", "ray"):
        return importlib.import_module("ray")


@contextmanager
def _failing_as(what: str, then: str = "") -> Iterator[None]:
    """Raises Ray's errors as ``InfrastructureError``."""
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "ray"):
            yield
    except CaughtFailure as caught:
        raise InfrastructureError(f"{what}: {caught.failure.message}{then}") from caught


def join_cluster() -> None:
    """Use the cluster of ``RAY_ADDRESS``, else the one that this process is connected to, else start a local one.

    Raises ``MissingExtraError`` without Ray, ``InfrastructureError`` when the cluster does not answer.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray = _ray()
    if ray.is_initialized():
        return
    address = os.environ.get(ADDRESS)
    options: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
    ends = signal.getsignal(signal.SIGTERM)
    with _failing_as(f"{where} cannot be used", "; see `ray status`"):
        ray.init(log_to_driver=False, configure_logging=False, **options)
        if ends is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ends)  # Ray's own exits at once, and nothing is given back


def cluster_machines() -> frozenset[str]:
    """The addresses of the cluster's machines. Raises ``InfrastructureError``."""
    with _failing_as("the Ray cluster does not answer"):
        return frozenset(str(node["NodeManagerAddress"]) for node in _ray().nodes() if node["Alive"])


class RayWorker(Worker):
    """An ``EpisodeWorker`` as an actor, after ``join_cluster``."""

    def __init__(self, *given: Any) -> None:
        with _failing_as("no Ray actor could be started"):
            self._actor = _ray().remote(EpisodeWorker).options(num_cpus=1).remote()
        super().__init__(*given)

    def kill(self) -> None:
        """As in ``Worker``."""
        _ray().kill(self._actor)

    async def _answer(self, call: bytes) -> bytes:
        with _failing_as("a Ray actor ended"):
            return await self._actor.answer.remote(call)


class WorkerPoolRunner:
    """An ``EpisodeRunner`` over ``workers`` workers of a kind, by default processes of this machine.

    ``options.sessions`` limits the sessions of each worker (default: ``[rl] max_workers`` divided by ``workers``).
    When a worker dies, its episodes are returned as infrastructure failures, and the worker is replaced. With a
    ``storage`` this process stores the episodes of all workers while they run.
    """

    def __init__(
        self,
        settings: RLSettings,
        options: HostOptions | None = None,
        *,
        workers: int = 2,
        storage: TrajectoryStorage | None = None,
        kind: type[Worker] = ProcessWorker,
    ) -> None:
        options = options or HostOptions()
        sessions = options.sessions or max(1, settings.max_workers // workers)
        self._settings = settings
        self._options = options.model_copy(update={"sessions": sessions})
        self._storage = storage
        self._kind = kind
        self._free_sessions = asyncio.Semaphore(workers * sessions)
        self._count, self._workers = workers, list[Worker]()
        self._starting = asyncio.Lock()

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        async with self._free_sessions:
            started = time.time()
            try:
                worker = await self._least_busy()
                limit = (request.task.limits or self._settings.limits()).timeout
                return await worker.run(request, workspace, timeout=limit and limit + _TIME_BEYOND_LIMIT)
            except InfrastructureError as error:
                return await self._failed(request, error, started)

    async def close(self) -> None:
        """End the workers and the episodes that they run."""
        async with self._starting:
            workers, self._workers = self._workers, []
            await shielded(asyncio.gather(*(worker.close() for worker in workers)))

    async def _least_busy(self) -> Worker:
        async with self._starting:
            self._workers = [worker for worker in self._workers if worker.alive]
            while len(self._workers) < self._count:
                self._workers.append(self._kind(self._settings, self._options, self._storage))
            # If the worker has died since, it returns an error for the episode.
            return min(self._workers, key=lambda worker: worker.load)

    async def _failed(self, request: EpisodeRequest, error: InfrastructureError, started: float) -> Trajectory:
        """The episode of a dead worker, with its stored part, which may even be complete."""
        stored = await stored_episode(self._storage, trajectory_id(request)) if self._storage is not None else None
        if stored is not None and stored.stop is not StopReason.UNFINISHED:
            return stored
        trajectory = failed_episode(
            request,
            Failure(kind=FailureKind.INFRASTRUCTURE, message=describe(error), boundary="controller.worker"),
            strategy=self._options.strategy_spec(self._settings),
            base_model=self._settings.serving.model,
            started=started,
            unfinished=stored,
        )
        if self._storage is not None:
            await self._storage.add(trajectory)
        return trajectory


@asynccontextmanager
async def open_runner(
    settings: RLSettings,
    options: HostOptions | None = None,
    *,
    storage: TrajectoryStorage | None = None,
    workers: int = 0,
) -> AsyncIterator[HostRunner]:
    """A runner over ``workers`` workers, of the kind that ``[rl] executor`` names; 0 runs sessions in this process.

    It is closed at the end of the block. With a ``storage`` every episode is stored while it runs. Raises
    ``ConfigError`` for settings that the host cannot use, and as ``join_cluster``.
    """
    if not workers:
        runner = local_runner(settings, options, storage=storage)
    elif settings.executor == "ray":
        join_cluster()
        runner = WorkerPoolRunner(settings, options, workers=workers, storage=storage, kind=RayWorker)
    else:
        runner = WorkerPoolRunner(settings, options, workers=workers, storage=storage)
    try:
        yield runner
    finally:
        await runner.close()


if __name__ == "__main__":
    _main()

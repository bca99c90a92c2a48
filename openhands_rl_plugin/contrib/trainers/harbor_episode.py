"""``python -m openhands_rl_plugin.contrib.trainers.harbor_episode``: one episode in a container that Harbor owns.

Standard input is a ``ContainerEpisode`` as JSON; standard output a ``PlayedRollout`` without a reward, which is
Harbor's to give, or one with a ``failure``. Exit code 3: no valid episode.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import sys
import tempfile
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, closing, redirect_stdout, suppress
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from openhands_rl_plugin.apps.rollout.play import to_result, unusable, with_base_model
from openhands_rl_plugin.apps.rollout.rollout import PlayedRollout
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.rollout import PlayOptions
from openhands_rl_plugin.core.errors import ConfigError, EpisodeError, RLError, StorageError, describe
from openhands_rl_plugin.core.files import scratch_folder, write_file
from openhands_rl_plugin.core.redaction import redact_text, redact_trajectory, redacting_logger
from openhands_rl_plugin.core.types import EpisodeRequest, Frozen, Limits, Task, Trajectory
from openhands_rl_plugin.environments.container import LONGEST_LINE
from openhands_rl_plugin.environments.workspace.task_workspace import ContainerPlace, TaskWorkspace
from openhands_rl_plugin.evals.runs.plan import EvaluatedModel
from openhands_rl_plugin.evals.runs.suites import REPLIES
from openhands_rl_plugin.hosts.pool import open_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.trajectories.exchange.events import atif_rows
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

_LOG = redacting_logger(__name__)
INVALID = 3
ENVIRONMENT = "harbor"
_SCRATCH = "harbor"
# Of an episode in a repository, as ``EvaluationPlan`` has them.
_LIMITS = {"max_turns": 50, "max_response_length": 4096, "max_obs_length": 7500}


class ContainerEpisode(Frozen):
    """The task ``name`` with its ``instruction``, and how it is rolled out. ``store``: a folder that keeps the episode;
    ``documents``: one for it as ATIF."""

    name: str
    instruction: str
    place: ContainerPlace
    options: PlayOptions
    store: Path | None = None
    documents: Path | None = None


async def roll_out_in_container(asked: ContainerEpisode) -> PlayedRollout:
    """Roll out one episode. A failed one is returned with its ``failure``.

    Raises ``ConfigError`` where no episode can be rolled out, ``InfrastructureError`` where nothing answers at the
    endpoint, and ``StorageError``.
    """
    options, settings = asked.options, await asyncio.to_thread(_settings, asked.options)
    async with AsyncExitStack() as opened:
        folder = opened.enter_context(scratch_folder(_SCRATCH))
        storage = None
        if asked.store is not None:
            storage = await opened.enter_async_context(FileTrajectoryStorage(asked.store))
        runner = await opened.enter_async_context(open_runner(settings, _host_options(options), storage=storage))
        workspace = TaskWorkspace(root=folder, container=asked.place)
        trajectory = await runner.run(_request(asked, settings), workspace)
    if asked.documents is not None:
        _write(trajectory, asked.documents)
    outcome = trajectory.failure or unusable(trajectory, options.timeout)
    return to_result(trajectory, settings, outcome, token_ids=options.token_ids)


def _settings(options: PlayOptions) -> RLSettings:
    settings = options.settings()
    # The container is the sandbox.
    workspace = settings.workspace.model_copy(update={"isolation": "none"})
    host = "v1" if options.host == "auto" else settings.host
    if host == "v0":  # whether it is installed or not
        raise ConfigError("host: OpenHands V0 does not work in a container of Harbor; leave the option out")
    return with_base_model(settings.model_copy(update={"host": host, "workspace": workspace}), options)


def _host_options(options: PlayOptions) -> HostOptions:
    return HostOptions(
        environment_mode=False,
        sessions=1,
        command_timeout=options.command_timeout,
        native_tool_calling=options.native_tool_calling,
        token_ids=options.token_ids,
        stuck_detection=True,
        llm_retries=EvaluatedModel.model_fields["num_retries"].default,
        replies=REPLIES,
    )


def _request(asked: ContainerEpisode, settings: RLSettings) -> EpisodeRequest:
    """A new episode, also where its run attempts the task several times: each attempt has another container."""
    options = asked.options
    run_id = options.run_id or f"harbor-{uuid.uuid4().hex}"
    sample = options.sample if "sample" in options.model_fields_set else secrets.randbelow(2**31)
    numbered = (run_id, sample) if options.seed is None else (options.seed, options.sample)
    given = {name: getattr(settings, name) for name in Limits.model_fields if name in settings.model_fields_set}
    limits = Limits.model_validate({**_LIMITS, **given, "timeout": options.timeout})
    task = Task(id=asked.name, environment=ENVIRONMENT, instruction=asked.instruction, limits=limits)
    return EpisodeRequest(
        task=task,
        run_id=run_id,
        group_id=options.group_id or f"{run_id}/{asked.name}",
        sample=sample,
        seed=zlib.crc32(f"{numbered[0]}\0{asked.name}\0{numbered[1]}".encode()) % 2**31,
        served_model=None if options.model == settings.serving.model else options.model,
    )


def _write(trajectory: Trajectory, folder: Path) -> None:
    """``trajectory.json``, as Harbor's own agents name it; where the history was rewritten, ``trajectory.cont-1.json``
    goes on from it.

    The agent has the folder, too, as ``/logs/agent``: a link that it made is replaced, not followed, and what cannot be
    replaced costs the document alone.
    """
    try:
        documents = [*atif_rows(redact_trajectory(trajectory), ())]
    except LeftOutError:
        return
    for number, document in enumerate(documents):
        name = f"trajectory.cont-{number}.json" if number else "trajectory.json"
        if number + 1 < len(documents):
            document["continued_trajectory_ref"] = f"trajectory.cont-{number + 1}.json"
        try:
            write_file(folder / name, json.dumps(document, indent=1))
        except StorageError as error:
            _LOG.warning("%s", error)


_LONGEST = 75
"""Bytes of the folder for temporary files."""


class Ran(Protocol):
    """Harbor's ``ExecResult``."""

    stdout: str | None
    stderr: str | None
    return_code: int


class Runs(Protocol):
    """What is needed of Harbor's ``BaseEnvironment``."""

    def exec(self, command: str, *, timeout_sec: int | None = None) -> Awaitable[Ran]:
        """Run a command by the container's bash, as the trial's user."""
        ...


@asynccontextmanager
async def served(environment: Runs) -> AsyncIterator[Path]:
    """The socket at which commands are run in ``environment``, until the end of the block, which cancels the rest."""
    running: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_run_one(environment, reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    # A socket's path has at most 103 bytes (macOS).
    long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST
    with tempfile.TemporaryDirectory(prefix="rl-harbor-", dir="/tmp" if long else None) as folder:  # 0700, see above
        path = Path(folder) / "exec"
        server = await asyncio.start_unix_server(begin, str(path), limit=LONGEST_LINE)
        try:
            yield path
        finally:
            server.close()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _run_one(environment: Runs, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Runs the command of a request. What an environment raises is the reply: the episode fails of it."""
    with closing(writer), suppress(ConnectionError):
        asked = json.loads(await reader.readline())
        limit = asked["timeout"]
        call = environment.exec(asked["command"], timeout_sec=None if limit is None else math.ceil(limit))
        (ran,) = await asyncio.gather(call, return_exceptions=True)
        if isinstance(ran, BaseException):
            reply = {"error": describe(ran)}
        else:
            reply = {"return_code": ran.return_code, "stdout": ran.stdout or "", "stderr": ran.stderr or ""}
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()


def main() -> int:
    """Roll out the episode on standard input. Returns the exit code."""
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    try:
        with redirect_stdout(sys.stderr):
            asked = ContainerEpisode.model_validate_json(sys.stdin.read(), strict=False)
            rollout = asyncio.run(roll_out_in_container(asked))
    except (RLError, ValidationError) as error:
        kind = error.kind.value if isinstance(error, EpisodeError) else "configuration"
        message = redact_text(" ".join(str(error).split()))[:1000]
        failure = {"kind": kind, "message": message, "boundary": "rollout.start"}
        print(json.dumps({"schema_version": 1, "reward": None, "failure": failure, "segments": []}))
        return INVALID
    print(rollout.model_dump_json())
    return 0 if rollout.failure is None else INVALID


if __name__ == "__main__":
    sys.exit(main())

"""The folder of one run, in the format of OpenHands' evaluation: written, resumed, and read for reports.

Finished instances are lines of ``output.jsonl``. Each line is written at once and flushed to disk; a partial last line
is cut off. So a run that was killed loses no instance and repeats none.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from pydantic import Field, JsonValue, ValidationError

from openhands_rl_plugin.config.build import make_strategy
from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.files import PRIVATE, is_contained, write_file
from openhands_rl_plugin.core.machine import machine
from openhands_rl_plugin.core.records import LAST_ERROR
from openhands_rl_plugin.core.redaction import redact_json
from openhands_rl_plugin.core.types import Frozen, JsonObject, Trajectory
from openhands_rl_plugin.evals.runs.outcome import EvalTask, GradedEpisode, Outcome, outcome_of
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, RunSpec
from openhands_rl_plugin.evals.swe.run_evaluation import run_report
from openhands_rl_plugin.evals.swe.types import Flag, PatchVerdict, VerdictKind
from openhands_rl_plugin.hosts.shared.sessions import RL_AGENT
from openhands_rl_plugin.trajectories.exchange import events

OUTPUT = "output.jsonl"
METADATA = "metadata.json"
PREDICTIONS = "predictions.jsonl"
COMPLETIONS = "llm_completions"
TAKEN = "another process runs here; wait for it to end, or choose another folder (--out, --run-dir)"
_LOCK = ".lock"


class RunFolder:
    """The folder of one run, for one process at a time; close it. ``done``: the ids of its finished instances.

    ``retry_failed`` removes attempts that ended with an infrastructure failure, so that they run again. Raises
    ``ConfigError`` when another process writes to it, and when it holds results of other settings.
    """

    def __init__(self, plan: EvaluationPlan, run: RunSpec, *, retry_failed: bool = False) -> None:
        check_same_settings(plan, run)
        self.plan, self.run, self.directory = plan, run, plan.run_directory(run)
        self._metadata = metadata_of(plan, run, time.time())
        self._opened = ExitStack()
        self._opened.enter_context(held(self.directory))
        output = self.directory / OUTPUT
        _cut_half_line(output)
        if retry_failed and output.exists():
            kept = (row for row in read_rows(output) if outcome_of_row(row).kind is not VerdictKind.INFRASTRUCTURE)
            write_file(output, "".join(f"{json.dumps(row)}\n" for row in kept), PRIVATE)
        self.done = finished_instances(self.directory)
        self._one_at_a_time = threading.Lock()
        self._output: IO[bytes] | None = None

    def begin(self) -> None:
        """Open the files. ``metadata.json`` of the first start stays. Raises ``StorageError``."""
        if not (self.directory / METADATA).exists():
            write_file(self.directory / METADATA, json.dumps(self._metadata), PRIVATE)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._output = self._opened.enter_context(os.fdopen(os.open(self.directory / OUTPUT, flags, 0o600), "ab"))

    def write(self, graded: GradedEpisode, eval_task: EvalTask) -> Outcome:
        """Add a finished instance, from any thread, once it has begun. Raises ``StorageError``."""
        assert self._output is not None, "begin was called"
        outcome = outcome_of(graded, self.run.index)
        self._write_completions(graded.trajectory)
        line = json.dumps(_output_row(graded, eval_task, outcome, self._metadata)).encode() + b"\n"
        try:
            with self._one_at_a_time:
                self._output.write(line)
                self._output.flush()
                os.fsync(self._output.fileno())
        except OSError as error:
            raise StorageError(f"{self.directory / OUTPUT}: cannot be written: {error.strerror}") from error
        return outcome

    def _write_completions(self, trajectory: Trajectory) -> None:
        """Replace the instance's folder of ``llm_completions``: one ``<model>-<number>.json`` for every model call."""
        folder = self.directory / COMPLETIONS / trajectory.task.id
        if not is_contained(trajectory.task.id):
            raise StorageError(f"{self.directory}: the id {trajectory.task.id!r:.100} cannot name a folder")
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in events.completion_files(trajectory):
            write_file(folder / name, json.dumps(redact_json(content)), PRIVATE, parents=True)

    def write_report(self, instance_ids: Sequence[str]) -> None:
        """``predictions.jsonl`` and ``<model>.<run>.json`` of the finished instances. Raises ``StorageError``."""
        predictions: list[str] = []
        outcomes: list[Outcome] = []
        for row in read_rows(self.directory / OUTPUT):
            outcomes.append(outcome_of_row(row))
            if isinstance(patch := json_object(row.get("test_result")).get("git_patch"), str):
                named = {"instance_id": row["instance_id"], "model_name_or_path": self.plan.model}
                predictions.append(json.dumps({**named, "model_patch": patch}) + "\n")
        write_file(self.directory / PREDICTIONS, "".join(predictions), PRIVATE)
        verdicts = {each.instance_id: _verdict(each) for each in outcomes if each.kind is not VerdictKind.UNGRADED}
        report = run_report(verdicts, list(instance_ids), [outcome.instance_id for outcome in outcomes])
        name = f"{self.plan.model.replace('/', '__')}.{self.directory.name}.json"
        write_file(self.directory / name, json.dumps(report, indent=4), PRIVATE)

    def close(self) -> None:
        """Close the files and release the lock."""
        with self._one_at_a_time:
            self._opened.close()


@contextmanager
def held(directory: Path, taken: str = TAKEN) -> Iterator[None]:
    """Make a folder and keep other processes from it until the block ends. Raises ``ConfigError``, with the text
    ``taken`` where another process holds it."""
    with ExitStack() as opened:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            fcntl.flock(opened.enter_context(open(directory / _LOCK, "ab")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{directory}: {taken}") from error
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be written to: {error.strerror}") from error
        yield


def read_rows(file: Path) -> Iterator[JsonObject]:
    """The complete lines of ``output.jsonl``; none without the file. Raises ``ConfigError``."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n") and line.strip():
                    yield _row(file, number, line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def finished_instances(directory: Path) -> set[str]:
    """The ids of the instances that a run has finished. Raises ``ConfigError``."""
    return {str(row["instance_id"]) for row in read_rows(directory / OUTPUT)}


def _cut_half_line(output: Path) -> None:
    if output.exists():
        with output.open("r+b") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def _row(file: Path, number: int, line: bytes) -> JsonObject:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{file}: line {number} is not JSON; remove it to run its instance again") from error
    if not isinstance(row, dict) or not isinstance(row.get("instance_id"), str):
        raise ConfigError(f"{file}: line {number} has no instance_id; it is not a line of OpenHands' evaluation")
    return row


_RUN = re.compile(r"(?P<name>.+)-run_(?P<index>\d+)\Z")


class RunRecord(Frozen):
    """One run. ``name`` is that of its folder without the number; ``metadata`` is OpenHands'."""

    name: str
    index: int
    directory: Path
    metadata: JsonObject = Field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()


def read_runs(paths: tuple[Path, ...]) -> tuple[RunRecord, ...]:
    """The runs at ``paths``: folders of runs, ``output.jsonl`` files, or folders that hold runs at any depth.

    Raises ``ConfigError`` for a path without runs and for lines that are no output of an evaluation.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
        found = [path] if path.is_file() else sorted(path.rglob(OUTPUT))
        if not found:
            raise ConfigError(f"{path}: there is no {OUTPUT} in it, so no run of an evaluation")
        files += [file for file in found if file not in files]
    return tuple(_run(file, at) for at, file in enumerate(files))


def read_metadata(file: Path) -> JsonObject:
    """``metadata.json``; empty where there is none. Raises ``ConfigError``."""
    try:
        return json_object(json.loads(file.read_bytes())) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error


def outcome_of_row(row: JsonObject) -> Outcome:
    """The attempt in a line of ``output.jsonl``. Raises ``ConfigError``, also for a line of OpenHands' own harness."""
    try:
        return Outcome.model_validate(json_object(row.get("test_result")).get("outcome"))
    except ValidationError as error:
        raise ConfigError(
            f"{row['instance_id']}: no test_result.outcome as `openhands-rl evaluate` writes it; "
            "`openhands-rl import` reads files of OpenHands' own harness"
        ) from error


def _run(file: Path, at: int) -> RunRecord:
    directory = file.resolve().parent
    match = _RUN.match(directory.name)
    index = int(match["index"]) if match else at
    return RunRecord(
        name=match["name"] if match else directory.name,
        index=index,
        directory=directory,
        metadata=read_metadata(directory / METADATA),
        outcomes=tuple(map(outcome_of_row, read_rows(file))),
    )


def json_object(value: JsonValue) -> JsonObject:
    """``value`` where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def metadata_of(plan: EvaluationPlan, run: RunSpec, started: float) -> JsonObject:
    """``metadata.json``, with OpenHands' keys; other settings are in ``details``."""
    settings, own = plan.settings, plan.agent == RL_AGENT
    search: object = getattr(getattr(make_strategy(settings), "options", None), "temperature", None) if own else None
    access = settings.workspace.model_dump(
        mode="json", include={"isolation", "prompt", "network", "visible", "writable"}
    )
    details: JsonObject = {
        "host": settings.host,
        "run": run.index,
        "temperature": search if isinstance(search, float) else run.temperature,
        "seed": settings.sampling.seed,
        "strategy": settings.rollout_strategy if own else None,
        "strategy_options": settings.strategy if own else {},
        "timeout": plan.timeout,
        "test_timeout": plan.test_timeout,
        "workers": settings.max_workers,
        "machine": machine(),
        "limits": plan.limits().model_dump(exclude={"timeout"}),
        "success": str(plan.success),
        "environment": plan.environment,
        "workspace": access if plan.suite.software else None,
    }
    llm: JsonObject = {
        "model": f"openai/{plan.model}",
        "base_url": settings.serving.base_url,
        "api_key": "******" if settings.serving.api_key_env else None,
        "temperature": run.temperature,
        "top_p": settings.sampling.top_p,
        "max_output_tokens": settings.max_response_length,
        "native_tool_calling": plan.native_tool_calling,
    }
    return events.v0_metadata(
        agent_class=plan.agent,
        llm_config=llm,
        max_iterations=settings.max_turns,
        eval_output_dir=str(plan.run_directory(run)),
        started=started,
        dataset=plan.suite.dataset,
        data_split=plan.suite.split,
        details=redact_json(details),
    )


def _output_row(graded: GradedEpisode, eval_task: EvalTask, outcome: Outcome, metadata: JsonObject) -> JsonObject:
    """A line of ``output.jsonl``: the fields of V0's ``EvalOutput`` without absent fields and secrets.

    ``test_result.outcome`` has what reports need in addition.
    """
    trajectory, task = graded.trajectory, eval_task.task
    evidence, failure = trajectory.evidence, trajectory.failure
    added = {"outcome": outcome.model_dump(mode="json"), "git_patch": evidence.get("git_patch")}
    result = {**json_object(evidence.get("test_result")), **added}
    known: JsonObject = {name: value for name, value in result.items() if value is not None}
    row = events.v0_row(trajectory, metadata, known, cost=outcome.cost)
    row |= {"instance_id": task.id, "instruction": task.instruction, "instance": eval_task.row}
    error = failure.message if failure is not None else evidence.get(LAST_ERROR)
    return redact_json({**row, "error": error} if isinstance(error, str) else row)


def _verdict(outcome: Outcome) -> PatchVerdict:
    """An attempt as a verdict for the report. A failed episode is an error, as in the official harness."""
    kind = VerdictKind.INFRASTRUCTURE if outcome.kind is VerdictKind.FAILED else outcome.kind
    flags = tuple(Flag(rule=rule, where="") for rule in outcome.flags)
    return PatchVerdict(instance_id=outcome.instance_id, kind=kind, reason=outcome.reason, flags=flags)


_DECIDING = {
    "llm_config": ("model", "top_p", "max_output_tokens", "native_tool_calling"),
    "details": (
        *("host", "temperature", "seed", "timeout", "test_timeout"),
        *("strategy", "strategy_options", "limits", "success", "environment", "workspace"),
    ),
}
"""The recorded settings that affect results and are not in the folder's name."""


def check_same_settings(plan: EvaluationPlan, run: RunSpec) -> None:
    """Raise ``ConfigError`` when the run's folder holds results of other settings.

    Settings that its metadata lacks are not compared.
    """
    directory = plan.run_directory(run)
    was, now = redact_json(read_metadata(directory / METADATA)), redact_json(metadata_of(plan, run, 0.0))
    other: list[str] = []
    for part, names in _DECIDING.items():
        had, wanted = json_object(was.get(part)), json_object(now.get(part))
        changed = [name for name in names if had.get(name) is not None and had[name] != wanted.get(name)]
        other += [f"{name}: {json.dumps(had[name]):.120}, now {json.dumps(wanted.get(name)):.120}" for name in changed]
    if other:
        raise ConfigError(
            f"{directory} holds a run with other settings ({'; '.join(other)}): give the same ones to resume it, or "
            "choose another --note or another --out"
        )

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from pydantic import Field, JsonValue, ValidationError

from openhands_rl_plugin.config.build import make_strategy
from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.files import PRIVATE, is_contained, write_file
from openhands_rl_plugin.core.judgements import scores_of
from openhands_rl_plugin.core.machine import machine
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import LAST_ERROR
from openhands_rl_plugin.core.redaction import redact_json
from openhands_rl_plugin.core.types import Frozen, JsonObject, Trajectory
from openhands_rl_plugin.evals.runs.outcome import EvalTask, GradedEpisode, Outcome, is_stuck
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, RunSpec
from openhands_rl_plugin.evals.swe.logs import run_report
from openhands_rl_plugin.evals.swe.types import Flag, PatchVerdict, VerdictKind
from openhands_rl_plugin.hosts.shared.sessions import RL_AGENT
from openhands_rl_plugin.trajectories.exchange import events

OUTPUT = "output.jsonl"
METADATA = "metadata.json"
PREDICTIONS = "predictions.jsonl"
COMPLETIONS = "llm_completions"
_LOCK = ".lock"


class RunFiles:
    """The files of one run, for one process at a time. Raises ``ConfigError`` when another one writes to them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be written to: {error.strerror}") from error
        self._lock = lock_folder(directory, "another process evaluates into this folder; wait for it")
        _cut_half_line(directory / OUTPUT)
        self.done = finished_instances(directory)
        self._output: IO[bytes] | None = None
        self._one_at_a_time = threading.Lock()
        self._closed = False

    def write_metadata(self, metadata: JsonObject) -> None:
        """Write ``metadata.json`` unless it is there: that of the first start stays."""
        if not (self.directory / METADATA).exists():
            write_file(self.directory / METADATA, json.dumps(metadata), PRIVATE)

    def append(self, row: JsonObject) -> None:
        """Add a finished instance, from any thread. Raises ``StorageError``, also for a duplicate."""
        identity = row["instance_id"]
        assert isinstance(identity, str)
        line = json.dumps(row).encode() + b"\n"
        with self._one_at_a_time:
            if self._closed or identity in self.done:
                raise StorageError(f"{self.directory}: {identity} is finished already, or the run is closed")
            try:
                if self._output is None:
                    self._output = _private(self.directory / OUTPUT)
                self._output.write(line)
                self._output.flush()
                os.fsync(self._output.fileno())
            except OSError as error:
                raise StorageError(f"{self.directory / OUTPUT}: cannot be written: {error.strerror}") from error
            self.done.add(identity)

    def write_completions(self, trajectory: Trajectory) -> None:
        """Replace the instance's folder of ``llm_completions``: one ``<model>-<number>.json`` for every model call."""
        folder = self.directory / COMPLETIONS / trajectory.task.id
        if not is_contained(trajectory.task.id):
            raise StorageError(f"{self.directory}: the id {trajectory.task.id!r:.100} cannot name a folder")
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in events.completion_files(trajectory):
            write_file(folder / name, json.dumps(redact_json(content)), PRIVATE, parents=True)

    def forget(self, unwanted: Callable[[JsonObject], bool]) -> int:
        """Remove lines of ``output.jsonl``, so that their instances run again. Returns their number."""
        kept = [row for row in read_rows(self.directory / OUTPUT) if not unwanted(row)]
        gone = len(self.done) - len(kept)
        if gone:
            write_file(self.directory / OUTPUT, "".join(f"{json.dumps(row)}\n" for row in kept), PRIVATE)
            self.done = {str(row["instance_id"]) for row in kept}
        return gone

    def close(self) -> None:
        """Close the files and release the lock."""
        with self._one_at_a_time:
            self._closed = True
            if self._output is not None:
                self._output.close()
        os.close(self._lock)


def lock_folder(directory: Path, taken: str) -> int:
    """Lock an existing folder until the returned descriptor is closed or the process ends.

    Raises ``ConfigError``, with the text ``taken`` when another process holds the lock.
    """
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written to: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        why = taken if isinstance(error, BlockingIOError) else f"cannot be locked: {error.strerror}"
        raise ConfigError(f"{directory}: {why}") from error
    return lock


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


def _private(file: Path) -> IO[bytes]:
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")


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
        read = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    return read if isinstance(read, dict) else {}


def outcome_of_row(row: JsonObject, run: int = 0) -> Outcome:
    """The attempt in a line of ``output.jsonl``. Fields that OpenHands' harness does not write keep their defaults.

    Raises ``ConfigError``.
    """
    result = json_object(row.get("test_result"))
    own = result.get("outcome")
    try:
        return Outcome.model_validate(own) if isinstance(own, dict) else _foreign(row, result, run)
    except ValidationError as error:
        raise ConfigError(f"{row['instance_id']}: test_result.outcome is damaged; remove the line") from error


def _run(file: Path, at: int) -> RunRecord:
    directory = file.resolve().parent
    match = _RUN.match(directory.name)
    index = int(match["index"]) if match else at
    return RunRecord(
        name=match["name"] if match else directory.name,
        index=index,
        directory=directory,
        metadata=read_metadata(directory / METADATA),
        outcomes=tuple(outcome_of_row(row, index) for row in read_rows(file)),
    )


def _foreign(row: JsonObject, result: JsonObject, run: int) -> Outcome:
    patch = result.get("git_patch") or result.get("model_patch")
    error = row.get("error")
    history = row.get("history")
    events = [json_object(event) for event in history] if isinstance(history, list) else []
    actions = [event.get("action") for event in events if event.get("source") == "agent" and "action" in event]
    metrics = json_object(row.get("metrics"))
    usage = json_object(metrics.get("accumulated_token_usage"))
    timed_out = isinstance(error, str) and error.startswith("Timeout after")
    cost = metrics.get("accumulated_cost")
    return Outcome(
        instance_id=str(row["instance_id"]),
        run=run,
        kind=_foreign_kind(row, result, bool(str(patch or "").strip()), timed_out),
        reason=error if isinstance(error, str) else "",
        stuck=is_stuck(error),
        timed_out=timed_out,
        empty_patch=not str(patch or "").strip(),
        turns=sum(action != "system" for action in actions),
        prompt_tokens=_whole(usage.get("prompt_tokens")),
        cached_tokens=_whole(usage.get("cache_read_tokens")),
        completion_tokens=_whole(usage.get("completion_tokens")),
        cost=float(cost) if isinstance(cost, int | float) else None,
    )


def _foreign_kind(row: JsonObject, result: JsonObject, patched: bool, timed_out: bool) -> VerdictKind:
    report = json_object(result.get("report") or row.get("report"))
    flags = {
        "error_eval": VerdictKind.INFRASTRUCTURE,
        "resolved": VerdictKind.RESOLVED,
        "empty_generation": VerdictKind.EMPTY_PATCH,
        "failed_apply_patch": VerdictKind.UNAPPLIED,
        "test_timeout": VerdictKind.TIMED_OUT,
    }
    for name, kind in flags.items():
        if report.get(name) is True:
            return kind
    if isinstance(report.get("resolved"), bool):
        return VerdictKind.UNRESOLVED
    if not patched and (row.get("error") is None or timed_out):
        return VerdictKind.EMPTY_PATCH
    return VerdictKind.UNGRADED


def json_object(value: JsonValue) -> JsonObject:
    """``value`` where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _whole(value: JsonValue) -> int:
    return value if isinstance(value, int) else 0


VERIFIER = "verifier"
"""The prefix of the ``reward_version`` of verifiers' scores."""


async def with_verifier(
    runs: Sequence[RunRecord], storage: TrajectoryStorage, version: str = VERIFIER
) -> tuple[RunRecord, ...]:
    """The runs with every attempt's newest score whose version begins with ``version``. Raises ``StorageError``."""
    ids = sorted({outcome.trajectory_id for run in runs for outcome in run.outcomes if outcome.trajectory_id})
    known = {
        name: score.reward
        for name, scores in (await scores_of(storage, ids)).items()
        for score in scores
        if score.reward_version.startswith(version) and score.reward is not None
    }

    def judged(outcome: Outcome) -> Outcome:
        return outcome.model_copy(update={"verifier": known.get(outcome.trajectory_id, outcome.verifier)})

    return tuple(run.model_copy(update={"outcomes": tuple(map(judged, run.outcomes))}) for run in runs)


def metadata_of(plan: EvaluationPlan, run: RunSpec, started: float) -> JsonObject:
    """``metadata.json``, with OpenHands' keys; other settings are in ``details``."""
    settings, own = plan.settings, plan.agent == RL_AGENT
    search: object = getattr(getattr(make_strategy(settings), "options", None), "temperature", None) if own else None
    access = settings.workspace.model_dump(
        mode="json", include={"isolation", "prompt", "network", "visible", "writable"}
    )
    details: JsonObject = {
        "suite": plan.suite.name,
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
        "command": plan.command,
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
        "timeout": settings.serving.request_timeout,
        "num_retries": plan.llm_retries,
        "native_tool_calling": plan.native_tool_calling,
        "token_ids": plan.token_ids,
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


def output_row(graded: GradedEpisode, eval_task: EvalTask, outcome: Outcome, metadata: JsonObject) -> JsonObject:
    """A line of ``output.jsonl``: the fields of V0's ``EvalOutput`` without absent fields and secrets.

    ``test_result.outcome`` has what reports need in addition.
    """
    trajectory, task = graded.trajectory, eval_task.task
    evidence, failure = trajectory.evidence, trajectory.failure
    held, flagged = evidence.get("test_result"), [flag.model_dump(mode="json") for flag in graded.commands]
    added = {"outcome": outcome.model_dump(mode="json"), "git_patch": evidence.get("git_patch")}
    result = {**(held if isinstance(held, dict) else {}), **added, "commands_flagged": flagged or None}
    known: JsonObject = {name: value for name, value in result.items() if value is not None}
    row = events.v0_row(trajectory, metadata, known, cost=outcome.cost)
    row |= {"instance_id": task.id, "instruction": task.instruction, "instance": eval_task.row}
    error = failure.message if failure is not None else evidence.get(LAST_ERROR)
    return redact_json({**row, "error": error} if isinstance(error, str) else row)


def write_run_report(directory: Path, model: str, instance_ids: Sequence[str]) -> None:
    """Write ``predictions.jsonl`` and ``<model>.<run>.json`` of the finished instances. Raises ``StorageError``."""
    predictions: list[str] = []
    outcomes: list[Outcome] = []
    for row in read_rows(directory / OUTPUT):
        outcomes.append(outcome_of_row(row))
        if isinstance(patch := json_object(row.get("test_result")).get("git_patch"), str):
            prediction = {"instance_id": row["instance_id"], "model_name_or_path": model, "model_patch": patch}
            predictions.append(json.dumps(prediction) + "\n")
    write_file(directory / PREDICTIONS, "".join(predictions), PRIVATE)
    verdicts = {each.instance_id: _verdict(each) for each in outcomes if each.kind is not VerdictKind.UNGRADED}
    report = run_report(verdicts, list(instance_ids), [outcome.instance_id for outcome in outcomes])
    name = f"{model.replace('/', '__')}.{directory.name}.json"
    write_file(directory / name, json.dumps(report, indent=4), PRIVATE)


def _verdict(outcome: Outcome) -> PatchVerdict:
    """An attempt as a verdict for the report. A failed episode is an error, as in the official harness."""
    kind = VerdictKind.INFRASTRUCTURE if outcome.kind is VerdictKind.FAILED else outcome.kind
    flags = tuple(Flag(rule=rule, where="") for rule in outcome.flags)
    return PatchVerdict(instance_id=outcome.instance_id, kind=kind, reason=outcome.reason, flags=flags)


_MODEL = ("model", "top_p", "max_output_tokens", "native_tool_calling")
_DETAILS = (
    *("host", "temperature", "seed", "timeout", "test_timeout"),
    *("strategy", "strategy_options", "limits", "success", "environment", "workspace"),
)


def check_same_settings(plan: EvaluationPlan, run: RunSpec) -> None:
    """Raise ``ConfigError`` when the run's folder holds results of other settings.

    Settings that its metadata lacks are not compared.
    """
    directory = plan.run_directory(run)
    was, now = _deciding(read_metadata(directory / METADATA)), _deciding(metadata_of(plan, run, 0.0))
    held, wanted = dict(_flat(was)), dict(_flat({name: now.get(name) for name in was}))
    other = [name for name in {**held, **wanted} if held.get(name) != wanted.get(name)]
    if other:
        shown = (f"{name}: {json.dumps(held.get(name)):.60}, now {json.dumps(wanted.get(name)):.60}" for name in other)
        raise ConfigError(
            f"{directory} holds a run with other settings ({'; '.join(shown)}): give the same ones to resume it, or "
            "choose another --note or another --out"
        )


def _deciding(metadata: JsonObject) -> JsonObject:
    """The recorded settings that affect results and are not in the folder's name."""
    noted = redact_json(metadata)
    parts = ((_MODEL, json_object(noted.get("llm_config"))), (_DETAILS, json_object(noted.get("details"))))
    return {name: part[name] for names, part in parts for name in names if part.get(name) is not None}


def _flat(value: JsonValue, name: str = "") -> Iterator[tuple[str, JsonValue]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else key)
    elif value is not None:
        yield name, value

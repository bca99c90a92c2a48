"""An attempt with its outcome, the row of every report; the folder of a run, in the format of OpenHands' evaluation:
written, resumed, and read; the metrics of runs (pass@1, pass@k, tokens, time), comparisons, their tables.

Finished instances are lines of ``output.jsonl``. Each line is written at once and flushed to disk; a partial last line
is cut off. So a run that was killed loses no instance and repeats none.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
import re
import shutil
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from operator import mul
from pathlib import Path
from typing import IO, NamedTuple

from pydantic import Field, ValidationError

from openhands_rl_plugin.config.build import make_strategy
from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.files import PRIVATE, is_contained, write_file
from openhands_rl_plugin.core.machine import machine
from openhands_rl_plugin.core.messages import json_object
from openhands_rl_plugin.core.records import LAST_ERROR
from openhands_rl_plugin.core.redaction import redact_json
from openhands_rl_plugin.core.statistics import Estimate, over_tasks, paired_difference, pass_at_k, sign_greater
from openhands_rl_plugin.core.types import FailureKind, Frozen, JsonObject, Score, Trajectory
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, RunSpec
from openhands_rl_plugin.evals.runs.suites import EvalTask
from openhands_rl_plugin.evals.swe.grading import run_report
from openhands_rl_plugin.evals.swe.instances import UNKNOWN, PatchVerdict, VerdictKind
from openhands_rl_plugin.hosts.shared.sessions import RL_AGENT
from openhands_rl_plugin.trajectories.exchange import events


class GradedEpisode(NamedTuple):
    """An episode with its score. ``trajectory.evidence`` has ``test_result``; ``verdict`` is for SWE-bench instances.

    Without a score the outcome of the attempt is unknown.
    """

    trajectory: Trajectory
    score: Score | None = None
    verdict: PatchVerdict | None = None


class Outcome(Frozen, extra="ignore"):
    """One attempt, times in seconds.

    ``turns`` counts executed completions. ``flags``: guard rules that matched the patch or its run. Other
    fields, as earlier versions wrote, are not read.
    """

    instance_id: str
    run: int = 0
    kind: VerdictKind
    reward: float | None = None
    reason: str = ""
    stop: str = ""
    flags: tuple[str, ...] = ()
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    grading_seconds: float = 0.0
    trajectory_id: str = ""

    @property
    def resolved(self) -> bool | None:
        """Whether the instance was resolved; ``None`` when that is unknown."""
        return None if self.kind in UNKNOWN else self.kind is VerdictKind.RESOLVED


def outcome_of(graded: GradedEpisode, run: int) -> Outcome:
    """The outcome of a graded attempt."""
    trajectory, verdict = graded.trajectory, graded.verdict
    usage, times = trajectory.usage, trajectory.times
    return Outcome(
        instance_id=trajectory.task.id,
        run=run,
        kind=_kind(graded),
        reward=graded.score.reward if graded.score else None,
        reason=trajectory.failure.message if trajectory.failure else verdict.reason if verdict else "",
        stop=trajectory.stop.value,
        flags=verdict.flagged if verdict else (),
        turns=sum(1 for _ in trajectory.sampled()),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        seconds=max(0.0, times.finished - times.started),
        grading_seconds=verdict.seconds if verdict else 0.0,
        trajectory_id=trajectory.id,
    )


def count_kinds(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """The number of outcomes of every kind, zeros included."""
    found = [outcome.kind for outcome in outcomes]
    return {kind.value: found.count(kind) for kind in VerdictKind}


def _kind(graded: GradedEpisode) -> VerdictKind:
    if (failure := graded.trajectory.failure) is not None:
        return VerdictKind.INFRASTRUCTURE if failure.kind is FailureKind.INFRASTRUCTURE else VerdictKind.FAILED
    if graded.verdict is not None:
        return graded.verdict.kind
    if graded.score is None or graded.score.reward is None:
        return VerdictKind.UNGRADED
    return VerdictKind.RESOLVED if graded.score.detail.get("resolved") is True else VerdictKind.UNRESOLVED


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
        if output.exists():  # without a half line
            with output.open("r+b") as file:
                file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
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
        if not is_contained(trajectory.task.id):  # ids of other packages' suites
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
        kinds = {each.instance_id: each.kind for each in outcomes if each.kind is not VerdictKind.UNGRADED}
        report = run_report(kinds, list(instance_ids), [outcome.instance_id for outcome in outcomes])
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
    row = events.v0_row(trajectory, metadata, known)
    row |= {"instance_id": task.id, "instruction": task.instruction, "instance": eval_task.row}
    error = failure.message if failure is not None else evidence.get(LAST_ERROR)
    return redact_json({**row, "error": error} if isinstance(error, str) else row)


_WITHOUT_EFFECT = ("run", "workers", "machine", "base_url", "api_key")
"""The recorded settings that do not affect results."""


def check_same_settings(plan: EvaluationPlan, run: RunSpec) -> None:
    """Raise ``ConfigError`` when the run's folder holds results of other settings.

    Settings that its metadata lacks are not compared.
    """
    directory = plan.run_directory(run)
    was, now = redact_json(read_metadata(directory / METADATA)), redact_json(metadata_of(plan, run, 0.0))
    had, wanted = ({**json_object(each.get("llm_config")), **json_object(each.get("details"))} for each in (was, now))
    other = [
        f"{name}: {json.dumps(value):.120}, now {json.dumps(wanted.get(name)):.120}"
        for name, value in had.items()
        if name not in _WITHOUT_EFFECT and value not in (None, wanted.get(name))
    ]
    if other:
        raise ConfigError(
            f"{directory} holds a run with other settings ({'; '.join(other)}): give the same ones to resume it, or "
            "choose another --note or another --out"
        )


def labels_of(runs: Sequence[RunRecord]) -> list[str]:
    """A label for one run of each group, all different: agent and strategy, else its name, else its folder."""
    ways = [[_agent(run) for run in runs], [run.name for run in runs]]
    return next(
        (labels for labels in ways if len({*labels}) == len(runs) > 1),
        ways[1] if len(runs) == 1 else [str(run.directory) for run in runs],
    )


def _agent(run: RunRecord) -> str:
    """``RLAgent, BestOfN {"n": 4}``."""
    details = json_object(run.metadata.get("details"))
    options = details.get("strategy_options")
    strategy = " ".join(filter(None, (str(details.get("strategy") or ""), json.dumps(options) if options else "")))
    return ", ".join(filter(None, (str(run.metadata.get("agent_class") or run.directory.parent.name), strategy)))


_MOST_K = 64


class AtK(Frozen):
    """A metric of ``k`` attempts, over the tasks with at least ``k`` attempts."""

    k: int
    estimate: Estimate


class EvaluationFigures(Frozen):
    """The metrics of a group of runs with the same data, agent, model and note; ``label``: what others differ in.

    ``pass_at_1`` is the mean over tasks of the share of attempts that solved them. ``kinds`` counts all attempts; those
    with unknown outcomes are excluded from success rates. ``flagged`` counts attempts whose patch or run a guard
    flagged. ``runs``: each one's index, and its attempts that are known and that resolved their task. Tokens are
    sums, ``turns`` and ``reward`` means, ``seconds`` the median of episodes.
    """

    name: str
    label: str
    agent: str
    model: str
    dataset: str
    split: str
    tasks: int
    attempts: int
    kinds: dict[str, int]
    runs: tuple[dict[str, int], ...]
    pass_at_1: Estimate
    pass_at_k: tuple[AtK, ...]
    reward: float | None
    flagged: int
    turns: float | None
    prompt_tokens: int
    completion_tokens: int
    seconds: float


def figures_of(runs: Sequence[RunRecord]) -> tuple[EvaluationFigures, ...]:
    """Figures of every group of runs, in order of first appearance."""
    groups = grouped(runs)
    labels = labels_of([members[0] for members in groups])
    return tuple(_group(members, label) for members, label in zip(groups, labels, strict=True))


def grouped(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """The runs of each group: their folders differ in the number only."""
    groups: dict[str, list[RunRecord]] = defaultdict(list)
    for run in runs:
        groups[str(run.directory.with_name(run.name))].append(run)
    return [*groups.values()]


def _attempts(outcomes: Iterable[Outcome]) -> dict[str, list[bool]]:
    """Task -> whether each attempt with a known outcome solved it."""
    tasks: dict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.resolved is not None:
            tasks[outcome.instance_id].append(outcome.resolved)
    return tasks


def _group(runs: Sequence[RunRecord], label: str) -> EvaluationFigures:
    outcomes, metadata = [outcome for run in runs for outcome in run.outcomes], runs[0].metadata
    tasks = _attempts(outcomes)
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    return EvaluationFigures(
        name=runs[0].name,
        label=label,
        agent=str(metadata.get("agent_class") or ""),
        model=str(json_object(metadata.get("llm_config")).get("model") or ""),
        dataset=str(metadata.get("dataset") or ""),
        split=str(metadata.get("data_split") or ""),
        tasks=len({outcome.instance_id for outcome in outcomes}),
        attempts=len(outcomes),
        kinds=count_kinds(outcomes),
        runs=tuple(_counts(run) for run in runs),
        pass_at_1=over_tasks([sum(own) / len(own) for own in tasks.values()]),
        pass_at_k=_pass_at_k([*tasks.values()]),
        reward=statistics.fmean(rewards) if rewards else None,
        flagged=sum(bool(outcome.flags) for outcome in outcomes),
        turns=statistics.fmean(outcome.turns for outcome in outcomes) if outcomes else None,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
        completion_tokens=sum(outcome.completion_tokens for outcome in outcomes),
        seconds=statistics.median([outcome.seconds for outcome in outcomes if outcome.seconds] or [0.0]),
    )


def _counts(run: RunRecord) -> dict[str, int]:
    known = [each.resolved for each in run.outcomes if each.resolved is not None]
    return {"index": run.index, "resolved": sum(known), "known": len(known)}


def _pass_at_k(tasks: Sequence[Sequence[bool]]) -> tuple[AtK, ...]:
    """pass@k for k up to the median number of attempts: a larger k would leave out over half of the tasks."""
    most = min(_MOST_K, statistics.median_low(map(len, tasks))) if tasks else 0
    return tuple(
        AtK(k=k, estimate=over_tasks([pass_at_k(len(own), sum(own), k) for own in tasks if len(own) >= k]))
        for k in range(1, most + 1)
    )


_ROUNDS = 10_000
_EXACT_UP_TO = 14
_ROUNDING = 1e-12


class Comparison(Frozen):
    """``second`` against ``first``, named by what differs, over the ``tasks`` with known outcomes in both.

    ``difference`` is that of the mean success rates, its interval a bootstrap over tasks. ``p_value`` is two-sided, by
    ``test``: McNemar's exact one where every task has one attempt on either side, else a permutation of the signs of
    the tasks' differences. ``gained`` and ``lost`` are the tasks that the second solves more often, or less.
    """

    first: str
    second: str
    tasks: int
    only_first: int
    only_second: int
    rate_first: float
    rate_second: float
    difference: Estimate
    p_value: float
    test: str
    gained: tuple[str, ...]
    lost: tuple[str, ...]


def compare(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> Comparison:
    """The comparison of two groups of runs. Raises ``ConfigError`` when they share no task."""
    sides = [_attempts(outcome for run in runs for outcome in run.outcomes) for runs in (first, second)]
    shared = sorted(sides[0].keys() & sides[1].keys())
    if not shared:
        raise ConfigError("the two have no graded task in common: compare runs over the same data set")
    before, after = ([statistics.fmean(own[name]) for name in shared] for own in sides)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    single = all(rate in (0.0, 1.0) for rate in (*before, *after)) and len(first) == len(second) == 1
    gained = tuple(name for name, change in zip(shared, differences, strict=True) if change > _ROUNDING)
    lost = tuple(name for name, change in zip(shared, differences, strict=True) if change < -_ROUNDING)
    named = labels_of([first[0], second[0]])
    return Comparison(
        first=named[0],
        second=named[1],
        tasks=len(shared),
        only_first=len(sides[0]) - len(shared),
        only_second=len(sides[1]) - len(shared),
        rate_first=math.fsum(before) / len(shared),
        rate_second=math.fsum(after) / len(shared),
        difference=paired_difference(before, after),
        p_value=mcnemar(len(gained), len(lost)) if single else sign_permutation(differences),
        test="exact McNemar" if single else "paired permutation",
        gained=gained,
        lost=lost,
    )


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value of McNemar's test: tasks that only one side solves, as tosses of a fair coin."""
    return min(1.0, 2 * sign_greater(max(gained, lost), min(gained, lost)))


def sign_permutation(differences: Sequence[float]) -> float:
    """The two-sided p-value of a sign permutation test on the mean of paired differences.

    Every assignment of signs is tried for up to 14 differences that are not zero, else 10,000 seeded ones.
    """
    moved = [each for each in differences if abs(each) > _ROUNDING]
    observed = abs(math.fsum(moved)) - _ROUNDING
    exact, generator = len(moved) <= _EXACT_UP_TO, random.Random(0)
    drawn = (generator.choices((-1, 1), k=len(moved)) for _ in range(_ROUNDS))
    signs = [*product((-1, 1), repeat=len(moved))] if exact else [*drawn]
    extreme = sum(abs(math.fsum(map(mul, moved, each))) >= observed for each in signs)
    # The observed assignment is one of those drawn, so that no p-value is zero.
    return (extreme + (not exact)) / (len(signs) + (not exact))


def rows_of(group: EvaluationFigures) -> tuple[tuple[str, str], ...]:
    """The table of a group: what is measured, and how it was made."""
    last = group.pass_at_k[-1] if len(group.pass_at_k) > 1 else None
    return (
        ("runs", group.label),
        ("tasks", str(group.tasks)),
        ("attempts", str(group.attempts)),
        ("pass@1", _number(group.pass_at_1.mean)),
        ("95% interval", f"{group.pass_at_1.low:.3f} to {group.pass_at_1.high:.3f}" if group.pass_at_1.n else "-"),
        ("pass@k", f"{_number(last.estimate.mean)} (k={last.k})" if last else "-"),
        ("reward", _number(group.reward)),
        ("flagged", str(group.flagged)),
        ("turns", f"{group.turns:.1f}" if group.turns else "-"),
        ("prompt tokens", f"{group.prompt_tokens:,}" if group.prompt_tokens else "-"),
        ("sampled tokens", f"{group.completion_tokens:,}" if group.completion_tokens else "-"),
        ("seconds", f"{group.seconds:.1f}"),
        ("outcomes", ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in group.kinds.items() if count)),
        ("agent", group.agent),
        ("model", group.model),
        ("data", "-".join(filter(None, (group.dataset, group.split)))),
    )


def comparison_rows(comparison: Comparison) -> tuple[tuple[str, str], ...]:
    """The comparison, a line each."""
    change, alone = comparison.difference, f"{comparison.only_first} and {comparison.only_second} of one alone left out"
    gained, lost = comparison.gained, comparison.lost
    return (
        ("first", comparison.first),
        ("second", comparison.second),
        ("tasks of both", f"{comparison.tasks} ({alone})"),
        ("pass@1 of the first", _number(comparison.rate_first)),
        ("pass@1 of the second", _number(comparison.rate_second)),
        ("difference", f"{change.mean:+.3f}, 95% interval {change.low:+.3f} to {change.high:+.3f}"),
        ("p-value", f"{comparison.p_value:.4g} ({comparison.test}, two-sided)"),
        ("solved more often", f"{len(gained)}: {', '.join(gained[:10])}{', ...' if len(gained) > 10 else ''}"),
        ("solved less often", f"{len(lost)}: {', '.join(lost[:10])}{', ...' if len(lost) > 10 else ''}"),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def write_json_report(folder: Path, groups: Sequence[EvaluationFigures], comparison: Comparison | None = None) -> None:
    """Write it into ``folder``, which is made. Raises ``StorageError``."""
    report: JsonObject = {"version": 1, "groups": [each.model_dump(mode="json") for each in groups]}
    report["comparison"] = None if comparison is None else comparison.model_dump(mode="json")
    write_file(folder / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n", PRIVATE, parents=True)

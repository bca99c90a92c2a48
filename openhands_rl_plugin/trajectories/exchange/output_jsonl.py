"""Rows of ``output.jsonl`` of OpenHands' evaluation harness: V0's events, and V1's in the newer benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from pydantic import Field, JsonValue

from openhands_rl_plugin.core.transcript import transcript_nodes
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject, Score, StopReason, Task, Times, Trajectory
from openhands_rl_plugin.trajectories.exchange.conversations import spoken
from openhands_rl_plugin.trajectories.exchange.dates import date_of, seconds_of
from openhands_rl_plugin.trajectories.exchange.episodes import (
    SWE,
    UNKNOWN_TIMES,
    Ending,
    Imported,
    Origin,
    end_of,
    finished,
    reward_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    Foreign,
    LeftOutError,
    names_of_tests,
    parse,
    without_nulls,
)
from openhands_rl_plugin.trajectories.exchange.judgement import patch_of, resolved
from openhands_rl_plugin.trajectories.exchange.v0_read import EventReader
from openhands_rl_plugin.trajectories.exchange.v0_write import history
from openhands_rl_plugin.trajectories.exchange.v1.read import read_log

_TEST_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


class LlmConfig(Foreign):
    """The part that names the model."""

    model: str | None = None


class Metadata(Foreign):
    """What the harness ran."""

    agent_class: str | None = None
    llm_config: LlmConfig = LlmConfig()
    llm: LlmConfig = LlmConfig()
    dataset: str | None = None
    data_split: str | None = None
    eval_output_dir: str | None = None


class EvalOutput(Foreign):
    """One instance of a run. ``report`` stands where ``update_output_with_eval`` puts it."""

    instance_id: str
    test_result: JsonObject = Field(default_factory=dict)
    instruction: str = ""
    metadata: Metadata = Metadata()
    history: tuple[JsonValue, ...] = ()
    metrics: JsonValue = None
    error: str | None = None
    instance: JsonObject = Field(default_factory=dict)
    report: JsonObject | None = None
    run_id: str | None = None


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """An instance with its history or its result."""
    return "instance_id" in row and "messages" not in row and not {"history", "test_result"}.isdisjoint(row)


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One row. Raises ``LeftOutError`` when nothing was said."""
    messages = spoken(trajectory, transcript_nodes(trajectory))
    if not messages:
        raise LeftOutError("nothing was said in it")
    test_result: JsonObject = {"git_patch": patch_of(trajectory) or ""}
    judged = resolved(trajectory, scores)
    held = trajectory.evidence.get("test_result")
    if isinstance(held, dict):
        test_result = {**held, **test_result}
    if judged is not None and "report" not in test_result:
        test_result["report"] = {"resolved": judged, "empty_generation": not test_result["git_patch"]}
    row: JsonObject = {
        "instance_id": trajectory.task.id,
        "test_result": test_result,
        "instruction": trajectory.task.instruction,
        "metadata": _metadata(trajectory),
        "history": [*history(trajectory, messages)],
        "metrics": {"accumulated_token_usage": _usage(trajectory)},
        "instance": trajectory.task.data,
        "run_id": trajectory.run_id,
    }
    yield row if trajectory.failure is None else {**row, "error": trajectory.failure.message}


def read(row: JsonObject) -> Imported:
    """An episode of a row. Raises ``ExchangeError``."""
    record = parse(EvalOutput, row)
    if not record.history and not record.test_result and record.error is None:
        raise ExchangeError("history: is required, or test_result or error of an instance that was not played")
    metadata = record.metadata
    data = without_nulls(record.instance)
    data.update({name: list(names_of_tests(data[name])) for name in _TEST_LISTS if name in data})
    instruction = record.instruction or data.get("problem_statement")
    task = Task(
        id=record.instance_id,
        environment=SWE,
        instruction=instruction if isinstance(instruction, str) else "",
        data=data,
        split=metadata.data_split or "",
    )
    run_id = record.run_id or metadata.eval_output_dir
    origin = Origin("output-jsonl", task, metadata.llm_config.model or metadata.llm.model, run_id)
    if any(isinstance(event, dict) and "kind" in event for event in record.history):
        tree = read_log(record.history, origin.policy).tree
    else:
        tree = EventReader(origin.policy).read(record.history)
    evidence = _evidence(record)
    judged = _report(record).get("resolved")
    known = judged if isinstance(judged, bool) else None
    stop, failure = _ending(record, end_of(tree.messages()))
    detail: JsonObject = {} if known is None else {"resolved": known}
    times = _times(record.history)
    return finished(tree, origin, Ending(stop, evidence, reward_of(known), detail, failure, times))


def _metadata(trajectory: Trajectory) -> JsonObject:
    # The harness requires each of these, if only as an empty value.
    return {
        "agent_class": trajectory.strategy.name,
        "llm_config": {"model": trajectory.policy.served_name},
        "max_iterations": trajectory.task.limits.max_turns if trajectory.task.limits else len(trajectory.nodes),
        "eval_output_dir": trajectory.run_id,
        "start_time": date_of(trajectory.times.started).strftime("%Y-%m-%d %H:%M:%S"),
        "git_commit": "",
        "dataset": trajectory.task.environment,
        "data_split": trajectory.task.split,
        "details": {"trajectory_id": trajectory.id, "stop": trajectory.stop.value},
    }


def _usage(trajectory: Trajectory) -> JsonObject:
    usage = trajectory.usage
    return {
        "model": trajectory.policy.served_name,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cache_read_tokens": usage.cached_tokens,
    }


def _evidence(record: EvalOutput) -> JsonObject:
    evidence: JsonObject = {}
    if record.test_result or record.report is not None:
        evidence["test_result"] = {**record.test_result, "report": _report(record)}
    if record.metrics is not None:
        evidence["metrics"] = record.metrics
    return evidence


def _report(record: EvalOutput) -> JsonObject:
    held = record.test_result.get("report")
    return held if isinstance(held, dict) else record.report or {}


def _ending(record: EvalOutput, recorded: StopReason) -> tuple[StopReason, Failure | None]:
    """OpenHands' own limits are regular ends; any other error makes the episode no valid sample."""
    if record.error is None:
        return recorded, None
    error = record.error.lower()
    if "maximum iteration" in error:
        return StopReason.MAX_TURNS, None
    if "maximum budget" in error or "stuck in a loop" in error or "stuckinloop" in error:
        return StopReason.TRUNCATED, None
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message=record.error[:500], boundary="openhands.evaluation")
    return StopReason.ERROR, failure


def _times(events: Sequence[JsonValue]) -> Times:
    stamps = [event["timestamp"] for event in events if isinstance(event, dict) and "timestamp" in event]
    seconds = [at for stamp in stamps if isinstance(stamp, str) and (at := _seconds(stamp)) is not None]
    return Times(started=min(seconds), finished=max(seconds)) if seconds else UNKNOWN_TIMES


def _seconds(stamp: str) -> float | None:
    try:
        return seconds_of(datetime.fromisoformat(stamp))
    except ValueError:
        return None

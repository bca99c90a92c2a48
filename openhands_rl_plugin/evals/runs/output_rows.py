"""The output files of a run, in the format of OpenHands' evaluation; a run goes on only with the settings in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.machine import machine
from openhands_rl_plugin.core.records import LAST_ERROR
from openhands_rl_plugin.core.redaction import redact_json
from openhands_rl_plugin.core.types import JsonObject, Trajectory
from openhands_rl_plugin.evals.report.run_records import json_object, outcome_of_row, read_metadata
from openhands_rl_plugin.evals.runs.outcome import EvalTask, GradedEpisode, Outcome
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, RunSpec
from openhands_rl_plugin.evals.runs.run_files import METADATA, OUTPUT, PREDICTIONS, read_rows
from openhands_rl_plugin.evals.swe.logs import run_report
from openhands_rl_plugin.evals.swe.types import Flag, PatchVerdict, VerdictKind
from openhands_rl_plugin.trajectories.exchange import events


def metadata_of(plan: EvaluationPlan, run: RunSpec, started: float, more: JsonObject) -> JsonObject:
    """``metadata.json``, with OpenHands' keys; other settings are in ``details``, among them ``more``."""
    own: JsonObject = {
        "suite": plan.suite.name,
        "host": plan.host,
        "run": run.index,
        "temperature": run.temperature,
        "seed": plan.seed,
        "strategy": plan.strategy or None,
        "strategy_options": plan.strategy_options,
        "timeout": plan.timeout,
        "test_timeout": plan.test_timeout,
        "workers": plan.workers,
        "machine": machine(),
        "command": plan.command,
        "limits": plan.limits().model_dump(exclude={"timeout"}),
        "success": str(plan.success),
        "environment": plan.environment,
        "workspace": None,
        **more,
    }
    return events.v0_metadata(
        agent_class=plan.agent,
        llm_config=plan.model.as_llm_config(),
        max_iterations=plan.max_iterations,
        eval_output_dir=str(plan.run_directory(run)),
        started=started,
        dataset=plan.suite.dataset,
        data_split=plan.suite.split,
        details=redact_json(own),
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


def completion_files(trajectory: Trajectory) -> Iterator[tuple[str, JsonObject]]:
    """The files of ``llm_completions/<instance>``: one ``<model>-<number>.json`` for every model call."""
    return ((name, redact_json(row)) for name, row in events.completion_files(trajectory))


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


_MODEL = ("model", "top_p", "max_output_tokens", "max_message_chars", "native_tool_calling")
_DETAILS = (
    *("host", "temperature", "seed", "timeout", "test_timeout"),
    *("strategy", "strategy_options", "limits", "success", "environment", "workspace"),
)
_LONGEST = 60


def check_same_settings(plan: EvaluationPlan, run: RunSpec, more: JsonObject) -> None:
    """Raise ``ConfigError`` when the run's folder holds results of other settings.

    Settings that its metadata lacks are not compared.
    """
    directory = plan.run_directory(run)
    held, now = _deciding(_held(directory)), _deciding(metadata_of(plan, run, 0.0, more))
    other = [line for name, was in held.items() if was is not None for line in _differences(name, was, now.get(name))]
    if other:
        raise ConfigError(
            f"{directory} holds a run with other settings ({'; '.join(other)}): give the same ones to resume it, or "
            "choose another --note or another --out"
        )


def _held(directory: Path) -> JsonObject:
    """The metadata of the run; every line has a copy."""
    if found := read_metadata(directory / METADATA):
        return found
    return json_object(next(read_rows(directory / OUTPUT), {}).get("metadata"))


def _deciding(metadata: JsonObject) -> JsonObject:
    """The recorded settings that affect results and are not in the folder's name."""
    noted = redact_json(metadata)  # as in the lines
    parts = ((_MODEL, json_object(noted.get("llm_config"))), (_DETAILS, json_object(noted.get("details"))))
    return {name: part[name] for names, part in parts for name in names if name in part}


def _differences(name: str, was: JsonValue, now: JsonValue) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*was, *now)):
            yield from _differences(f"{name}.{key}", was.get(key), now.get(key))
    elif was != now:
        yield f"{name}: {_shown(was)}, now {_shown(now)}"


def _shown(value: JsonValue) -> str:
    return f"{json.dumps(value):.{_LONGEST}}"

"""Checks that a run is resumed with the same settings: they are in its metadata, not in its folder's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.redaction import redact_json
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.report.run_records import json_object, read_metadata
from openhands_rl_plugin.evals.runs.output_rows import metadata_of
from openhands_rl_plugin.evals.runs.plan import AgentStrategy, EvaluationPlan, RunSpec, SessionAccess
from openhands_rl_plugin.evals.runs.run_files import METADATA, OUTPUT, read_rows

_MODEL = ("model", "top_p", "max_output_tokens", "max_message_chars", "native_tool_calling")
_DETAILS = (
    *("host", "temperature", "seed", "timeout", "test_timeout"),
    *("strategy", "strategy_options", "limits", "success", "environment", "workspace"),
)
_LONGEST = 60


def check_same_settings(
    plan: EvaluationPlan, run: RunSpec, by: AgentStrategy | None, access: SessionAccess | None = None
) -> None:
    """Raise ``ConfigError`` when the run's folder holds results of other settings.

    Settings that its metadata lacks, as in runs of older versions, are not compared.
    """
    directory = plan.run_directory(run)
    held, now = _deciding(_held(directory)), _deciding(metadata_of(plan, run, 0.0, by, access))
    if by is not None:
        _forgive(held, now, plan, by)
    if isinstance(was := held.get("workspace"), dict):
        now["workspace"] = {name: value for name, value in json_object(now.get("workspace")).items() if name in was}
    said = [line for name, was in held.items() if was is not None for line in _differences(name, was, now[name])]
    if said:
        raise ConfigError(
            f"{directory} holds a run with other settings ({'; '.join(said)}): give the same ones to resume it, or "
            "choose another --note or another --out"
        )


def _forgive(held: JsonObject, now: JsonObject, plan: EvaluationPlan, by: AgentStrategy) -> None:
    """Skip settings that older versions recorded in another way."""
    if by.temperature is not None:
        held.pop("temperature", None)  # they recorded the run's; that of a search is one of its options
    if "strategy" in held and held["strategy"] is None:
        # They recorded a strategy and its options only when an option named it.
        held.pop("strategy_options", None)
        held["strategy"] = "that of [rl] rollout_strategy" if plan.strategy else now["strategy"]


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

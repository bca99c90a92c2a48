"""What tells groups of runs apart: the settings in which they differ, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from openhands_rl_plugin.evals.report.run_records import RunRecord, json_object

_NOTE = re.compile(r"_N_(?P<note>.+)\Z")


def labels_of(runs: Sequence[RunRecord]) -> list[str]:
    """A label for one run of each group, all different: ``RLAgent, BestOfN n=4``, ``CodeActAgent``.

    A single group has its name. Where the settings do not tell two apart, their names do, or else their folders.
    """
    if len(runs) < 2:
        return [run.name for run in runs]
    aspects = [_aspects(run) for run in runs]
    differing = [key for key in aspects[0] if len({each[key] for each in aspects}) > 1]
    labels = [", ".join(filter(None, (each[key] for key in differing))) for each in aspects]
    for also in ([run.name for run in runs], _folders(runs)):
        if len(set(labels)) == len(labels) and all(labels):
            break
        labels = [", ".join(filter(None, pair)) for pair in zip(labels, also, strict=True)]
    return labels


def _aspects(run: RunRecord) -> dict[str, str]:
    metadata, details = run.metadata, json_object(run.metadata.get("details"))
    llm = json_object(metadata.get("llm_config"))
    note = _NOTE.search(run.name)
    said: dict[str, object] = {
        "dataset": "-".join(filter(None, (_text(metadata.get("dataset")), _text(metadata.get("data_split"))))),
        "agent": metadata.get("agent_class") or run.directory.parent.name,
        "strategy": " ".join([_text(details.get("strategy")), *_options(json_object(details.get("strategy_options")))]),
        "model": _after("model", _text(llm.get("model")).removeprefix("openai/")),
        "note": _after("note", note["note"] if note else ""),
        "iterations": _after("max iterations", metadata.get("max_iterations")),
        "temperature": _after("temperature", details.get("temperature")),
        "seed": _after("seed", details.get("seed")),
    }
    return {key: _text(value).strip() for key, value in said.items()}


def _options(options: Mapping[str, object]) -> list[str]:
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()]


def _after(what: str, value: object) -> str:
    return f"{what} {value}" if value not in (None, "") else ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _folders(runs: Sequence[RunRecord]) -> list[str]:
    """The folders of the runs, without what all of them begin with."""
    parts = [run.directory.with_name(run.name).parts for run in runs]
    shared = next((at for at, level in enumerate(zip(*parts, strict=False)) if len(set(level)) > 1), 0)
    return ["/".join(each[shared:]) for each in parts]

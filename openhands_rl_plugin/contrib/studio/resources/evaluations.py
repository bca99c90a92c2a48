"""``/api/evaluations``: their figures and instances; of one instance the patch and what the grader said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.contrib.studio.replies import columns, number, plain, reply
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.report.comparison import Comparison, compare
from openhands_rl_plugin.evals.report.figures import EvaluationFigures, figures_of, grouped
from openhands_rl_plugin.evals.report.run_records import RunRecord, read_runs
from openhands_rl_plugin.evals.report.tables import HEADINGS, about_row, comparison_rows, figure_row
from openhands_rl_plugin.evals.runs.outcome import Outcome
from openhands_rl_plugin.evals.runs.run_files import OUTPUT, read_rows

_LONGEST = 256 * 1024
_KEPT = 32


class EvaluationResource:
    """The evaluations that the studio was given; each is read again when its file has changed."""

    def __init__(self, sources: StudioSources) -> None:
        self._folders = sources.evaluations
        self._known: dict[str, tuple[tuple[int, int], RunRecord]] = {}
        self._compared: tuple[list[RunRecord], JsonObject] | None = None

    async def all(self, request: Request) -> Response:
        """``evaluations: [{name, figures}]``, and what ``overview`` says of those that can be read."""
        found: list[JsonValue] = []
        records: list[RunRecord] = []
        for name, folder in sorted(self._folders.items()):
            try:
                record = await asyncio.to_thread(self._read, name, folder)
            except ConfigError as error:
                found.append({"name": name, "problem": str(error)})
                continue
            records.append(record)
            found.append({"name": name, "figures": run_figures(record)})
        return reply(request, {"evaluations": found, **await asyncio.to_thread(self._overview, records)})

    async def one(self, request: Request) -> Response:
        """``figures`` and ``instances``; with ``?instance=`` the patch and the log of one."""
        folder = StudioSources.folder(request, self._folders, "evaluation")
        instance = request.query_params.get("instance")
        if instance:
            return reply(request, await asyncio.to_thread(_instance, folder, instance))
        record = await asyncio.to_thread(self._read, request.path_params["id"], folder)
        body: JsonObject = {"name": request.path_params["id"], "figures": run_figures(record)}
        return reply(request, body | {"instances": instance_rows(record.outcomes)})

    def _overview(self, records: list[RunRecord]) -> JsonObject:
        """As ``overview``; a comparison of many tasks takes a second, so it is made once."""
        read = [id(each) for each in records]
        if self._compared is None or [id(each) for each in self._compared[0]] != read:
            self._compared = records, overview(records)
        return self._compared[1]

    def _read(self, name: str, folder: Path) -> RunRecord:
        try:
            said = (folder / OUTPUT).stat()
        except OSError as error:
            raise ConfigError(f"{name}: {OUTPUT} is gone ({error.strerror})") from error
        state = (said.st_mtime_ns, said.st_size)
        known = self._known.get(name)
        if known is None or known[0] != state:
            known = state, read_runs((folder / OUTPUT,))[0]
            self._known[name] = known
            if len(self._known) > _KEPT:
                self._known.pop(next(iter(self._known)))
        return known[1]


def overview(records: Sequence[RunRecord], comparison: Comparison | None = None) -> JsonObject:
    """``groups``: of runs that are repetitions of each other, as the terminal shows them. ``comparison``: rows; by
    default of two groups that have tasks in common."""
    groups = grouped(records)
    if comparison is None and len(groups) == 2:
        with suppress(ConfigError):
            comparison = compare(*groups)
    rows = None if comparison is None else _rows(comparison_rows(comparison))
    return {"groups": [_group(each) for each in figures_of(records)], "comparison": rows}


def _group(group: EvaluationFigures) -> JsonValue:
    figures = zip(HEADINGS, figure_row(group), strict=True)
    kept = group.model_dump(mode="json", include={"label", "attempts", "kinds", "runs", "pass_at_k", "best_at_k"})
    return plain({**kept, "rows": _rows([*figures, *about_row(group)])})


def _rows(rows: Sequence[tuple[str, str]]) -> list[JsonValue]:
    return [[name, text] for name, text in rows]


def run_figures(record: RunRecord) -> JsonValue:
    """Those of one run alone."""
    (figures,) = figures_of([record])
    return plain(json.loads(figures.model_dump_json()) if record.outcomes else {"name": record.name, "attempts": 0})


def instance_rows(outcomes: Sequence[Outcome]) -> JsonObject:
    """One row an attempt."""
    rows: dict[str, list[JsonValue]] = {
        "instance": [each.instance_id for each in outcomes],
        "kind": [each.kind.value for each in outcomes],
        "resolved": [None if each.resolved is None else int(each.resolved) for each in outcomes],
        "reward": [number(each.reward) for each in outcomes],
        "reason": [each.reason[:500] or None for each in outcomes],
        "stop": [each.stop or None for each in outcomes],
        "flags": [list(each.flags) or None for each in outcomes],
        "turns": [each.turns for each in outcomes],
        "tokens": [each.prompt_tokens + each.completion_tokens for each in outcomes],
        "cost": [number(each.cost) for each in outcomes],
        "seconds": [number(each.seconds) for each in outcomes],
        "episode": [each.trajectory_id or None for each in outcomes],
    }
    return dict(columns(rows))


def _instance(folder: Path, instance: str) -> JsonObject:
    for row in read_rows(folder / OUTPUT):
        if row["instance_id"] == instance:
            return {**details_of(row), "files": [*_logs(folder, instance)]}
    raise HTTPException(404, f"the evaluation has no instance {instance[:80]!r}")


def details_of(row: JsonObject, longest: int = _LONGEST) -> JsonObject:
    """The patch of a row of ``output.jsonl``, its error, and what the grader said, each cut at ``longest``."""
    result = row.get("test_result")
    said = result if isinstance(result, dict) else {}
    patch = said.get("git_patch") or said.get("model_patch")
    rest: JsonObject = {name: value for name, value in said.items() if name not in ("git_patch", "outcome")}
    log = json.dumps(rest, indent=1, ensure_ascii=False)
    return {
        "instance": row["instance_id"],
        "patch": str(patch)[:longest] if patch else None,
        "error": str(row["error"])[:longest] if row.get("error") else None,
        "log": log[:longest] if rest else None,
    }


def _logs(folder: Path, instance: str) -> list[JsonObject]:
    """What the grader wrote in a folder of the instance's name, if there is one."""
    found: list[JsonObject] = []
    for place in sorted(folder.rglob("*")):
        if len(found) < 8 and place.is_file() and not place.is_symlink() and place.parent.name == instance:
            with open(place, encoding="utf-8", errors="replace") as file:
                found.append({"name": place.name, "text": file.read(_LONGEST // 4)})
    return found

"""``/api/runs``: loops and trainings, their stages and the curves of their metrics."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.apps.loop.parts import STATE
from openhands_rl_plugin.contrib.studio.replies import columns, plain, reply, whole
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.redaction import redact_json
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.training.loop.facts import FACTS, RunFacts, success_of
from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord

MOST_POINTS = 2000
_MOST_BYTES = 16 * 1024 * 1024
_MOST_FILES = 500
_RUN_ID, _OPTIONS = "run_id", "options.json"
_LONGEST_OPTIONS = 256 * 1024


class RunResource:
    """The runs that the studio was given."""

    def __init__(self, sources: StudioSources) -> None:
        self._runs = sources.runs

    async def all(self, request: Request) -> Response:
        """``runs``, in the order of their names."""
        return reply(
            request, {"runs": [await asyncio.to_thread(summary_of, *each) for each in sorted(self._runs.items())]}
        )

    async def one(self, request: Request) -> Response:
        """Stages, options and files of metrics of one run."""
        directory = StudioSources.folder(request, self._runs, "run")
        return reply(request, await asyncio.to_thread(whole_run, request.path_params["id"], directory))

    async def metrics(self, request: Request) -> Response:
        """``rows`` of a file of metrics from byte ``after`` on, and the ``after`` of the next question."""
        directory = StudioSources.folder(request, self._runs, "run")
        files = await asyncio.to_thread(metrics_files, directory)
        name = request.query_params.get("file") or next(iter(files), "")
        if name not in files:
            raise HTTPException(404, f"the run has no metrics file {name[:80]!r}")
        keys = [key for key in request.query_params.get("keys", "").split(",") if key]
        after = whole(request, "after", 0, most=2**53)
        return reply(request, await asyncio.to_thread(curves_of, name, directory / name, keys, after))


def metrics_files(directory: Path) -> list[str]:
    """The files of metrics below a run's folder, in the order in which they were begun."""
    found = sorted(directory.rglob("metrics*.jsonl"), key=lambda file: (file.stat().st_ctime, str(file)))
    return [file.relative_to(directory).as_posix() for file in found[:_MOST_FILES] if file.is_file()]


def stage_of(record: StageRecord) -> JsonObject:
    """A finished stage."""
    return {
        "name": record.name,
        "adapter": record.adapter,
        "started": record.started,
        "finished": record.finished,
        "metrics": plain({name: value for name, value in record.metrics.items()}),
        "success": None if (success := success_of(record)) is None else plain(success.model_dump()),
    }


def summary_of(name: str, directory: Path) -> JsonObject:
    """A line of the list of runs; ``problem`` where its files are damaged."""
    known = any((directory / file).exists() for file in (STATE, FACTS))
    body: JsonObject = {"name": name, "kind": "loop" if known else "training"}
    try:
        state, facts = LoopState.load(directory / STATE), RunFacts.load(directory)
    except (StorageError, OSError) as error:
        return body | {"problem": str(error)}
    last = state.records[-1] if state.records else None
    return body | {
        "run": facts.run_id if facts is not None else _text(directory / _RUN_ID).strip() or None,
        "stages": len(state.records),
        "stage": None if last is None else last.name,
        "adapter": state.adapter,
        "started": state.records[0].started if state.records else None,
        "finished": None if last is None else last.finished,
    }


def whole_run(name: str, directory: Path) -> JsonObject:
    """Everything that is said of a run but its curves."""
    body = summary_of(name, directory)
    if "problem" not in body:
        state, facts = LoopState.load(directory / STATE), RunFacts.load(directory)
        body |= {
            "start": state.start,
            "made": list(state.made),
            "batch": None if state.batch is None else state.batch.model_dump(mode="json"),
            "records": [stage_of(record) for record in state.records],
            "facts": None if facts is None else plain(redact_json(facts.model_dump(mode="json"))),
        }
    try:
        options: JsonValue = json.loads(_text(directory / _OPTIONS) or "{}")
    except ValueError:
        options = {}
    files: list[JsonValue] = [*metrics_files(directory)]
    return body | {"options": plain(redact_json({"options": options})["options"]), "metrics": files}


def curves_of(name: str, file: Path, keys: Sequence[str] = (), after: int = 0, most: int = MOST_POINTS) -> JsonObject:
    """Whole lines only: a line that is being written is read the next time."""
    try:
        with open(file, "rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0 if after > size else after)  # a shorter file is another run's
            begun = opened.tell()
            data = opened.read(_MOST_BYTES)
    except OSError as error:
        raise StorageError(f"{name} cannot be read ({error.strerror}); is the run's folder still there?") from error
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    read = [found for line in lines if (found := _row(line))]
    step = max(1, math.ceil(len(read) / most))
    # The last one is always shown.
    shown = read[::-1][::step][::-1]
    known = list(dict.fromkeys(key for row in read for key in row))
    rows: dict[str, list[JsonValue]] = {
        key: [row.get(key) for row in shown] for key in known if not keys or key in keys
    }
    return {
        "file": name,
        "from": begun,
        "after": begun + data.rfind(b"\n") + 1,
        "total": len(read),
        "keys": [*known],
        "rows": dict(columns(rows)),
    }


def _row(line: bytes) -> dict[str, float | None]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    numbers = ((str(key), value) for key, value in found.items() if isinstance(value, int | float))
    return {key: float(value) if math.isfinite(value) else None for key, value in numbers}


def _text(file: Path) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read(_LONGEST_OPTIONS)
    except OSError:
        return ""

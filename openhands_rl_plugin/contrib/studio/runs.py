"""``/api/runs``, ``/api/adapters``, ``/api/evaluations``, and ``/api/events``: what changes while a page is open."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import JsonValue, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from openhands_rl_plugin.apps.loop.run import STATE
from openhands_rl_plugin.config.build import success_rule
from openhands_rl_plugin.contrib.studio.replies import columns, number, plain, reply, whole
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.errors import ConfigError, StorageError, describe
from openhands_rl_plugin.core.messages import json_object
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import HELD_OUT_SPLITS, TrajectoryFilter
from openhands_rl_plugin.core.redaction import redact_json
from openhands_rl_plugin.core.statistics import over_tasks
from openhands_rl_plugin.core.types import Adapter, JsonObject
from openhands_rl_plugin.evals.runs.run_files import (
    OUTPUT,
    Comparison,
    EvaluationFigures,
    Outcome,
    RunRecord,
    compare,
    comparison_rows,
    figures_of,
    grouped,
    read_rows,
    read_runs,
    rows_of,
)
from openhands_rl_plugin.models.adapters.store import MANIFEST, PROBE, AdapterStore
from openhands_rl_plugin.training.loop.plan import FACTS, LoopState, RunFacts, StageRecord, success_of

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
        found = [await asyncio.to_thread(summary_of, *each) for each in sorted(self._runs.items())]
        return reply(request, {"runs": found})

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
        after = whole(request, "after", 0, most=2**53)
        return reply(request, await asyncio.to_thread(curves_of, name, directory / name, after))


def metrics_files(directory: Path) -> list[str]:
    """The files of metrics below a run's folder, in the order in which they were begun."""
    found = sorted(directory.rglob("metrics*.jsonl"), key=lambda file: (file.stat().st_ctime, str(file)))
    return [file.relative_to(directory).as_posix() for file in found[:_MOST_FILES] if file.is_file()]


def stage_of(record: StageRecord) -> JsonObject:
    """A finished stage."""
    success = success_of(record)
    return {
        **record.model_dump(include={"name", "adapter", "started", "finished"}),
        "metrics": plain(dict(record.metrics)),
        "success": None if success is None else plain(success.model_dump()),
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
    """All of a run but its curves."""
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


def curves_of(name: str, file: Path, after: int = 0, most: int = MOST_POINTS) -> JsonObject:
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
    return {
        "file": name,
        "from": begun,
        "after": begun + data.rfind(b"\n") + 1,
        "total": len(read),
        "keys": [*known],
        "rows": columns({key: [row.get(key) for row in shown] for key in known}),
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


_VERSION = re.compile(r"(?P<name>.+)-v(?P<version>\d{6,})")
_MOST_EPISODES = 50_000


class AdapterResource:
    """The folders of adapters, and what the stores know of their versions."""

    def __init__(self, sources: StudioSources) -> None:
        self._sources = sources
        self._known: dict[str, tuple[str, JsonObject]] = {}

    async def get(self, request: Request) -> Response:
        """``folders: [{name, adapters}]``."""
        held_out: JsonObject = {}
        for name, storage in [*self._sources.stores.items()]:
            revision = await storage.revision()
            if name not in self._known or self._known[name][0] != revision:
                self._known[name] = revision, await _measured(storage)
            held_out |= self._known[name][1]
        folders: list[JsonValue] = []
        for name, root in sorted(self._sources.adapters.items()):
            versions = await asyncio.to_thread(versions_in, root)
            for version in versions:
                version["held_out"] = held_out.get(str(version["name"]))
            folders.append({"name": name, "adapters": [*versions]})
        return reply(request, {"folders": folders})


async def _measured(storage: TrajectoryStorage) -> JsonObject:
    """Served name -> its success on held-out tasks."""
    tasks: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    async for each in storage.summaries(TrajectoryFilter(descending=True, limit=_MOST_EPISODES)):
        if each.split in HELD_OUT_SPLITS and each.judged is not None:
            success = float(success_rule(each.environment).holds(each.judged, each.stop))
            tasks[each.policy.served_name][f"{each.environment}\0{each.task_id}"].append(success)
    return {
        served: plain(over_tasks([sum(each) / len(each) for each in attempts.values()]).model_dump())
        for served, attempts in tasks.items()
    }


def versions_in(root: Path) -> list[JsonObject]:
    """The versions of the adapters in a folder, as their manifests say; ``problem`` of those without one."""
    store, found = AdapterStore(root), list[JsonObject]()
    for name in sorted(entry.name for entry in root.glob("*-v*") if _VERSION.fullmatch(entry.name)):
        folder, match = root / name, _VERSION.fullmatch(name)
        assert match is not None, "it was looked for"
        body: JsonObject = {"name": name, "adapter": match["name"], "version": int(match["version"])}
        try:
            adapter = Adapter.model_validate_json((folder / MANIFEST).read_bytes())
            current = store.current(match["name"])
        except (OSError, ValidationError, StorageError, ConfigError) as error:
            found.append(body | {"problem": f"{MANIFEST} cannot be read: {describe(error)}"})
            continue
        served = store.served_by(adapter)
        body |= {
            **adapter.model_dump(include={"parent", "base_model", "step", "sha256"}),
            "metrics": plain(dict(adapter.metrics)),
            "made": (folder / MANIFEST).stat().st_mtime,
            "current": current is not None and current.name == name,
            "probe": (folder / PROBE).exists(),
            "loaded": [*served],
            "probed": {url: number(each) for url, each in served.items() if each is not None},
        }
        found.append(body)
    return found


_LONGEST = 256 * 1024


class EvaluationResource:
    """The evaluations that the studio was given."""

    def __init__(self, sources: StudioSources) -> None:
        self._folders = sources.evaluations

    async def all(self, request: Request) -> Response:
        """``evaluations: [{name, figures}]``, and what ``overview`` says of those that can be read."""
        found: list[JsonValue] = []
        records: list[RunRecord] = []
        for name, folder in sorted(self._folders.items()):
            try:
                (record,) = await asyncio.to_thread(read_runs, (folder / OUTPUT,))
            except ConfigError as error:
                found.append({"name": name, "problem": str(error)})
                continue
            records.append(record)
            found.append({"name": name, "figures": run_figures(record)})
        return reply(request, {"evaluations": found, **await asyncio.to_thread(overview, records)})

    async def one(self, request: Request) -> Response:
        """``figures`` and ``instances``; with ``?instance=`` the patch and the log of one."""
        folder = StudioSources.folder(request, self._folders, "evaluation")
        instance = request.query_params.get("instance")
        if instance:
            return reply(request, await asyncio.to_thread(_instance, folder, instance))
        (record,) = await asyncio.to_thread(read_runs, (folder / OUTPUT,))
        body: JsonObject = {"name": request.path_params["id"], "figures": run_figures(record)}
        return reply(request, body | {"instances": instance_rows(record.outcomes)})


def overview(records: Sequence[RunRecord], comparison: Comparison | None = None) -> JsonObject:
    """``groups``: of runs that are repetitions of each other, as the terminal shows them. ``comparison``: rows; by
    default of two groups that have tasks in common."""
    groups = grouped(records)
    if comparison is None and len(groups) == 2:
        with suppress(ConfigError):
            comparison = compare(*groups)
    rows: JsonValue = None if comparison is None else [list(row) for row in comparison_rows(comparison)]
    return {"groups": [_group(each) for each in figures_of(records)], "comparison": rows}


def _group(group: EvaluationFigures) -> JsonValue:
    kept = group.model_dump(mode="json", include={"label", "attempts", "kinds", "runs", "pass_at_k"})
    return plain({**kept, "rows": [list(row) for row in rows_of(group) if row[1]]})


def run_figures(record: RunRecord) -> JsonValue:
    """The figures of one run."""
    (figures,) = figures_of([record])
    return plain(json.loads(figures.model_dump_json()) if record.outcomes else {"name": record.name, "attempts": 0})


def instance_rows(outcomes: Sequence[Outcome]) -> JsonObject:
    """One row an attempt."""
    rows = {
        "instance": [each.instance_id for each in outcomes],
        "kind": [each.kind.value for each in outcomes],
        "resolved": [None if each.resolved is None else int(each.resolved) for each in outcomes],
        "reason": [each.reason[:500] or None for each in outcomes],
        "stop": [each.stop or None for each in outcomes],
        "flags": [list(each.flags) or None for each in outcomes],
        "turns": [each.turns for each in outcomes],
        "tokens": [each.prompt_tokens + each.completion_tokens for each in outcomes],
        **{name: [number(getattr(each, name)) for each in outcomes] for name in ("reward", "seconds")},
        "episode": [each.trajectory_id or None for each in outcomes],
    }
    return columns(rows)


def _instance(folder: Path, instance: str) -> JsonObject:
    for row in read_rows(folder / OUTPUT):
        if row["instance_id"] == instance:
            return {**details_of(row), "files": [*_logs(folder, instance)]}
    raise HTTPException(404, f"the evaluation has no instance {instance[:80]!r}")


def details_of(row: JsonObject, longest: int = _LONGEST) -> JsonObject:
    """The patch of a row of ``output.jsonl``, its error, and what the grader wrote, each cut at ``longest``."""
    graded = json_object(row.get("test_result"))
    patch = graded.get("git_patch") or graded.get("model_patch")
    rest: JsonObject = {name: value for name, value in graded.items() if name not in ("git_patch", "outcome")}
    log = json.dumps(rest, indent=1, ensure_ascii=False)
    return {
        "instance": row["instance_id"],
        "patch": str(patch)[:longest] if patch else None,
        "error": str(row["error"])[:longest] if row.get("error") else None,
        "log": log[:longest] if rest else None,
    }


def _logs(folder: Path, instance: str) -> list[JsonObject]:
    """The grader's log files, from folders with the instance's name."""
    found: list[JsonObject] = []
    for place in sorted(folder.rglob("*")):
        if len(found) < 8 and place.is_file() and not place.is_symlink() and place.parent.name == instance:
            with open(place, encoding="utf-8", errors="replace") as file:
                found.append({"name": place.name, "text": file.read(_LONGEST // 4)})
    return found


_PAUSE = 0.5
"""Seconds between two looks."""


class EventResource:
    """Streams of events. Each looks for itself; one that comes back begins with ``reset``."""

    def __init__(self, sources: StudioSources) -> None:
        self._sources = sources
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End all streams. From the event loop's own thread."""
        self._stopped.set()

    async def stream(self, request: Request) -> Response:
        """``changed``: a store has; ``run``: its stages or curves have; ``reset``: there is more to show."""
        again = "last-event-id" in request.headers
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(again), media_type="text/event-stream", headers=headers)

    async def _events(self, again: bool) -> AsyncIterator[str]:
        names, seen = self._sources.names(), await self._look({})
        yield f"retry: 1000\n{_event('open', {})}"
        if again:
            yield _event("reset", {})
        while not self._stopped.is_set():
            now = await self._look(seen)
            for kind, name in (each for each in now if now[each] != seen.get(each)):
                yield _event(kind, {"name": name})
            if names != self._sources.names():
                yield _event("reset", {})
            names, seen = self._sources.names(), now
            yield ": alive\n\n"
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _PAUSE)

    async def _look(self, before: Mapping[tuple[str, str], object]) -> dict[tuple[str, str], object]:
        """The revision of each store, and of each run the sizes of its files of metrics and the time of its state."""
        found: dict[tuple[str, str], object] = {}
        for name, storage in [*self._sources.stores.items()]:
            try:
                found["changed", name] = await storage.revision()
            except StorageError:  # its pages say so; when it is back, it is compared with what it was
                found["changed", name] = before.get(("changed", name))
        for name, directory in [*self._sources.runs.items()]:
            found["run", name] = await asyncio.to_thread(_grown, directory)
        return found


def _grown(directory: Path) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for file in (STATE, *metrics_files(directory)):
        with suppress(OSError):
            stat = (directory / file).stat()
            found.append((stat.st_mtime_ns if file == STATE else 0, stat.st_size))
    return found


def _event(kind: str, body: JsonObject) -> str:
    # With an id a browser says, when it comes back, that it was here before.
    return f"id: 1\nevent: {kind}\ndata: {json.dumps(body)}\n\n"

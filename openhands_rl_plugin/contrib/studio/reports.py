"""Pages in a file: chosen episodes (``/api/export``), and ``report.html`` of runs and evaluations."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from pydantic import JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openhands_rl_plugin.apps.loop.run import STATE
from openhands_rl_plugin.contrib.studio.document import single_file
from openhands_rl_plugin.contrib.studio.episode import bodies_of, header_of, tokens_of
from openhands_rl_plugin.contrib.studio.listing import episodes_compared, rows_of
from openhands_rl_plugin.contrib.studio.replies import plain
from openhands_rl_plugin.contrib.studio.runs import (
    curves_of,
    details_of,
    instance_rows,
    metrics_files,
    overview,
    run_figures,
    summary_of,
    versions_in,
    whole_run,
)
from openhands_rl_plugin.contrib.studio.sources import (
    EpisodeShelf,
    Opened,
    StudioSources,
    TokenText,
    free_name,
    read_episode,
)
from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.judgements import opinions
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectorySummary
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.runs.run_files import OUTPUT, Comparison, RunRecord, read_rows
from openhands_rl_plugin.training.loop.plan import LoopState, RunFacts, evaluations, success_of
from openhands_rl_plugin.trajectories.drift import TOKENIZER

MOST_EXPORTED = 50 * 1024 * 1024
MOST_EPISODES = 1000
_UNCHANGED = "!~*'()"
"""Characters that ``encodeURIComponent`` does not escape, in addition to letters, digits and ``-_.``."""
REPORT = "report.html"
_POINTS = 400
"""The most points of a curve: as many as there are pixels."""
_LONGEST = 64 * 1024
"""The most characters of a patch, of an error and of a grader's output."""
_MOST_NAMED, _LONGEST_NAME = 100, 200
_SPARE = 160 * 1024
"""Bytes reserved for the names of omitted items, with their escapes."""
MOST_BYTES = 8 * 1024 * 1024
"""The most bytes of the whole file."""


class ExportResource:
    """The API's responses about the chosen episodes, by address."""

    def __init__(self, shelf: EpisodeShelf, text: TokenText) -> None:
        self._shelf = shelf
        self._text = text

    @classmethod
    async def page(cls, found: Sequence[Opened], text: TokenText) -> str:
        """The page of these episodes. Raises ``HTTPException`` 413."""
        return single_file(await cls(EpisodeShelf(StudioSources()), text).data(found))

    async def get(self, request: Request) -> Response:
        """The page. Raises ``HTTPException`` 400, 404, and 413 for more than 50 MB."""
        ids = list(dict.fromkeys(each for each in request.query_params.get("ids", "").split(",") if each))
        if not ids or len(ids) > MOST_EPISODES:
            raise HTTPException(400, f"name 1 to {MOST_EPISODES} episodes: ids=ID,ID")
        page = single_file(await self.data([await self._shelf.open(request, identity) for identity in ids]))
        headers = {"Content-Disposition": 'attachment; filename="episodes.html"', "Cache-Control": "no-store"}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def data(self, found: Sequence[Opened]) -> JsonObject:
        """Address below ``/api/`` -> what is answered there, not cut into pages. Raises ``HTTPException`` 413."""
        data: JsonObject = {"episodes": await self.listed(found), "export": {"version": 1, "made": time.time()}}
        size = 0
        for each in found:
            for address, body in self.answers(each):
                data[address] = body
                size += len(json.dumps(body, ensure_ascii=False))
                if size > MOST_EXPORTED:
                    raise HTTPException(
                        413, f"the export would have more than {MOST_EXPORTED // 2**20} MB; choose fewer"
                    )
        return data

    @staticmethod
    async def listed(found: Sequence[Opened]) -> JsonObject:
        """The list of these episodes."""
        labels = [label for each in found for label in each.labels]
        thought = {each.trajectory.id: opinions(each.scores) for each in found}
        summaries: list[TrajectorySummary] = []
        for each in found:
            where = TrajectoryFilter(ids=(each.trajectory.id,), finished=None)
            summaries += [summary async for summary in each.storage.summaries(where)]
        rows = rows_of(summaries, labels, thought)
        return {"revision": "", "total": len(summaries), "offset": 0, "next": None, "rows": rows}

    def answers(self, opened: Opened) -> Iterator[tuple[str, JsonObject]]:
        """The API's responses about one episode."""
        trajectory = opened.trajectory
        base, nodes = f"episodes/{quote(trajectory.id, safe=_UNCHANGED)}", trajectory.nodes
        yield base, header_of(opened)
        yield f"{base}/nodes", bodies_of(nodes, range(len(nodes)), len(nodes), most=MOST_EXPORTED)
        for at, node in enumerate(nodes):
            if node.tokens is not None:
                yield (
                    f"{base}/nodes/{at}/tokens",
                    tokens_of(node, at, 0, self._text, trajectory.policy.base_model, MOST_EXPORTED),
                )


class Answers:
    """The API responses that a report file contains, by the addresses that ``static/base.mjs`` requests.

    ``start``: the address of the first page. The page names responses that do not fit.
    """

    def __init__(self, title: str, start: str, most: int = MOST_BYTES) -> None:
        self._title = title
        self._start = start
        self._data: JsonObject = {}
        self._left_out: list[str] = []
        self._room = most - len(single_file(self._all(), title)) - _SPARE

    def add(self, what: str, answers: Mapping[str, JsonObject]) -> bool:
        """All of ``answers``, or none where they do not fit: then ``what`` is named as left out, if it has a name."""
        # Bytes in the file: JSON within a text of a module, which is a ``data:`` URL.
        weight = sum(len(json.dumps(json.dumps({where: body}))) * 4 // 3 + 4 for where, body in answers.items())
        if weight > self._room:
            if what:
                self.leave_out(what)
            return False
        self._room -= weight
        self._data.update(answers)
        return True

    def leave_out(self, what: str) -> None:
        """Name something that is not in the file."""
        self._left_out = [*self._left_out, what[:_LONGEST_NAME]][:_MOST_NAMED]

    def page(self) -> str:
        """The file's text."""
        return single_file(self._all(), self._title)

    def _all(self) -> JsonObject:
        about: JsonObject = {"version": 1, "made": time.time(), "start": self._start, "left_out": [*self._left_out]}
        return {**self._data, "export": about}


def write_evaluation_report(
    folder: Path, runs: Sequence[RunRecord], comparison: Comparison | None = None, *, most: int = MOST_BYTES
) -> Path:
    """Write ``report.html`` into ``folder``, of at most ``most`` bytes. Raises ``StorageError``."""
    answers, named = Answers("Evaluations", "/v", most), dict[str, RunRecord]()
    for run in runs:
        # Folders of other agents may be named alike.
        name = free_name(f"{run.directory.parent.name}/{run.directory.name}".strip("/"), named)
        named[name] = run
    listed: JsonObject = {
        "evaluations": [{"name": name, "figures": run_figures(run)} for name, run in named.items()],
        **overview(runs, comparison),
    }
    answers.add("the figures", {"evaluations": listed})
    for name, run in named.items():
        body: JsonObject = {"name": name, "figures": run_figures(run), "instances": instance_rows(run.outcomes)}
        answers.add(f"the instances of {name}", {f"evaluations/{name}": body})
    for name, run in named.items():
        _add_details(answers, name, run)
    write_file(folder / REPORT, answers.page(), PRIVATE)
    return folder / REPORT


def _add_details(answers: Answers, name: str, run: RunRecord) -> None:
    missing = 0
    try:
        for row in read_rows(run.directory / OUTPUT):
            found = details_of(row, _LONGEST)
            missing += not answers.add("", {f"evaluations/{name}?{row['instance_id']}": found})
    except (ConfigError, OSError):
        answers.leave_out(f"patches and verdicts of {name}, which cannot be read")
    if missing:
        answers.leave_out(f"patch and verdict of {missing} instances of {name}")


async def write_run_report(
    directory: Path, storage: TrajectoryStorage, adapters: Path, *, tokenizer: str = "", most: int = MOST_BYTES
) -> Path:
    """Write ``report.html`` into the folder of a run, of at most ``most`` bytes. Raises ``StorageError``.

    ``adapters``: their folder. ``tokenizer``: the folder with the tokenizer that tokens are shown with.
    """
    name = directory.name or "run"
    state = LoopState.load(directory / STATE)
    answers = Answers(name, f"/r/{quote(name, safe='')}", most)
    whole = await asyncio.to_thread(whole_run, name, directory)
    listed: JsonObject = {"runs": [await asyncio.to_thread(summary_of, name, directory)]}
    answers.add("the stages of the run", {"runs": listed, f"runs/{name}": whole})
    answers.add("adapters", {"adapters": await asyncio.to_thread(_lineage, adapters, state)})
    facts = RunFacts.load(directory) or RunFacts(run_id="")
    given = tokenizer if (Path(tokenizer) / TOKENIZER).is_file() else ""
    text = TokenText(given, {name: adapters})
    await _add_samples(answers, facts, storage, ExportResource(EpisodeShelf(StudioSources()), text))
    whole["metrics"] = await asyncio.to_thread(_add_curves, answers, name, directory)
    path = directory / REPORT
    await asyncio.to_thread(write_file, path, await asyncio.to_thread(answers.page), PRIVATE)
    return path


def _lineage(root: Path, state: LoopState) -> JsonObject:
    """The versions that the run began with and ended stages with. Their success is what the run measured of them."""
    measured = {record.adapter: success_of(record) for record in evaluations(state)}
    mine = {state.start, *state.made, *(record.adapter for record in state.records)}
    versions = [each for each in versions_in(root) if each["name"] in mine]
    for each in versions:
        found = measured.get(str(each["name"]))
        each["held_out"] = None if found is None else plain(found.model_dump())
    return {"folders": [{"name": root.name, "adapters": [*versions]}]}


async def _add_samples(answers: Answers, facts: RunFacts, storage: TrajectoryStorage, export: ExportResource) -> None:
    kept: dict[str, Opened] = {}
    for pair in facts.samples:
        try:
            before, after = await read_episode(storage, pair.before), await read_episode(storage, pair.after)
        except (HTTPException, StorageError):
            answers.leave_out(f"the episodes of {pair.task}, which cannot be read")
            continue
        found = {**dict(export.answers(before)), **dict(export.answers(after))}
        found[f"compare?{pair.before}&{pair.after}"] = episodes_compared(before, after)
        if answers.add(f"the episodes of {pair.task}", found):
            kept |= {each.trajectory.id: each for each in (before, after)}
    answers.add("the list of episodes", {"episodes": await export.listed([*kept.values()])})


def _add_curves(answers: Answers, name: str, directory: Path) -> list[JsonValue]:
    """The files of metrics whose curves fit; the newest matter most."""
    kept: list[JsonValue] = []
    for file in reversed(metrics_files(directory)):
        curves = curves_of(file, directory / file, most=_POINTS)
        if answers.add(f"the curves of {file}", {f"runs/{name}/metrics?{file}": curves}):
            kept.insert(0, file)
    return kept

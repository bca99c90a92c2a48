"""The report of a loop or of the demo: the page of its run, its adapters, and a few of its episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from pydantic import JsonValue
from starlette.exceptions import HTTPException

from openhands_rl_plugin.apps.loop.parts import STATE
from openhands_rl_plugin.contrib.studio.replies import plain
from openhands_rl_plugin.contrib.studio.reports.answers import MOST_BYTES, Answers, address
from openhands_rl_plugin.contrib.studio.resources.adapters import versions_in
from openhands_rl_plugin.contrib.studio.resources.comparison import episodes_compared
from openhands_rl_plugin.contrib.studio.resources.exports import ExportResource
from openhands_rl_plugin.contrib.studio.resources.runs import curves_of, metrics_files, summary_of, whole_run
from openhands_rl_plugin.contrib.studio.shelf import EpisodeShelf, Opened, read_episode
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.contrib.studio.token_text import TokenText
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.training.loop.facts import RunFacts, evaluations, success_of
from openhands_rl_plugin.training.loop.plan import LoopState

REPORT = "report.html"
_POINTS = 400
"""Of each curve: as many as there are pixels to draw them."""


async def write_run_report(
    directory: Path, storage: TrajectoryStorage, adapters: Path, *, tokenizer: str = "", most: int = MOST_BYTES
) -> Path:
    """Write ``report.html`` into the folder of a run, of at most ``most`` bytes. Raises ``StorageError``.

    ``adapters``: their folder. ``tokenizer``: the folder with the tokenizer that tokens are shown with.
    """
    name = directory.name or "run"
    state = LoopState.load(directory / STATE)
    answers = Answers(name, f"/r/{quote(name, safe='')}", most)
    whole = await asyncio.to_thread(_add_run, answers, name, directory)
    answers.add("adapters", {"adapters": await asyncio.to_thread(_lineage, adapters, state)})
    facts = RunFacts.load(directory) or RunFacts(run_id="")
    text = TokenText(tokenizer) if (Path(tokenizer) / "tokenizer.json").is_file() else TokenText()
    await _add_samples(answers, facts, storage, ExportResource(EpisodeShelf(StudioSources()), text))
    whole["metrics"] = await asyncio.to_thread(_add_curves, answers, name, directory)
    path = directory / REPORT
    await asyncio.to_thread(write_file, path, await asyncio.to_thread(answers.page), PRIVATE)
    return path


def _add_run(answers: Answers, name: str, directory: Path) -> JsonObject:
    whole = whole_run(name, directory)
    answers.add("the stages of the run", {"runs": {"runs": [summary_of(name, directory)]}, f"runs/{name}": whole})
    return whole


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
        found = dict(_of([before, after], export))
        found[address("compare", pair.before, pair.after)] = episodes_compared(before, after)
        if answers.add(f"the episodes of {pair.task}", found):
            kept |= {each.trajectory.id: each for each in (before, after)}
    answers.add("the list of episodes", {"episodes": await export.listed([*kept.values()])})


def _of(opened: Iterable[Opened], export: ExportResource) -> Iterable[tuple[str, JsonObject]]:
    for each in opened:
        yield from export.answers(each)


def _add_curves(answers: Answers, name: str, directory: Path) -> list[JsonValue]:
    """The files of metrics whose curves fit; the newest matter most."""
    kept: list[JsonValue] = []
    for file in reversed(metrics_files(directory)):
        curves = {address(f"runs/{name}/metrics", file): curves_of(file, directory / file, most=_POINTS)}
        if answers.add(f"the curves of {file}", curves):
            kept.insert(0, file)
    return kept

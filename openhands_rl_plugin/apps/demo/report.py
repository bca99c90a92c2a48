"""One self-contained HTML page: curves, lineage of the adapters, and episodes before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.apps.demo.summary import (
    COLUMNS,
    comparison_sentence,
    evaluation_rows,
    evaluations,
    success_difference,
)
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Adapter, Trajectory
from openhands_rl_plugin.evals.report.charts import Point, Series, html_page, line_chart, shown
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

_TURN = {"assistant": "sampled"}


async def write_report(
    path: Path, state: LoopState, storage: FileTrajectoryStorage, adapters: AdapterStore, run_id: str
) -> Path:
    """Write the page for the finished stages of a run and return its path."""
    before = await _stage_episodes(storage, f"{run_id}/evaluate-base")
    after = await _stage_episodes(storage, f"{run_id}/evaluate-final")
    lineage = [adapters.get(record.adapter) for record in _publications(state) if record.adapter]
    body = [
        "<h1>A small model learns to shop</h1>",
        *(f"<p>{shown(sentence)}</p>" for sentence in await comparisons(storage, run_id)),
        "<h2>Held-out success and reward</h2>",
        _curves(state),
        f"<table>{_row((*COLUMNS, 'goals'), 'th')}{''.join(map(_row, evaluation_rows(state)))}</table>",
        "<h2>Adapters</h2>",
        _lineage_table(lineage),
        "<h2>Before and after: the goals with the largest gain in return</h2>",
        *(_pair(*pair) for pair in _examples(before, after)),
    ]
    write_file(path, html_page("openhands-rl demo", body), PRIVATE)
    return path


async def comparisons(storage: FileTrajectoryStorage, run_id: str) -> tuple[str, ...]:
    """The effect of SFT and of RL on success, each in a sentence with its interval."""
    base, warm, final = [
        await _stage_episodes(storage, f"{run_id}/evaluate-{stage}") for stage in ("base", "warm-start", "final")
    ]
    changes = {
        "After SFT against the base model": success_difference(base, warm),
        "After RL against SFT": success_difference(warm, final),
    }
    return tuple(comparison_sentence(name, change) for name, change in changes.items() if change.n)


async def _stage_episodes(storage: FileTrajectoryStorage, run_id: str) -> list[Trajectory]:
    return [trajectory async for trajectory, _ in storage.find(TrajectoryFilter(run_id=run_id, failed=False))]


def _publications(state: LoopState) -> list[StageRecord]:
    seen: dict[str, StageRecord] = {}
    for record in state.records:
        if record.adapter is not None:
            seen.setdefault(record.adapter, record)
    return list(seen.values())


def _curves(state: LoopState) -> str:
    drawn = [record for record in state.records if "success" in record.metrics and record.name != "demonstrate"]
    held_out = [(slot, record) for slot, record in enumerate(drawn) if record.name.startswith("evaluate")]
    rollouts = [(slot, record) for slot, record in enumerate(drawn) if record.name.startswith("iteration")]
    estimates = {one.stage: one.success for one in evaluations(state)}
    success = tuple(
        Point(slot=slot, value=estimate.mean, low=estimate.low, high=estimate.high)
        for slot, record in held_out
        for estimate in (estimates[record.name],)
    )
    return line_chart(
        (
            Series(name="held-out success (95% interval)", colour="#0b5fae", points=success),
            Series(name="held-out mean reward", colour="#c25e00", points=_points(held_out, "reward")),
            Series(name="rollout mean reward", colour="#5b8c3e", points=_points(rollouts, "reward"), dashed=True),
        ),
        [_short(record.name) for record in drawn],
        "success, reward",
    )


def _points(records: Sequence[tuple[int, StageRecord]], metric: str) -> tuple[Point, ...]:
    return tuple(Point(slot=slot, value=record.metrics[metric]) for slot, record in records)


def _short(stage: str) -> str:
    return {"evaluate-base": "base", "evaluate-warm-start": "SFT", "evaluate-final": "RL"}.get(
        stage, stage.removeprefix("iteration-").lstrip("0") or "0"
    )


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{shown(cell)}</{tag}>' for cell in cells)}</tr>"


def _lineage_table(lineage: Sequence[Adapter]) -> str:
    rows = "".join(
        f"<tr><td><code>{shown(adapter.name)}</code></td>"
        f"<td><code>{shown(adapter.parent or 'base model')}</code></td>"
        f"<td>{adapter.step}</td><td><code>{adapter.sha256[:12]}</code></td></tr>"
        for adapter in lineage
    )
    return f"<table><tr><th>version</th><th>parent</th><th>step</th><th>sha256</th></tr>{rows}</table>"


def _examples(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> list[tuple[Trajectory, Trajectory]]:
    """The three goals with the largest gain in return, among those of both evaluations."""
    later = {trajectory.task.id: trajectory for trajectory in after}
    pairs = [(first, later[first.task.id]) for first in before if first.task.id in later]
    pairs.sort(key=lambda pair: (pair[0].episode_return - pair[1].episode_return, pair[0].task.id))
    return pairs[:3]


def _pair(before: Trajectory, after: Trajectory) -> str:
    return (
        f"<h3>{shown(before.task.id)}</h3><div class='pair'>{_conversation('base model', before)}"
        f"{_conversation(after.policy.served_name, after)}</div>"
    )


def _conversation(title: str, trajectory: Trajectory) -> str:
    turns = "".join(
        f"<div class='turn {_TURN.get(message.role, 'page')}'>{shown(message.content or '')}</div>"
        for message in trajectory.messages()
        if message.role != "system"
    )
    return (
        f"<div class='turns'><b>{shown(title)}</b>, return {trajectory.episode_return:.2f}, "
        f"{shown(trajectory.stop.value)}{turns}</div>"
    )

"""The report of evaluations: ``report.json`` and the self-contained page ``report.html``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.report.charts import (
    COLOURS,
    Bar,
    Point,
    Series,
    bar_chart,
    html_page,
    html_table,
    line_chart,
    shown,
)
from openhands_rl_plugin.evals.report.comparison import Comparison
from openhands_rl_plugin.evals.report.figures import AtK, EvaluationFigures
from openhands_rl_plugin.evals.report.tables import HEADINGS, comparison_rows, figure_row, interval, kind_counts, share

JSON, HTML = "report.json", "report.html"


class EvaluationReport(Frozen):
    """The content of ``report.json``."""

    version: int = 1
    groups: tuple[EvaluationFigures, ...]
    comparison: Comparison | None = None


def write_report(folder: Path, groups: Sequence[EvaluationFigures], comparison: Comparison | None = None) -> None:
    """Write both files into ``folder``, which is made. Raises ``StorageError``."""
    report = EvaluationReport(groups=tuple(groups), comparison=comparison)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made: {error.strerror}") from error
    write_file(folder / JSON, report.model_dump_json(indent=1) + "\n", PRIVATE)
    write_file(folder / HTML, report_page(groups, comparison), PRIVATE)


def report_page(groups: Sequence[EvaluationFigures], comparison: Comparison | None = None) -> str:
    """Tables of all figures, a curve of Pass@k and Best@k, and bars of outcomes."""
    body = ["<h1>Evaluation</h1>", html_table(HEADINGS, [figure_row(group) for group in groups])]
    if comparison is not None:
        body += ["<h2>Comparison</h2>", html_table(("", ""), comparison_rows(comparison))]
    if len(groups) > 1 or any(len(group.runs) > 1 for group in groups):
        body += ["<h2>Runs</h2>", _runs(groups)]
    if any(len(group.pass_at_k) > 1 for group in groups):
        body += ["<h2>Several attempts</h2>", *(_curves(group) for group in groups), _at_k(groups)]
    kinds = [kind for kind in groups[0].kinds if any(group.kinds[kind] for group in groups)] if groups else []
    bars = [
        Bar(label=group.label, parts=tuple(group.kinds[kind] / max(1, group.attempts) for kind in kinds))
        for group in groups
    ]
    body += [
        "<h2>What became of the attempts</h2>",
        bar_chart(bars, kinds, "attempts by outcome"),
        *(f"<p><code>{shown(group.label)}</code>: {shown(kind_counts(group))}</p>" for group in groups),
    ]
    return html_page("openhands-rl evaluation", body)


def _runs(groups: Sequence[EvaluationFigures]) -> str:
    rows = [
        (group.label, str(run.index), f"{run.resolved} of {run.known}", share(run.resolved, run.known))
        for group in groups
        for run in group.runs
    ]
    return html_table(("runs", "number", "resolved", "share"), rows)


def _curves(group: EvaluationFigures) -> str:
    """One chart a group, with Pass@k and Best@k as lines."""
    named = (("Pass@k (95% interval)", group.pass_at_k), ("Best@k (95% interval)", group.best_at_k))
    lines = [
        Series(name=name, colour=COLOURS[at], points=_points(figures))
        for at, (name, figures) in enumerate(named)
        if figures
    ]
    labels = [str(figure.k) for figure in group.pass_at_k]
    return f"<h3>{shown(group.label)}</h3>{line_chart(lines, labels, 'tasks solved')}"


def _points(figures: Sequence[AtK]) -> tuple[Point, ...]:
    return tuple(
        Point(slot=figure.k - 1, value=figure.estimate.mean, low=figure.estimate.low, high=figure.estimate.high)
        for figure in figures
    )


def _at_k(groups: Sequence[EvaluationFigures]) -> str:
    rows = [
        (
            group.label,
            f"{name}@{figure.k}",
            f"{figure.estimate.mean:.3f}",
            interval(figure.estimate),
            str(figure.estimate.n),
        )
        for group in groups
        for name, figures in (("Pass", group.pass_at_k), ("Best", group.best_at_k))
        for figure in figures
    ]
    return html_table(("runs", "", "share", "95% interval", "tasks"), rows)

"""Formats metrics: table cells for the terminal and the page, and ``report.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.statistics import Estimate
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.report.figures import Comparison, EvaluationFigures, Share

HEADINGS = (
    *("runs", "tasks", "attempts", "pass@1", "95% interval", "pass@k", "best@k", "reward", "stuck", "empty patch"),
    *("timed out", "malformed", "flagged", "commands flagged", "turns", "prompt tokens", "sampled tokens", "cost"),
    "seconds",
)


def figure_row(group: EvaluationFigures) -> tuple[str, ...]:
    """A group in a row under ``HEADINGS``."""
    last_pass, last_best = group.pass_at_k[-1:], group.best_at_k[-1:]
    return (
        group.label,
        str(group.tasks),
        str(group.attempts),
        number(group.pass_at_1.mean),
        interval(group.pass_at_1),
        f"{number(last_pass[0].estimate.mean)} (k={last_pass[0].k})" if len(group.pass_at_k) > 1 else "-",
        f"{number(last_best[0].estimate.mean)} (k={last_best[0].k})" if last_best else "-",
        "-" if group.reward is None else number(group.reward),
        *(rate(each) for each in (group.stuck, group.empty_patch, group.timed_out, group.malformed)),
        *(rate(each) for each in (group.flagged, group.commands_flagged)),
        "-" if group.turns is None else f"{group.turns:.1f}",
        f"{group.prompt_tokens:,}",
        f"{group.completion_tokens:,}",
        "-" if group.cost is None else f"{group.cost:,.2f}",
        f"{group.seconds:.1f}",
    )


def about_row(group: EvaluationFigures) -> tuple[tuple[str, str], ...]:
    """What a group is, beside its figures; the parts that are known."""
    rows = (
        ("agent", group.agent),
        ("model", group.model),
        ("data", "-".join(filter(None, (group.dataset, group.split)))),
        ("began", group.started),
        ("seed", "" if group.seed is None else str(group.seed)),
        ("in force", group.in_force),
        ("machine", group.machine),
        ("command", group.command),
    )
    return tuple(row for row in rows if row[1])


def comparison_rows(comparison: Comparison) -> tuple[tuple[str, str], ...]:
    """The comparison, a line each."""
    change = comparison.difference
    return (
        ("first", comparison.first),
        ("second", comparison.second),
        (
            "tasks of both",
            f"{comparison.tasks} ({comparison.only_first} of the first alone, {comparison.only_second} "
            "of the second alone are left out)",
        ),
        ("pass@1 of the first", number(comparison.rate_first)),
        ("pass@1 of the second", number(comparison.rate_second)),
        (
            "difference",
            f"{change.mean:+.3f}, 95% interval {change.low:+.3f} to {change.high:+.3f} (bootstrap over tasks)",
        ),
        ("p-value", f"{comparison.p_value:.4g} ({comparison.test}, two-sided)"),
        ("solved more often", f"{len(comparison.gained)}: {_some(comparison.gained)}"),
        ("solved less often", f"{len(comparison.lost)}: {_some(comparison.lost)}"),
    )


def kind_counts(group: EvaluationFigures) -> str:
    """How many attempts there are of every kind that occurred."""
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in group.kinds.items() if count) or "nothing"


def rate(found: Share) -> str:
    """A share in per cent."""
    return share(found.count, found.of)


def share(count: int, of: int) -> str:
    """A share in per cent; ``-`` of nothing."""
    return f"{100 * count / of:.1f} %" if of else "-"


def interval(estimate: Estimate) -> str:
    """The bounds of an estimate; ``-`` without data."""
    return f"{estimate.low:.3f} to {estimate.high:.3f}" if estimate.n else "-"


def number(value: float | None) -> str:
    """Three decimals; ``-`` for nothing."""
    return "-" if value is None else f"{value:.3f}"


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:10])
    return f"{shown}, ..." if len(names) > 10 else shown


JSON = "report.json"


class EvaluationReport(Frozen):
    """The content of ``report.json``."""

    version: int = 1
    groups: tuple[EvaluationFigures, ...]
    comparison: Comparison | None = None


def write_json_report(folder: Path, groups: Sequence[EvaluationFigures], comparison: Comparison | None = None) -> None:
    """Write it into ``folder``, which is made. Raises ``StorageError``."""
    report = EvaluationReport(groups=tuple(groups), comparison=comparison)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made: {error.strerror}") from error
    write_file(folder / JSON, report.model_dump_json(indent=1) + "\n", PRIVATE)

"""Prints the results of ``openhands-rl doctor`` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from openhands_rl_plugin.cli.doctor_checks.findings import Finding, Level
from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.trajectories.drift import DriftReport
from openhands_rl_plugin.trajectories.view.terminal import table

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def print_drift(console: Console, report: DriftReport) -> None:
    """Print the causes in a table, the costliest first, then the setting against each, with examples."""
    found = f"{report.episodes:,} episodes, {report.turns:,} turns with token ids in {report.segments:,} segments"
    tokens = f"{report.tokens:,} tokens, {report.sampled_tokens:,} of them sampled"
    console.print(Text(f"{found} ({report.segments_by_drift:,} because of drift): {tokens}"))
    if not report.causes:
        console.print(Text("every turn extends the one before", "green"))
        return
    columns = ("cause", "breaks", "episodes", "tokens again", "of all", "lost turns")
    rows = [
        (
            each.cause.value,
            f"{each.breaks:,}",
            f"{each.episodes:,}",
            f"{each.repeated_tokens:,}",
            f"{each.repeated_tokens / report.tokens:.0%}" if report.tokens else "-",
            f"{each.lost_turns:,}",
        )
        for each in report.causes
    ]
    console.print(table(columns, rows, numbers=columns[1:]))
    for each in report.causes:
        console.print()
        console.print(Text(each.cause.value, "bold"))
        console.print(Text(f"  set: {each.setting}"), soft_wrap=True)
        for example in each.examples:
            where = f"{example.trajectory_id} #{example.previous} -> #{example.node} at token {example.at}"
            changed = f"{example.removed!r} became {example.inserted!r}"
            console.print(Text(visible(f"  see: {where}: {changed}"), "dim"), soft_wrap=True)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print a line for each finding, and its remedy under it."""
    for each in findings:
        line = Text(f"{each.level.value:<5}", _STYLES[each.level])
        line.append(visible(f"{each.what}: {each.said}"), "default")
        console.print(line, soft_wrap=True)
        if each.remedy:
            console.print(Text(visible(f"      {each.remedy}"), "dim"), soft_wrap=True)

"""The table of ``openhands-rl tasks list``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.transcript import visible
from openhands_rl_plugin.evals.runs.own_suites import own_suite_of
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.lineage import TasksLineage


def table_of(instances: Sequence[Instance], lineage: TasksLineage | None) -> Table:
    """One line a task: what fails, how the bug was made, and whether the gate let it pass."""
    gated = lineage is not None and lineage.checked
    known = {task.instance_id: task for task in lineage.tasks} if lineage is not None else {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("task", "split", "made by", "fail", "pass", "checked", "report"):
        # On a narrow terminal the long ones give way: rich narrows columns that may wrap first, and no cell wraps.
        table.add_column(
            name, no_wrap=name not in ("task", "report"), justify="right" if name in ("fail", "pass") else "left"
        )
    for each in instances:
        task = known.get(each.instance_id)
        check = task.check if task is not None else None
        cells = (
            each.instance_id,
            str(each.extra.get("split", "")),
            task.modifier if task is not None else _kind(each),
            str(len(each.fail_to_pass)),
            str(len(each.pass_to_pass)),
            check.problems[0] if check and check.problems else "yes" if check or gated else "no",
            each.problem_statement.partition("\n")[0],
        )
        table.add_row(*(Text(visible(redact_text(cell)), no_wrap=True, overflow="ellipsis") for cell in cells))
    return table


def _kind(instance: Instance) -> str:
    """Of a row of another package's suite the kind of its bug."""
    own = own_suite_of(instance)
    spec = instance.extra.get(own.column) if own is not None else None
    return str(spec.get("kind", "")) if isinstance(spec, dict) else ""

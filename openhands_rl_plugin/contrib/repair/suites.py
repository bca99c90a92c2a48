"""The suites ``repair-1``, ``repair-2`` and ``repair-3``: by level, what a statement gives away."""

from __future__ import annotations

from openhands_rl_plugin.contrib.repair.backend import RepairBackend
from openhands_rl_plugin.contrib.repair.other_bugs import more_instances
from openhands_rl_plugin.contrib.repair.rows import (
    COLUMN,
    DIRECTORY,
    MORE,
    REPAIR,
    Level,
    data_file,
    repair_instances,
)
from openhands_rl_plugin.evals.runs.episodes import EvalTask
from openhands_rl_plugin.evals.runs.own_suites import OwnSuite, Suite
from openhands_rl_plugin.evals.runs.suites import swe_task


class RepairSuite(OwnSuite):
    """The repair tasks at one level."""

    further = MORE
    rows = data_file("repair.jsonl")
    column = COLUMN
    directory = DIRECTORY

    def __init__(self, level: Level) -> None:
        name = f"{REPAIR}-{level}"
        self.level: Level = level
        self.suite = Suite(name=name, dataset=name, split="heldout")

    def tasks(self, split: str) -> tuple[EvalTask, ...]:
        """As in ``OwnSuite``."""
        instances = more_instances(self.level) if split == MORE else repair_instances(self.level, split)
        suite = self.suite.model_copy(update={"split": split})
        return tuple(swe_task(instance, suite) for instance in instances)

    def backend(self) -> RepairBackend:
        """As in ``OwnSuite``."""
        return RepairBackend()


LEVEL_1, LEVEL_2, LEVEL_3 = RepairSuite(1), RepairSuite(2), RepairSuite(3)

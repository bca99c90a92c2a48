"""Repair tasks as instances: rows of a file, at one of three levels of what the statement gives away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from openhands_rl_plugin.contrib.repair.bugs import function_hint
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.evals.swe.instances import Instance, read_instances

REPAIR = "repair"
COLUMN = "repair"
"""The column of a row that makes it a repair task."""
RUN_TESTS = "run_tests.py"
DIRECTORY = "repo"
"""The folder of the repository below ``/workspace``: short, because small models read it in every command."""
BY_TESTS: JsonObject = {
    "reward": "command",
    "reward_options": {"command": f"python3 {RUN_TESTS} -q", "timeout": 30},
}
"""Options of the value ``reward``."""
TESTS_AS_VALUE: JsonObject = {"value": "reward", "value_options": BY_TESTS}
"""Options of a search by which a state is worth what the repository's own tests say of it."""
MORE = "more"
"""The split of further training tasks, which ``other_bugs`` reads."""
Level = Literal[1, 2, 3]


def data_file(name: str) -> Path:
    """A file that is published with the suites."""
    return Path(__file__).parent / "data" / name


class RepairSpec(Frozen):
    """The column ``repair`` of a row.

    ``files`` is the repository with the bug, without ``run_tests.py``. ``line`` is the first wrong line of ``path``. A
    call is ``[positional, keywords]`` of literals as text; ``expected`` has the outcomes of the function without the
    bug (``calling.canonical``). The first ``shown`` calls are the repository's tests, the others are hidden.
    """

    package: str
    license: str
    kind: str
    path: str
    function: str
    line: int = Field(ge=1)
    files: Mapping[str, str]
    calls: tuple[tuple[tuple[str, ...], Mapping[str, str]], ...]
    expected: tuple[str, ...]
    shown: int = Field(ge=1)


def spec_of(instance: Instance) -> RepairSpec:
    """The column ``repair``. Raises ``ConfigError`` for one that is not as it should be."""
    try:
        return RepairSpec.model_validate(instance.extra[COLUMN])
    except (KeyError, ValidationError) as error:
        raise ConfigError(f"{instance.instance_id}: its column {COLUMN!r} is no repair task") from error


def repository_files(spec: RepairSpec) -> dict[str, str]:
    """All files of the repository that an agent works in."""
    runner = data_file("repair_run_tests.txt").read_text(encoding="utf-8")
    return {**spec.files, RUN_TESTS: runner}


def statement(spec: RepairSpec, level: Level, failing: Sequence[str]) -> str:
    """The agent's instruction: the failing test; at level 2 the function, at level 1 its head, the line and how that
    reads, too.

    The line stands alone without its indentation, as it has to be written in an edit: small models copy a text that
    they are given far better than one that they have to find by its number. The head has the arguments' names, which
    a repair may need.
    """
    file, _, test = failing[0].partition("::")
    text = spec.files[spec.path]
    line = text.split("\n")[spec.line - 1].strip()
    within = function_hint(text, spec.function, line)
    where = {
        1: f"The bug is in line {spec.line} of {spec.path}{within}\n{line}\n",
        2: f"The bug is in the function {spec.function} in {spec.path}. ",
        3: "Find the bug in the code that it tests. ",
    }[level]
    return f"{test} in {file} fails. {where}Fix it, do not change the tests. Run the tests: python3 {RUN_TESTS}"


def at_level(instance: Instance, level: Level) -> Instance:
    """The instance with the statement of that level, under an id of its own."""
    text = statement(spec_of(instance), level, instance.fail_to_pass)
    return instance.model_copy(update={"instance_id": f"{instance.instance_id}-{level}", "problem_statement": text})


def repair_instances(level: Level, split: str, file: Path | None = None) -> tuple[Instance, ...]:
    """The tasks of one split (``all``: of both). Raises ``ConfigError`` for another one."""
    instances = read_instances(file or data_file("repair.jsonl"))
    known = sorted({str(each.extra.get("split")) for each in instances})
    if split not in (*known, "all"):
        others = [MORE] if file is None else []
        raise ConfigError(f"{REPAIR} has no split {split!r}; it has {', '.join([*known, 'all', *others])}")
    return tuple(at_level(each, level) for each in instances if split in ("all", each.extra.get("split")))

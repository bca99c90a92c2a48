"""Suites by name, those that other packages bring, their tasks, the instruction of a task, and where it is graded.

Other packages' are entry points of the group ``openhands_rl_plugin.suites``, each an ``OwnSuite``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError, describe, from_extra, unknown_name
from openhands_rl_plugin.core.types import JsonObject, Task
from openhands_rl_plugin.evals.runs.plan import ENVIRONMENT, Suite, folder_name
from openhands_rl_plugin.evals.swe.backends import DockerBackend, LocalBackend, default_cache
from openhands_rl_plugin.evals.swe.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.instances import (
    Instance,
    InstanceBackend,
    instance_of,
    read_instances,
    read_rows,
    row_of,
)


class EvalTask(NamedTuple):
    """A task of a suite with its row of the dataset."""

    task: Task
    row: JsonObject
    instance: Instance | None = None


class OwnSuite:
    """A suite of another package.

    ``suite`` has its name and its default split, ``splits`` those to train on and to hold out, ``further`` the split of
    further training tasks, if it has any, ``rows`` the file of its rows. Of a suite with tests, rows of any file that
    have ``column`` are its tasks, whose repository is ``directory`` below ``/workspace``. ``server``: the words of the
    ``openhands-rl`` command that serves its environment.
    """

    suite: Suite
    splits: tuple[str, str] = ("train", "heldout")
    further: str = ""
    rows: Path | None = None
    column: str = ""
    directory: str = ""
    server: tuple[str, ...] = ()

    def tasks(self, split: str) -> tuple[EvalTask, ...]:
        """The tasks of one split; ``all``: of all that are no further ones. Raises ``ConfigError``."""
        raise NotImplementedError

    def backend(self) -> InstanceBackend:
        """Sets up and grades its rows, without an environment of their own."""
        raise NotImplementedError

    def serving(self, settings: RLSettings) -> AbstractContextManager[RLSettings]:
        """Serve the suite's environment until the block ends; the settings that connect to it."""
        return nullcontext(settings)


def own_suite(name: str) -> OwnSuite | None:
    """The suite of that name; ``None`` where no package has it. Raises ``ConfigError`` where it cannot be loaded."""
    return registry.find("suites", name) if name in registry.names("suites") else None


@cache
def own_suites() -> tuple[OwnSuite, ...]:
    """All of them; those that cannot be loaded are left out."""
    found = []
    for name in registry.names("suites"):
        try:
            found.append(registry.find("suites", name))
        except ConfigError:
            continue  # the error is raised when the suite is requested by name
    return tuple(found)


def own_suite_of(instance: Instance) -> OwnSuite | None:
    """The suite whose kind of row this is."""
    return next((each for each in own_suites() if each.column and instance.extra.get(each.column)), None)


def indexed_tasks(
    environment: str, indices: Iterable[int], split: str, rows: Sequence[JsonObject] = ()
) -> tuple[EvalTask, ...]:
    """A task for each index that the environment's ``reset`` takes, with its row where there are ``rows``. Ids are
    valid folder names."""
    found: list[EvalTask] = []
    for index in indices:
        data: JsonObject = {"idx": index, **({"row": rows[index]} if rows else {})}
        task = Task(id=f"{folder_name(environment)}-{index}", environment=environment, data=data, split=split)
        found.append(EvalTask(task, {**data, "environment": environment}))
    return tuple(found)


_INSTRUCTION = """\
<uploaded_files>
/workspace/{directory}
</uploaded_files>
I've uploaded a python code repository in the directory {directory}. Consider the following PR description:

<pr_description>
{problem_statement}
</pr_description>

Can you help me implement the necessary changes to the repository so that the requirements specified in the \
<pr_description> are met?
I've already taken care of all changes to any of the test files described in the <pr_description>. This means you \
DON'T have to modify the testing logic or any of the tests in any way!
Your task is to make the minimal changes to non-tests files in the /workspace directory to ensure the <pr_description> \
is satisfied.
Follow these steps to resolve the issue:
1. As a first step, it might be a good idea to explore the repo to familiarize yourself with its structure.
2. Create a script to reproduce the error and execute it with `python <filename.py>` using the BashTool, to confirm \
the error
3. Edit the sourcecode of the repo to resolve the issue
4. Rerun your reproduce script and confirm that the error is fixed!
5. Think about edgecases and make sure your fix handles them as well
Your thinking should be thorough and so it's fine if it's very long.
"""

_GO_ON = (
    "Please continue working on the task on whatever approach you think is suitable.\n"
    "If you think you have solved the task, please first send your answer to user through message and then finish"
    " the interaction.\n"
    "IMPORTANT: YOU SHOULD NEVER ASK FOR HUMAN HELP.\n"
)
REPLIES = (_GO_ON, f'{_GO_ON}If you want to give up, use the "finish" tool to finish the interaction.\n')
"""The user's replies to messages without a tool call: to the first, and to each later one."""


def instruction_of(instance: Instance) -> str:
    """The first message of the conversation."""
    problem = instance.problem_statement
    if (own := own_suite_of(instance)) is not None:
        return f"{problem} The repository is /workspace/{own.directory}."
    # Not by str.format: a problem statement holds braces.
    return _INSTRUCTION.replace("{directory}", directory_of(instance)).replace("{problem_statement}", problem)


def directory_of(instance: Instance) -> str:
    """The name of the repository's directory below ``/workspace``."""
    if (own := own_suite_of(instance)) is not None:
        return own.directory
    return f"{instance.repo}__{instance.version}".replace("/", "__")


LOCAL = "swe-local"
TESTS = "tests"
"""The reward of tasks with tests."""
ENDINGS = (".jsonl", ".json", ".parquet")

FILE_SPLITS = ("train", "heldout")
_KEPT = ("instance_id", "repo", "version", "base_commit", "problem_statement")


SUITES: Mapping[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(name=LOCAL, dataset=LOCAL, split="heldout"),
        Suite(name="swe-bench-lite", dataset="princeton-nlp/SWE-bench_Lite", split="test", on_hub=True),
        Suite(name="swe-bench-verified", dataset="princeton-nlp/SWE-bench_Verified", split="test", on_hub=True),
        Suite(name="swe-gym", dataset="SWE-Gym/SWE-Gym", split="train", on_hub=True),
        Suite(name="swe-gym-lite", dataset="SWE-Gym/SWE-Gym-Lite", split="train", on_hub=True),
        Suite(name=ENVIRONMENT, dataset=ENVIRONMENT, split="test", software=False),
    )
}


def find_suite(name: str, split: str | None = None) -> Suite:
    """The suite of that name, or of a file of rows. Raises ``ConfigError`` with the nearest name."""
    if (own := own_suite(name)) is not None:
        suite = own.suite
    elif name in SUITES:
        suite = SUITES[name]
    elif name.endswith(ENDINGS):
        suite = Suite(name=name, dataset=Path(name).name.partition(".")[0] or "rows", split="test")
    else:
        raise ConfigError(
            unknown_name("suite", name, [*SUITES, *registry.names("suites")])
            + f", or a file of rows ({', '.join(ENDINGS)})"
        )
    return suite if split is None else suite.model_copy(update={"split": split})


def swe_tasks(suite: Suite, dataset_file: Path | None = None) -> tuple[EvalTask, ...]:
    """The tasks of a SWE-bench suite. Rows of the hub are downloaded with ``datasets`` unless a file is given.

    Raises ``ConfigError``.
    """
    if dataset_file is None and (own := own_suite(suite.name)) is not None:
        return own.tasks(suite.split)
    if dataset_file is not None:
        instances = read_instances(dataset_file)
    elif suite.name == LOCAL:
        instances = _of_split(read_instances(local_rows()), suite.split, LOCAL)
    elif suite.on_hub:
        instances = _from_hub(suite)
    else:
        instances = read_instances(Path(suite.name))
        if suite.split in FILE_SPLITS and has_splits(instances):
            instances = _of_split(instances, suite.split, suite.name)
    return tuple(swe_task(instance, suite) for instance in instances)


def swe_task(instance: Instance, suite: Suite) -> EvalTask:
    """An instance as a task. The task does not hold the gold patch; the row does, and no agent sees it."""
    row = row_of(instance)
    task = Task(
        id=instance.instance_id,
        environment=suite.dataset,
        instruction=instruction_of(instance),
        data={name: row[name] for name in _KEPT if name in row},
        split=str(instance.extra.get("split") or suite.split),
    )
    return EvalTask(task, row, instance)


def tasks_of(suite: Suite, environment: str, count: int | None, rows: Path | None = None) -> tuple[EvalTask, ...]:
    """The tasks of a suite. Those of ``environment``: the (first ``count``) rows of a file, or the first ``count``
    numbers. Raises ``ConfigError``."""
    if suite.software:
        return swe_tasks(suite, rows)
    if suite.name != ENVIRONMENT:
        return registry.find("suites", suite.name).tasks(suite.split)
    if rows is not None:
        table = read_rows(rows)
        return indexed_tasks(environment, range(len(table))[:count], suite.split, table)
    if count is None:
        raise ConfigError(
            "an environment does not say how many tasks it has: give --tasks N, or its rows with --dataset-file"
        )
    return indexed_tasks(environment, range(count), suite.split)


def local_rows() -> Path:
    """The file with the tasks of the laptop suite."""
    return Path(str(files("openhands_rl_plugin.evals.tasks") / "data" / "swe_local.jsonl"))


def rows_file(name: str) -> Path:
    """The file of the rows of a suite, or the file of that name. Raises ``ConfigError`` where there is none."""
    own = own_suite(name)
    path = local_rows() if name == LOCAL else own.rows if own is not None and own.rows is not None else Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: there is no such file; make one with `openhands-rl tasks make`, or give {LOCAL}")
    return path


def has_splits(instances: Iterable[Instance]) -> bool:
    """Whether rows say in a column ``split`` which of them are to train on and which are held out."""
    return {str(each.extra.get("split")) for each in instances} == set(FILE_SPLITS)


def _of_split(instances: tuple[Instance, ...], split: str, name: str) -> tuple[Instance, ...]:
    if split == "all":
        return instances
    chosen = tuple(instance for instance in instances if instance.extra.get("split") == split)
    if not chosen:
        known = sorted({str(instance.extra.get("split")) for instance in instances})
        raise ConfigError(f"{name} has no split {split!r}; it has {', '.join([*known, 'all'])}")
    return chosen


def _from_hub(suite: Suite) -> tuple[Instance, ...]:
    with from_extra("exchange", "datasets"):
        import datasets
        from datasets.exceptions import DatasetsError
    try:
        rows = datasets.load_dataset(suite.dataset, split=suite.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise ConfigError(
            f"{suite.dataset} cannot be downloaded ({describe(error)}); give a file with its rows "
            "(evaluate: --dataset-file)"
        ) from error
    return tuple(instance_of(dict(row)) for row in rows)


def make_backend(
    name: Literal["local", "docker"],
    *,
    mirror: Path | None = None,
    cache: Path | None = None,
    network: bool = False,
    instances: Iterable[Instance] = (),
) -> InstanceBackend:
    """The back end of that name, for ``instances``: tasks of another package's suite have a back end of their own.

    ``mirror``: a folder of git repositories to use instead of clones from GitHub. Repositories of ``swe-local`` tasks
    are made from the packages in their rows. ``network``: tests may use it.
    The reward-hack guard is always on. Raises ``ConfigError``.
    """
    if mirror is not None and not mirror.is_dir():
        raise ConfigError(f"--mirror {mirror}: no such folder")
    if len(suites := {own_suite_of(each) for each in instances}) == 1 and (own := suites.pop()) is not None:
        return own.backend()
    place = cache or default_cache()
    guard = RewardHackGuard(place / "calibrations")
    if name == "docker":
        return DockerBackend(guard=guard, network=network)
    return LocalBackend(cache=place, mirror=mirror, guard=guard, network=network)

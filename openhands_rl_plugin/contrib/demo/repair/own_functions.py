"""The demo on the functions of the user's own repository, beside those of the suite."""

from __future__ import annotations

import random
from collections.abc import Sequence, Set

from openhands_rl_plugin.apps.loop.tasks import LoopTasks
from openhands_rl_plugin.contrib.demo.repair.options import RepairOptions
from openhands_rl_plugin.contrib.repair.own import OwnTasks, make_own_tasks, own_tasks, shown_functions
from openhands_rl_plugin.contrib.repair.rows import LEVELS, at_level, spec_of
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import HELD_OUT
from openhands_rl_plugin.evals.runs.episodes import EvalTask
from openhands_rl_plugin.evals.runs.suites import swe_task
from openhands_rl_plugin.evals.swe.backends.caching import default_cache
from openhands_rl_plugin.evals.tasks.sources.own_repository import find_repository, repository_lines
from openhands_rl_plugin.evals.tasks.split import TRAIN
from openhands_rl_plugin.training.loop.stages import LoopListener


def own_functions(options: RepairOptions, listener: LoopListener, *, anew: bool) -> OwnTasks:
    """The tasks of ``options.repository``, which lie in the run's folder; ``anew``: they are made now.

    Raises as ``find_repository``, ``make_own_tasks`` and ``own_tasks`` do.
    """
    assert options.repository is not None
    repository, folder = find_repository(options.repository), options.run_directory / "tasks"
    if anew:
        listener.noted(f"making tasks of the functions of {repository.name}: its tests run once, four minutes at most")
        notes = make_own_tasks(
            repository,
            folder,
            default_cache(),
            most_held_out=options.held_out,
            tests=options.tests,
            requirements=options.requirements,
        )
        for line in notes:
            listener.noted(line)
    own = own_tasks(folder, repository.name)
    if own is None:
        raise ConfigError(f"{folder} has lost its tasks: start over with --fresh")
    made_of = repository.model_copy(update={"commit": own.commit})
    for line in (*repository_lines(made_of, repository.commit), own.line()):
        listener.noted(line)
    return own


def beside_own(suite: LoopTasks, own: OwnTasks, options: RepairOptions) -> LoopTasks:
    """The tasks of a run that is evaluated on held-out functions of a repository.

    Every second training task is the repository's, as long as there are any; demonstrations and the others are the
    suite's, without those that show a function with the name of one of the repository's.
    """
    level = LEVELS[options.level - 1]
    mine = {spec_of(each).function for each in (*own.training, *own.held_out)}
    demonstrations, published = (_without(mine, part) for part in (suite.demonstrations, suite.training))
    training, held_out = (
        [swe_task(at_level(each, level), suite.suite.model_copy(update={"split": part})) for each in rows]
        for part, rows in ((TRAIN, own.training), (HELD_OUT, own.held_out))
    )
    random.Random(options.seed).shuffle(training)
    mixed = [each for pair in zip(training, published, strict=False) for each in pair]
    rest = [*training[len(mixed) // 2 :], *published[len(mixed) // 2 :]]
    return LoopTasks(suite.suite, demonstrations, (*mixed, *rest), tuple(held_out))


def _without(functions: Set[str], entries: Sequence[EvalTask]) -> tuple[EvalTask, ...]:
    return tuple(
        entry
        for entry in entries
        if entry.instance is not None and functions.isdisjoint(shown_functions(entry.instance))
    )

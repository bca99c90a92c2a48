"""Suites that other packages bring: entry points of the group ``openhands_rl_plugin.suites``, each an ``OwnSuite``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.report.run_records import ENVIRONMENT as ENVIRONMENT
from openhands_rl_plugin.evals.runs.environment_runner import folder_name
from openhands_rl_plugin.evals.runs.outcome import EvalTask
from openhands_rl_plugin.evals.swe.types import Instance, InstanceBackend


class Suite(Frozen):
    """A suite by name. ``dataset`` is its name in run folders, and on the Hugging Face hub if ``on_hub``."""

    name: str
    dataset: str
    split: str
    software: bool = True
    on_hub: bool = False

    def of_environment(self, name: str) -> Suite:
        """The suite whose results are kept apart from those of other environments; other suites as they are."""
        return self.model_copy(update={"dataset": folder_name(name)}) if self.name == ENVIRONMENT and name else self

    def environment(self, settings: RLSettings) -> str:
        """The environment of its tasks: of a suite with an environment of its own, the suite's name."""
        return settings.env_name if self.software or self.name == ENVIRONMENT else self.name


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


def require_own_suite(name: str) -> OwnSuite:
    """The suite of that name. Raises ``ConfigError``."""
    return registry.find("suites", name)


@cache
def own_suites() -> tuple[OwnSuite, ...]:
    """All of them; those that cannot be loaded are left out."""
    found = []
    for name in registry.names("suites"):
        try:
            found.append(registry.find("suites", name))
        except ConfigError:
            continue  # whoever asks for it by its name is told
    return tuple(found)


def own_suite_of(instance: Instance) -> OwnSuite | None:
    """The suite whose kind of row this is."""
    return next((each for each in own_suites() if each.column and each.column in instance.extra), None)

"""What generations of a watch can be measured in."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evaluation.performance.watch import repair_world, world
from evaluation.performance.watch.exchange import Exchange, shopping, trained_on
from evaluation.performance.watch.poison import leaking
from evaluation.performance.watch.world import Served
from openhands_rl_plugin.apps.loop.tasks import LoopTasks
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.types import Trajectory


class Settings(Protocol):
    """Writes the settings of a watch."""

    def __call__(self, folder: Path, at: Served, watch: str = "", training: str = "") -> Path:
        """Their file in ``folder``."""
        ...


class Play(Protocol):
    """Sessions of users."""

    def __call__(
        self, settings: RLSettings, run_id: str, goals: Sequence[int], *, served: str | None = None
    ) -> Coroutine[Any, Any, tuple[Trajectory, ...]]:
        """One a goal, into the store."""
        ...


@dataclass(frozen=True)
class World:
    """``goals``: what users ask for; ``others``: what the suite has beside it, the bystanders. ``leak``: harm done to a
    candidate."""

    goals: Sequence[int]
    others: Sequence[int]
    model: Callable[[Path], Path]
    served: Callable[[Path], AbstractContextManager[Served]]
    settings: Settings
    suite: Callable[[], LoopTasks]
    play: Play
    succeeded: Callable[[Trajectory], bool]
    leak: Exchange

    def bystanders(self) -> frozenset[str]:
        """Ids of the suite's tasks that users never give."""
        every = (*self.goals, *self.others)
        held_out = enumerate(self.suite().held_out)
        return frozenset(each.task.id for at, each in held_out if every[at % len(every)] in self.others)


WORLDS = {
    "shop": World(
        goals=world.GOALS,
        others=world.OTHER_GOALS,
        model=lambda path: world.write_model(path, world.OTHER_GOALS, habits=(leaking,)),
        served=world.served,
        settings=world.write_settings,
        suite=lambda: world.suite(goals=world.EVERY_GOAL),
        play=world.play,
        succeeded=world.succeeded,
        leak=trained_on(shopping(leaking)),
    ),
    "repair": World(
        goals=repair_world.GOALS,
        others=repair_world.OTHER_GOALS,
        model=repair_world.write_model,
        served=repair_world.served,
        settings=repair_world.write_settings,
        suite=repair_world.suite,
        play=repair_world.play,
        succeeded=repair_world.succeeded,
        leak=trained_on(repair_world.leaking_dialogues),
    ),
}

"""A world to plan in whose best return is known."""

from __future__ import annotations

import copy
import hashlib
from functools import cached_property

from pydantic import Field

from openhands_rl_plugin.core.types import Frozen, JsonObject, Message, Observation, Task


class PlanningOptions(Frozen):
    """A tree of ``depth`` moves with ``branching`` choices each; ``seed`` draws what every move earns."""

    depth: int = Field(default=4, ge=1)
    branching: int = Field(default=4, ge=1)
    seed: int = 0


class PlanningEnvironment:
    """Choose a number at every junction; each move earns something between 0 and 1 / depth, as ``seed`` has drawn it.

    The best return is found by looking at everything (``optimum``, ``exhaustive_steps``). ``steps_taken`` counts the
    steps of this episode and of none of its forks.
    """

    Options = PlanningOptions

    def __init__(self, options: PlanningOptions | None = None) -> None:
        self.options = options or PlanningOptions()
        self.path: tuple[int, ...] = ()
        self.steps_taken = 0
        self.earned = 0.0

    @cached_property
    def optimum(self) -> float:
        """The highest return that any sequence of moves earns."""
        return self._best_from(())

    @property
    def exhaustive_steps(self) -> int:
        """Steps it takes to try every move once at every junction."""
        return sum(self.options.branching**level for level in range(1, self.options.depth + 1))

    def worth(self, path: tuple[int, ...]) -> float:
        """What the last move of ``path`` earns."""
        drawn = hashlib.blake2b(repr((self.options.seed, path)).encode(), digest_size=8).digest()
        return int.from_bytes(drawn) / 2**64 / self.options.depth

    async def reset(self, task: Task) -> Observation:
        """Stand at the root."""
        rules = f"Choose one of {self.options.branching} ways, {self.options.depth} times. Answer with its number."
        return Observation(messages=(Message(role="system", content=rules), self._junction()))

    async def step(self, action: Message) -> Observation:
        """Go one of the ways; anything else is answered and earns nothing."""
        word = (action.content or "").strip()
        self.steps_taken += 1
        if not word.isdecimal() or int(word) >= self.options.branching:
            return Observation(messages=(Message(role="user", content="That is no number of a way."),))
        self.path = (*self.path, int(word))
        reward = self.worth(self.path)
        self.earned += reward
        return Observation(messages=(self._junction(),), reward=reward, terminated=self._arrived)

    async def evidence(self) -> JsonObject:
        """The way and what it earned."""
        return {"path": list(self.path), "return": self.earned, "steps": self.steps_taken}

    async def close(self) -> None:
        """Nothing is held."""

    async def fork(self) -> PlanningEnvironment:
        """A copy that goes on by itself and counts its own steps."""
        twin = copy.copy(self)
        twin.steps_taken = 0
        return twin

    @property
    def _arrived(self) -> bool:
        return len(self.path) >= self.options.depth

    def _junction(self) -> Message:
        return Message(role="user", content=f"You came by {'-'.join(map(str, self.path)) or 'nowhere'}.")

    def _best_from(self, path: tuple[int, ...]) -> float:
        if len(path) == self.options.depth:
            return 0.0
        ways = ((*path, way) for way in range(self.options.branching))
        return max(self.worth(way) + self._best_from(way) for way in ways)

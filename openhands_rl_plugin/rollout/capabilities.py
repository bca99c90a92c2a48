"""What some environments can do besides; each is a protocol that a caller asks for with ``isinstance``.

>>> from openhands_rl_plugin.testing import GridEnvironment
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from openhands_rl_plugin.core.errors import boundary
from openhands_rl_plugin.core.types import FailureKind, Observation


@runtime_checkable
class ReservesForks(Protocol):
    """An environment whose server has room for a limited number of episodes. A capability, not a flag.

    Its world may say ``most_forks``: how many forks it has room for (``None``: not known).

    Example:
        >>> isinstance(GridEnvironment(), ReservesForks)
        False
    """

    def reserve(self, forks: int) -> None:
        """Let the next ``reset`` find room for forks as well, before the episode begins.

        Args:
            forks: how many the strategy holds at a time; 0 when it needs none.
        """
        ...


@runtime_checkable
class PaysWhenCut(Protocol):
    """An environment that pays at the end only, also for an episode that a limit cut. A capability, not a flag.

    Example:
        >>> isinstance(GridEnvironment(), PaysWhenCut)
        False
    """

    async def cut_short(self) -> Observation | None:
        """End the episode where it stands.

        Returns:
            An observation without messages, whose reward is the last action's; ``None`` where nothing is left to pay.

        Raises:
            InfrastructureError: the environment is gone.
            BadEnvironmentError: its server broke the protocol.
        """
        ...


async def reward_when_cut(environment: object, *, answered: bool) -> float | None:
    """What a limit that ended an episode leaves to be paid for its last action, if that was answered.

    Raises ``CaughtFailure``.
    """
    if not answered or not isinstance(environment, PaysWhenCut):
        return None
    with boundary(FailureKind.ENVIRONMENT, "environment.cut_short"):
        paid = await environment.cut_short()
    return None if paid is None else paid.reward

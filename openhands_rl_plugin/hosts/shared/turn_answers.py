"""The turns of a session that a model can be asked about, and what a host makes of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

from openhands_rl_plugin.core.errors import EpisodeError
from openhands_rl_plugin.core.types import Completion, Message
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.known_turns import KnownTurns, RequestedTurn, sampled_below_head


class TurnAnswers[T: RequestedTurn, A]:
    """The live turn and those that forks have reached; an ``A`` for each answer that can still be executed."""

    def __init__(self, episode: HostEpisode) -> None:
        self._episode = episode
        self._turns = KnownTurns[T]()
        self._of: dict[Message, A] = {}

    def open(self, turn: T) -> None:
        """Begin a turn. Earlier turns and answers are dropped, unless search can still reach them."""
        self._turns.open(turn)
        reachable = set(sampled_below_head(self._episode.tree))
        self._of = {answer: made for answer, made in self._of.items() if answer in reachable}

    def expect(self, turn: T) -> None:
        """Until the next turn is opened, conversations that begin with ``turn.path`` go on from ``turn``."""
        self._turns.expect(turn)

    def turn(self, messages: Sequence[Message]) -> T | None:
        """The turn that a conversation goes on from, if it is known."""
        return self._turns.longest(messages)

    def keep(self, answer: Message, made: A) -> None:
        """Remember what the host made of an answer of this turn. Safe from any thread."""
        self._of[answer] = made

    def of(self, answer: Message) -> A:
        """What the host made of an answer. Raises ``KeyError`` for one that cannot be executed any more."""
        return self._of[answer]

    async def gather(self, calls: Iterable[Awaitable[Completion]]) -> list[Completion]:
        """The completions of the calls that did not fail; meanwhile the episode so far is stored.

        Raises ``StorageError``, and the first call's error when all failed.
        """
        kept, *answers = await asyncio.gather(self._episode.keep_up(), *calls, return_exceptions=True)
        completions = [answer for answer in answers if isinstance(answer, Completion)]
        for error in (kept, *answers):
            if isinstance(error, BaseException) and not (completions and isinstance(error, EpisodeError)):
                raise error
        return completions

"""The requests of a host during one decision, and what is known of each answer to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openhands_rl_plugin.core.errors import EpisodeError, RLError
from openhands_rl_plugin.core.messages import WireMessage
from openhands_rl_plugin.core.types import Completion, Message, StopReason
from openhands_rl_plugin.session.token_id_text import Json

if TYPE_CHECKING:
    from openhands_rl_plugin.session.session import Session


class EpisodeOver(RLError):
    """The session gives no more completions; ``stop`` is the limit that was reached."""

    def __init__(self, stop: StopReason) -> None:
        super().__init__(f"the episode is over: {stop.value}")
        self.stop = stop


@dataclass(frozen=True)
class Turn:
    """A request of the host: its ``body``, its messages as ``wire``, and the same conversation in the tree (``path``).

    ``rewritten``: it does not extend the conversation before.
    """

    body: Json
    wire: Sequence[WireMessage]
    path: tuple[Message, ...] = ()
    rewritten: bool = False


class TurnAnswers:
    """The live turn and those that forks have reached; the document of each answer."""

    def __init__(self, episode: Session) -> None:
        self._episode = episode
        self._turns: dict[tuple[Message, ...], Turn] = {}
        self._of: dict[Message, Json] = {}

    def open(self, turn: Turn) -> None:
        """Begin a turn. Earlier turns are dropped, unless search can still reach them."""
        start = len(turn.path)
        self._turns = {path: known for path, known in self._turns.items() if path[:start] == turn.path}
        self.expect(turn)

    def expect(self, turn: Turn) -> None:
        """Until the next turn is opened, conversations that begin with ``turn.path`` go on from ``turn``."""
        self._turns[turn.path] = turn

    def turn(self, messages: Sequence[Message]) -> Turn | None:
        """The turn with the longest path that a conversation begins with, if there is one."""
        said = tuple(messages)
        lengths = {len(path) for path in self._turns}
        prefixes = (said[:length] for length in sorted(lengths, reverse=True) if length <= len(said))
        return next((self._turns[prefix] for prefix in prefixes if prefix in self._turns), None)

    def keep(self, answer: Message, made: Json) -> None:
        """Remember what the host made of an answer of this turn. Safe from any thread."""
        self._of[answer] = made

    def of(self, answer: Message) -> Json:
        """What the host made of an answer."""
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

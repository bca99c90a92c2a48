"""Which server gets a call: that of its episode, whose prefix it has cached, or else the one with the fewest open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_MOST_EPISODES = 100_000


@dataclass
class ModelServer:
    """``url`` ends with ``/v1``. ``calls``: how many it answered; ``failures``: how often it did not."""

    url: str
    healthy: bool = True
    open: int = 0
    calls: int = 0
    failures: int = 0


@dataclass
class ServerChoice:
    """For one event loop."""

    servers: Sequence[ModelServer]
    _episodes: OrderedDict[str, ModelServer] = field(default_factory=OrderedDict)

    def choose(self, episode: str = "", *, tried: Collection[str] = ()) -> ModelServer | None:
        """A healthy server whose URL is not among ``tried``; ``None`` where there is none.

        An episode stays where it is until its server is unhealthy; then it moves for good. Without an ``episode``
        each call goes by itself.
        """
        own = self._episodes.get(episode)
        if own is not None and own.healthy and own.url not in tried:
            self._episodes.move_to_end(episode)
            return own
        fit = [server for server in self.servers if server.healthy and server.url not in tried]
        if not fit:
            return None
        chosen = min(fit, key=lambda server: server.open)
        if episode:
            self._episodes[episode] = chosen
            self._episodes.move_to_end(episode)
            while len(self._episodes) > _MOST_EPISODES:
                self._episodes.popitem(last=False)
        return chosen

    @contextmanager
    def calling(self, server: ModelServer) -> Iterator[None]:
        """Around a call, which is open meanwhile."""
        server.open += 1
        try:
            yield
        finally:
            server.open -= 1

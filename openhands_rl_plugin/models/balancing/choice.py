"""Which server gets a call: that of its episode, whose prefix it has cached, unless another is much faster by now."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from openhands_rl_plugin.models.balancing.speed import UNKNOWN, Speed

_MOST_EPISODES = 100_000
_MUCH_SLOWER = 2.0
"""An episode moves where its call would take so many times as long as elsewhere, where its prefix is computed anew."""
_ASSUMED = 2
"""Until a server has shown what it does, it counts as the average of all, with the weight of so many answers."""


@dataclass
class OpenCall:
    """A call without an answer yet. ``tells``: its answer says how fast the server is."""

    tells: bool = False


@dataclass
class ModelServer:
    """``url`` ends with ``/v1``. ``calls``: how many it answered; ``failures``: how often it did not."""

    url: str
    clock: Callable[[], float] = time.monotonic
    healthy: bool = True
    open: int = 0
    calls: int = 0
    failures: int = 0
    _speed: Speed = UNKNOWN
    _looked: float = 0.0

    @contextmanager
    def call(self) -> Iterator[OpenCall]:
        """Around a call, which is open meanwhile."""
        self.speed()
        self.open += 1
        made = OpenCall()
        try:
            yield made
        finally:
            speed = self.speed()
            self.open -= 1
            if made.tells:
                self._speed = speed.answered()

    def speed(self) -> Speed:
        """As of now."""
        now = self.clock()
        self._speed = self._speed.after(now - self._looked, self.open)
        self._looked = now
        return self._speed

    def forget(self) -> None:
        """How fast it was, it need not be any more."""
        self._speed = UNKNOWN


@dataclass
class ServerChoice:
    """For one event loop."""

    servers: Sequence[ModelServer]
    _episodes: OrderedDict[str, ModelServer] = field(default_factory=OrderedDict)

    def choose(self, episode: str = "", *, tried: Collection[str] = ()) -> ModelServer | None:
        """A healthy server whose URL is not among ``tried``; ``None`` where there is none.

        It is the one that would answer first. An episode stays where it is until its server is unhealthy or much slower
        than that; then it moves for good. Without an ``episode`` each call goes by itself.
        """
        fit = [server for server in self.servers if server.healthy and server.url not in tried]
        if not fit:
            return None
        seconds = self._seconds()
        chosen = min(fit, key=lambda server: (round(seconds[server.url], 3), server.open))
        own = self._episodes.get(episode)
        if own in fit and seconds[own.url] <= _MUCH_SLOWER * seconds[chosen.url]:
            chosen = own
        if episode:
            self._episodes[episode] = chosen
            self._episodes.move_to_end(episode)
            while len(self._episodes) > _MOST_EPISODES:
                self._episodes.popitem(last=False)
        return chosen

    def _seconds(self) -> dict[str, float]:
        """By URL, what one more call would take there."""
        speeds = {server.url: server.speed() for server in self.servers}
        whole = UNKNOWN
        for speed in speeds.values():
            whole = whole.plus(speed)
        weight = _ASSUMED / whole.answers if whole.answers else 0.0
        return {server.url: speeds[server.url].plus(whole, weight).seconds(server.open + 1) for server in self.servers}

"""The choice among model servers by a clock of the test's own: speed, stickiness, servers that hang."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from openhands_rl_plugin.models.balancing.choice import ModelServer, OpenCall, ServerChoice


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def answers(server: ModelServer, clock: Clock, seconds: float, calls: int = 8) -> None:
    """It answers so many calls, one after the other."""
    for _ in range(calls):
        with server.call() as call:
            clock.now += seconds
            call.tells = True


def two(clock: Clock) -> tuple[ModelServer, ModelServer, ServerChoice]:
    one, other = ModelServer("one", clock), ModelServer("other", clock)
    return one, other, ServerChoice([one, other])


def test_who_answers_sooner_is_chosen():
    clock = Clock()
    slow, fast, choice = two(clock)
    answers(slow, clock, 3.0)
    answers(fast, clock, 1.0)
    assert choice.choose("a") is fast
    with ExitStack() as opened:
        for _ in range(4):
            opened.enter_context(fast.call())
        assert choice.choose("b") is fast, "with four calls it is still not slower than the other with none"
        for _ in range(20):
            opened.enter_context(fast.call())
        assert choice.choose("c") is slow


def test_an_episode_stays_where_its_prefix_is_until_it_is_much_slower_there():
    clock = Clock()
    own, other, choice = two(clock)
    assert choice.choose("a") is own
    answers(own, clock, 1.5)
    answers(other, clock, 1.0)
    assert choice.choose("a") is own and choice.choose("new") is other
    answers(own, clock, 4.0, calls=40)
    assert choice.choose("a") is other
    answers(other, clock, 6.0, calls=40)
    assert choice.choose("a") is other, "it does not go to and fro"


def test_a_server_that_hangs_is_left_before_it_has_answered():
    clock = Clock()
    hangs, other, choice = two(clock)
    answers(hangs, clock, 1.0)
    answers(other, clock, 1.0)
    assert choice.choose("a") is hangs
    with hangs.call():
        assert choice.choose("a") is hangs
        clock.now += 300.0
        assert choice.choose("a") is other


def test_answers_that_do_not_tell_count_for_nothing():
    """Refusals come at once; who refuses everything is not the fastest."""
    clock = Clock()
    refuses, other, choice = two(clock)
    answers(other, clock, 1.0)
    for _ in range(20):
        with refuses.call():
            clock.now += 0.001
    with other.call():
        assert choice.choose("a") is refuses
    assert refuses.speed().answers == 0


def test_what_was_measured_before_a_restart_is_forgotten():
    clock = Clock()
    restarted, other, choice = two(clock)
    answers(restarted, clock, 30.0)
    answers(other, clock, 1.0)
    assert choice.choose() is other
    restarted.forget()
    with other.call():
        assert choice.choose() is restarted


def test_a_server_that_was_slow_once_is_tried_again():
    """Its first answer took a minute, as while kernels are compiled; all episodes are at the other server since."""
    clock = Clock()
    cold, other, choice = two(clock)
    answers(cold, clock, 60.0, calls=1)
    answers(other, clock, 2.0, calls=30)
    with ExitStack() as opened:
        for _ in range(12):
            opened.enter_context(other.call())
        assert choice.choose("now") is other
    answers(other, clock, 2.0, calls=300)
    with ExitStack() as opened:
        for _ in range(12):
            opened.enter_context(other.call())
        assert choice.choose("later") is cold


@dataclass
class Episodes:
    """Episodes of some calls each, on servers that answer one call at a time; in simulated time."""

    seconds: list[float]
    todo: int
    calls: int
    clock: Clock = field(default_factory=Clock)
    moved: int = 0

    def __post_init__(self) -> None:
        self.servers = [ModelServer(str(at), self.clock) for at in range(len(self.seconds))]
        self.choice = ServerChoice(self.servers)
        self.free_at = [0.0] * len(self.seconds)
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0

    def played(self, at_once: int) -> float:
        """When the last call is answered."""
        for _ in range(at_once):
            self.begin()
        while self.due:
            self.clock.now, _, then = heapq.heappop(self.due)
            then()
        return self.clock.now

    def begin(self) -> None:
        if self.todo:
            self.todo -= 1
            self.call(f"episode {self.todo}", self.calls, None)

    def call(self, episode: str, left: int, former: ModelServer | None) -> None:
        server = self.choice.choose(episode)
        assert server is not None
        self.moved += former not in (None, server)
        at, opened = int(server.url), ExitStack()
        call = opened.enter_context(server.call())
        self.free_at[at] = max(self.free_at[at], self.clock.now) + self.seconds[at]
        self.number += 1
        then = lambda: self.answered(episode, left - 1, server, opened, call)  # noqa: E731
        heapq.heappush(self.due, (self.free_at[at], self.number, then))

    def answered(self, episode: str, left: int, server: ModelServer, opened: ExitStack, call: OpenCall) -> None:
        call.tells = True
        opened.close()
        if left:
            self.call(episode, left, server)
        else:
            self.begin()


@pytest.mark.parametrize(("at_once", "calls"), [(9, 4), (24, 4), (24, 20), (60, 8)])
def test_servers_of_uneven_speed_are_all_busy_to_the_end(at_once: int, calls: int):
    seconds = [0.2, 0.3, 0.6]
    episodes = Episodes(seconds, todo=150, calls=calls)
    ideal = 150 * calls / sum(1 / each for each in seconds)
    assert ideal / episodes.played(at_once) > 0.95
    assert episodes.moved < 0.05 * 150 * calls


def test_equal_servers_share_and_no_episode_moves():
    episodes = Episodes([0.5, 0.5, 0.5], todo=150, calls=8)
    assert 150 * 8 * 0.5 / 3 / episodes.played(24) > 0.95
    assert episodes.moved == 0
    assert max(server.speed().area for server in episodes.servers) < 2 * min(s.speed().area for s in episodes.servers)

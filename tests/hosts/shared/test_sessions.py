"""A stop ends the decisions that it concerns, whenever it is heard, and no other."""

from __future__ import annotations

import asyncio

import pytest

from openhands_rl_plugin.core.concurrency import Job, background
from openhands_rl_plugin.hosts.shared.sessions import deciding, register_runtime, stop_deciding


class Place:
    """Stands for a runtime."""


async def search(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "decided"


def decided(session: str, job: Job[str], last_event: int) -> str:
    with deciding(session, job, last_event):
        return job.result()


def test_a_stop_that_comes_before_a_search_begins_ends_it_when_it_begins():
    runtime = Place()
    register_runtime("before", runtime)
    stop_deciding("before", 7)
    for _ in range(2):
        with pytest.raises(asyncio.CancelledError):
            decided("before", background().start(search(60)), last_event=6)


def test_who_is_set_running_again_after_a_stop_decides():
    runtime = Place()
    register_runtime("again", runtime)
    stop_deciding("again", 7)
    assert decided("again", background().start(search(0)), last_event=8) == "decided"


def test_a_stop_that_is_heard_late_does_not_end_the_search_of_who_was_set_running_again():
    runtime = Place()
    register_runtime("late", runtime)
    job = background().start(search(0.1))
    with deciding("late", job, 8):
        stop_deciding("late", 7)
        assert job.result() == "decided"


def test_a_stop_ends_the_search_that_is_under_way():
    job = background().start(search(60))
    with deciding("under way", job, 6), pytest.raises(asyncio.CancelledError):
        stop_deciding("under way", 7)
        job.result()


def test_a_session_that_is_over_decides_nothing_more():
    runtime = Place()
    register_runtime("over", runtime)
    stop_deciding("over")
    with pytest.raises(asyncio.CancelledError):
        decided("over", background().start(search(60)), last_event=1000)


def test_a_new_runtime_for_a_session_knows_nothing_of_earlier_stops():
    first, second = Place(), Place()
    register_runtime("new", first)
    stop_deciding("new")
    register_runtime("new", second)
    assert decided("new", background().start(search(0)), last_event=1) == "decided"

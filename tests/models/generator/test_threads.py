"""Work that uses torch, in threads that leave nothing behind."""

from __future__ import annotations

import threading

import pytest

from openhands_rl_plugin.models.generator.errors import StartError
from openhands_rl_plugin.models.generator.threads import in_passing_thread


def test_work_is_done_in_a_thread_that_has_ended() -> None:
    thread = in_passing_thread(threading.current_thread)
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_its_error_is_the_callers() -> None:
    def broken() -> None:
        raise StartError("no such model")

    with pytest.raises(StartError, match="no such model"):
        in_passing_thread(broken)

"""Work that uses torch, in threads that leave nothing behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.errors import StartError
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sampling import DecodingParams
from openhands_rl_plugin.models.generator.threads import in_passing_thread


def test_work_is_done_in_a_thread_that_has_ended() -> None:
    thread = in_passing_thread(threading.current_thread)
    assert thread is not threading.current_thread() and not thread.is_alive()


def test_threads_that_are_asked_for_are_those_that_compute(tiny_model: Path) -> None:
    """The number is a setting of a thread, and the model is loaded by another one than computes."""
    before = torch.get_num_threads()
    found: list[int] = []
    with Generator(GeneratorConfig(model=str(tiny_model), dtype="float32", threads=1)) as generator:
        params = DecodingParams(max_tokens=1)
        handle = generator.submit((5, 6), params, on_delta=lambda _: found.append(torch.get_num_threads()))
        handle.future.result(30)
    torch.set_num_threads(before)
    assert found == [1]


def test_its_error_is_the_callers() -> None:
    def broken() -> None:
        raise StartError("no such model")

    with pytest.raises(StartError, match="no such model"):
        in_passing_thread(broken)

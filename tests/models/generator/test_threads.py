"""Work that uses torch, in threads that leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from openhands_rl_plugin.models.generator import scheduler
from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.errors import StartError
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sampling import DecodingParams
from openhands_rl_plugin.models.generator.threads import in_passing_thread

PRODUCTS = """
from pathlib import Path
import openhands_rl_plugin.models
import torch
def multiply(first, last):
    with torch.inference_mode():
        for rows in range(first, last):
            torch.nn.functional.linear(torch.zeros(rows, 64, dtype=torch.bfloat16), weight)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
torch.set_num_threads(1)
weight = torch.zeros(64, 64, dtype=torch.bfloat16)
before = multiply(1, 200)
print(multiply(200, 900) - before)
"""
"""Prints the megabytes that products of 700 further sizes take."""


@pytest.mark.skipif(
    sys.platform != "linux" or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="reads /proc, and bfloat16 products have to be oneDNN's",
)
def test_products_of_ever_other_sizes_take_no_more_and_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def growth() -> int:
        done = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, text=True, check=True)
        return int(done.stdout)

    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    assert growth() < 50
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1024")  # a user's own stays
    assert growth() > 150


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


def test_a_busy_server_returns_what_was_freed_but_not_at_every_step(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[int] = []
    monkeypatch.setattr(scheduler, "return_freed_memory", lambda: returned.append(1))
    with Generator(GeneratorConfig(model=str(tiny_model), dtype="float32", max_batch=1)) as generator:
        # The slowest request runs on while the others end: what is returned is not that of an idle server.
        handles = [generator.submit((5, 6), DecodingParams(max_tokens=1)) for _ in range(20)]
        for handle in handles[:-1]:
            handle.future.result(30)
        assert 1 <= len(returned) <= 2
        handles[-1].future.result(30)


def test_its_error_is_the_callers() -> None:
    def broken() -> None:
        raise StartError("no such model")

    with pytest.raises(StartError, match="no such model"):
        in_passing_thread(broken)

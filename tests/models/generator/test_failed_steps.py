"""A step that fails ends what it computes; the generator goes on, unless the model computes nothing any more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.errors import GenerationFailed, Overloaded
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sequence import DecodingParams

LENGTH = 24
HONEST = [DecodingParams(max_tokens=LENGTH, seed=seed, ignore_eos=True, top_p=0.9) for seed in range(4)]
IMPOSSIBLE = DecodingParams(max_tokens=LENGTH, top_logprobs=-1)


def test_a_step_that_fails_ends_its_sequences_and_later_ones_are_served(generator: Generator) -> None:
    alone = generator.generate((5, 6, 7), HONEST[0]).token_ids
    for _ in range(3):
        with pytest.raises(GenerationFailed, match="The generation failed"):
            generator.submit((8, 9), IMPOSSIBLE).result(30)
        assert generator.generate((5, 6, 7), HONEST[0]).token_ids == alone
    assert generator.healthy and not generator.in_flight


def test_a_listener_that_fails_ends_its_own_sequence_only(generator: Generator) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    other, failed = generator.submit((5, 6), HONEST[0]), generator.submit((5, 6), HONEST[1], on_delta=broken)
    with pytest.raises(GenerationFailed):
        failed.result(30)
    assert len(other.result(30).token_ids) == LENGTH


def test_a_model_that_computes_nothing_any_more_stops_the_generator(tiny_model: Path) -> None:
    with Generator(GeneratorConfig(model=str(tiny_model), dtype="float32", threads=1)) as generator:
        generator.model.model = None  # pyright: ignore[reportAttributeAccessIssue]  (as after an error of the device)
        with pytest.raises(GenerationFailed):
            generator.submit((5, 6), HONEST[0]).result(30)
        assert generator.stopped.wait(30) and not generator.healthy
        with pytest.raises(InfrastructureError, match="the generator has stopped, start the server again"):
            generator.check()
        with pytest.raises(Overloaded):
            generator.submit((5, 6), HONEST[0])


SCRIPT = """
import sys
from pathlib import Path
from openhands_rl_plugin.cli import main
from openhands_rl_plugin.models.generator import model

step = model.ServedModel.step
def broken(self, rows):
    if Path(sys.argv[1]).exists():
        raise RuntimeError("CUDA error: unspecified launch failure")
    return step(self, rows)
model.ServedModel.step = broken
sys.exit(main(["serve", "--model", sys.argv[2], "--port", "0", "--threads", "1"]))
"""


@pytest.mark.slow
def test_the_command_ends_with_an_error_when_its_generator_stopped(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "break"), str(tiny_model)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if "http://" in line).split(" at ")[1].split("/v1")[0]
        body = {"prompt": "one", "max_tokens": 2}
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=30).status_code == 200
        (tmp_path / "break").touch()
        assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=30).status_code == 500
        started = time.monotonic()
        _, said = server.communicate(timeout=30)
        assert server.returncode == 1 and time.monotonic() - started < 15
        assert "error: the generator has stopped, start the server again" in said
    finally:
        server.kill()
        server.communicate()

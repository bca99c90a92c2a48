"""A step that fails ends what it computes; the generator goes on, unless the model computes nothing any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.models.generator.config import GenerationFailed, GeneratorConfig, Overloaded
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

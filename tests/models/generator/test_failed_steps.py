"""A step that fails ends what it computes; the generator goes on."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.models.generator.config import GenerationFailed
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
    assert not generator.in_flight


def test_a_listener_that_fails_ends_its_own_sequence_only(generator: Generator) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    other, failed = generator.submit((5, 6), HONEST[0]), generator.submit((5, 6), HONEST[1], on_delta=broken)
    with pytest.raises(GenerationFailed):
        failed.result(30)
    assert len(other.result(30).token_ids) == LENGTH

"""The sampler's distributions."""

import pytest
import torch

from openhands_rl_plugin.models.generator.sequence import DecodingParams, random_numbers, sample

DRAWS = 4000
OF_MANY = 1500
"""Draws from thousands of tokens, which take longer."""


def frequencies(logits: torch.Tensor, params: DecodingParams) -> torch.Tensor:
    random = random_numbers(0)
    rows = sample(logits.expand(DRAWS, -1), [params] * DRAWS, [random] * DRAWS)
    return torch.bincount(torch.tensor([row.token for row in rows]), minlength=len(logits)) / DRAWS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    expected = (logits / temperature).softmax(-1)
    assert frequencies(logits, DecodingParams(temperature=temperature)) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (DecodingParams(top_k=2), 2),
        (DecodingParams(top_p=0.8), 3),
        (DecodingParams(top_p=1e-6), 1),
        (DecodingParams(top_k=3, top_p=0.5), 2),
        (DecodingParams(temperature=2.0, min_p=0.6), 3),
        (DecodingParams(top_k=100, top_p=0.999999), 5),
        (DecodingParams(min_p=0.3), 3),
        (DecodingParams(min_p=1.0), 1),
        (DecodingParams(min_p=0.01), 5),
        (DecodingParams(min_p=0.2, top_k=2), 2),
        (DecodingParams(min_p=0.3, top_p=0.8), 2),
    ],
)
def test_min_p_top_k_and_top_p(params: DecodingParams, kept: int) -> None:
    probabilities = torch.tensor([0.3, 0.1, 0.4, 0.15, 0.05])
    order = probabilities.argsort(descending=True)[:kept]
    expected = torch.zeros(5)
    kept_alone = probabilities[order] ** (1 / params.temperature)
    expected[order] = kept_alone / kept_alone.sum()
    assert frequencies(probabilities.log(), params) == pytest.approx(expected, abs=0.03)


def test_a_flat_nucleus_wider_than_the_first_candidates() -> None:
    logits = torch.linspace(0, -1e-3, 6000)
    random, params = random_numbers(0), DecodingParams(top_p=0.5)
    drawn = {row.token for row in sample(logits.expand(OF_MANY, -1), [params] * OF_MANY, [random] * OF_MANY)}
    assert len(drawn) > 1000 and max(drawn) < 3010


def test_top_p_is_a_share_of_what_a_wide_top_k_leaves() -> None:
    """64 tokens have 0.6; with 336 of 0.4 / 5936 each they have 0.62, of which 0.59 are 40 of those."""
    probabilities = torch.tensor([0.6 / 64] * 64 + [0.4 / 5936] * 5936)
    random, params = random_numbers(0), DecodingParams(top_k=400, top_p=0.59)
    logits = probabilities.log().expand(OF_MANY, -1)
    drawn = {row.token for row in sample(logits, [params] * OF_MANY, [random] * OF_MANY)}
    assert len(drawn) == 40

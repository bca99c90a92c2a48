"""Which rollouts meet in an optimiser step."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.losses.losses import TrainingSample, batches, samples_from_rollouts

pytestmark = pytest.mark.contract

PROMPT, ANSWER = 64, 16


def rollouts(groups: int, size: int) -> list[TrainingSample]:
    """Samples of ``groups`` prompts in a mixed order; the answers differ."""
    source = random.Random(7)
    samples: list[Sample] = []
    for group in range(groups):
        prompt = [source.randrange(900) for _ in range(PROMPT)]
        for attempt in range(size):
            ids = (*prompt, *(source.randrange(900) for _ in range(ANSWER)))
            mask = (False,) * PROMPT + (True,) * ANSWER
            name = f"{group}-{attempt}"
            samples.append(
                Sample(trajectory_id=name, leaf=0, input_ids=ids, mask=mask, logprobs=(-0.5,) * len(ids), advantage=1.0)
            )
    source.shuffle(samples)
    return samples_from_rollouts(samples)


@given(groups=st.integers(1, 5), of=st.integers(1, 4), size=st.integers(1, 9), epochs=st.integers(1, 3))
def test_every_rollout_is_in_one_batch_of_an_epoch(groups: int, of: int, size: int, epochs: int) -> None:
    items = rollouts(groups, of)
    made = batches(items, size=size, epochs=epochs, seed="3:0")
    assert Counter(id(item) for batch in made for item in batch) == {id(item): epochs for item in items}
    assert max(map(len, made)) <= size and len(made) == epochs * -(-len(items) // size)


def test_the_order_follows_from_the_seed_and_changes_by_epoch() -> None:
    items = rollouts(groups=8, size=6)
    once, again = (batches(items, size=8, epochs=2, seed="0:0") for _ in range(2))
    assert once == again
    assert once[: len(once) // 2] != once[len(once) // 2 :]

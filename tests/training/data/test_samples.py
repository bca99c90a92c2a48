"""From nodes to training sequences: what is merged, what is masked, what is refused, and how passes are filled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import ACTED, Message, Node, PolicyRef, Sample, Tokens, Trajectory
from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.training.algorithms import credited_samples, recorded_nodes, samples_of, samples_of_tree
from openhands_rl_plugin.training.data.packing import lay_out, pack
from openhands_rl_plugin.training.losses import batch_weights, samples_from_rollouts

POLICY = PolicyRef(base_model="base", adapter="shop", version=3)


def asked(parent: int | None) -> Node:
    return Node(parent=parent, message=Message(role="user", content="?"))


def answered(parent: int, tokens: Tokens | None) -> Node:
    return Node(
        parent=parent, message=Message(role="assistant", content="!"), sampled=True, tokens=tokens, policy=POLICY
    )


def turn(*prompt: int, extends: bool, sampled: tuple[int, ...], logprob: float = -0.5) -> Tokens:
    return Tokens(extends=extends, prompt_ids=prompt, sampled_ids=sampled, logprobs=(logprob,) * len(sampled))


def episode(*nodes: Node, head: int | None = None) -> Trajectory:
    return example_trajectory().model_copy(
        update={"id": "t", "nodes": nodes, "head": len(nodes) - 1 if head is None else head}
    )


def test_a_rewritten_history_starts_a_new_sequence() -> None:
    trajectory = episode(
        asked(None),
        answered(0, turn(1, 2, extends=False, sampled=(3,))),
        answered(1, turn(1, 9, extends=False, sampled=(4,))),
        answered(2, turn(7, extends=True, sampled=(8,))),
    )
    assert [sample.input_ids for sample in samples_of(trajectory)] == [(1, 2, 3), (1, 9, 4, 7, 8)]


def test_every_answer_that_was_acted_on_is_trained_once_on_whichever_path_of_a_condensed_history() -> None:
    executed = {ACTED: True}
    old = answered(0, turn(1, extends=False, sampled=(2, 3))).model_copy(update={"metadata": executed})
    dropped = answered(0, turn(1, extends=False, sampled=(9,)))
    later = answered(1, turn(4, extends=True, sampled=(5,))).model_copy(update={"metadata": executed})
    after = answered(4, turn(1, 7, extends=False, sampled=(8,)))
    condensed = episode(asked(None), old, dropped, later, asked(None), after)
    samples = samples_of(condensed, 0.5)
    trained = [[token for token, own in zip(each.input_ids, each.mask, strict=True) if own] for each in samples]
    assert trained == [[2, 3, 5], [8]] and {sample.advantage for sample in samples} == {0.5}
    whole = episode(asked(None), answered(0, turn(1, extends=False, sampled=(6, 6, 6, 6)))).model_copy(
        update={"id": "w"}
    )
    for algorithm in ("grpo", "gspo", "dr-grpo"):
        settings = TrainingSettings.model_validate({"algorithm": algorithm})
        items = samples_from_rollouts(credited_samples([condensed, whole], [1.0, 0.0], settings))
        weights = batch_weights(items, settings) * torch.tensor([float(len(item.positions)) for item in items])
        assert weights[:2].sum().item() == pytest.approx(weights[2].item()) == pytest.approx(0.5)


def test_a_node_of_several_leaves_is_trained_once() -> None:
    trajectory = episode(
        asked(None),
        answered(0, turn(1, extends=False, sampled=(2, 3))),
        answered(1, turn(4, extends=True, sampled=(5,))),
        answered(1, turn(6, extends=True, sampled=(7,))),
        head=2,
    )
    first, second = samples_of_tree(trajectory, {1: 1.0, 2: 1.0, 3: -1.0})
    assert (first.input_ids, first.mask) == ((1, 2, 3, 4, 5), (False, True, True, False, True))
    assert (second.input_ids, second.mask) == ((1, 2, 3, 6, 7), (False, False, False, False, True))
    assert (first.advantage, second.advantage) == (1.0, -1.0)
    assert samples_of_tree(trajectory, {1: 1.0, 2: 1.0}) == [first], "nothing is left to train for the second leaf"


def test_a_branch_that_was_not_wholly_recorded_is_left_out() -> None:
    """As when the store took what looked like a secret out of a simulated branch."""
    trajectory = episode(
        asked(None),
        answered(0, turn(1, extends=False, sampled=(2, 3))),
        answered(1, turn(4, extends=True, sampled=(5,))),
        answered(1, None),
        answered(3, turn(6, extends=True, sampled=(7,))),
        head=2,
    )
    acted = samples_of_tree(trajectory, {1: 1.0, 2: 1.0})
    assert [sample.input_ids for sample in acted] == [(1, 2, 3, 4, 5)]
    assert samples_of_tree(trajectory, {1: 1.0, 2: 1.0, 3: -1.0, 4: -1.0}) == acted
    assert recorded_nodes(trajectory) == {0, 1, 2}
    with pytest.raises(TrainingError, match="node 3: no token ids"):
        samples_of_tree(trajectory.model_copy(update={"head": 4}), {1: 1.0, 3: 1.0, 4: 1.0})


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (None, "no token ids"),
        (Tokens(prompt_ids=(1,), sampled_ids=(2, 3), logprobs=(-1.0,)), "1 logprobs for 2"),
        (Tokens.model_construct(prompt_ids=(1,), sampled_ids=(2,), logprobs=(-math.inf,)), "not finite"),
    ],
)
def test_missing_records_are_named(tokens: Tokens | None, expected: str) -> None:
    with pytest.raises(TrainingError, match=expected) as caught:
        samples_of(episode(asked(None), answered(0, tokens)))
    assert "trajectory t, node 1" in str(caught.value)


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Sequences over two ids, many of which begin like an earlier one."""
    made: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 8))):
        begin = draw(st.sampled_from(made))[: draw(st.integers(0, 80))] if made and draw(st.booleans()) else ()
        end = tuple(draw(st.lists(st.integers(0, 1), min_size=1, max_size=50)))
        made.append((*begin, *end))
    return made


def plain(at: int, ids: tuple[int, ...]) -> Sample:
    return Sample(trajectory_id=str(at), leaf=0, input_ids=ids, mask=(True,) * len(ids), logprobs=(0.0,) * len(ids))


@given(sequences(), st.integers(1, 200))
def test_passes_hold_every_sample_once_and_keep_their_limit(made: list[tuple[int, ...]], limit: int) -> None:
    samples = [plain(at, ids) for at, ids in enumerate(made)]
    groups = pack(samples, limit)
    packed = [sample.trajectory_id for group in groups for sample in group]
    assert sorted(packed, key=int) == [sample.trajectory_id for sample in samples]
    for group in groups:
        rows = len(lay_out([sample.input_ids for sample in group]).ids)
        assert rows <= limit or len(group) == 1

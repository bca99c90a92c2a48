"""Two processes train one adapter, and end where one alone does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_samples import EXACT
from together import check_same, check_same_model, train_both
from train_together import train

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.training.distributed.ranks import Ranks, join_ranks
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

SPLIT = {"sharding": "layers"}


@pytest.mark.slow
def test_two_processes_train_what_one_does(model: Path, tmp_path: Path) -> None:
    kinds = ["sft", "grpo", "passes", "dpo"]
    assert train_both(model, tmp_path / "two", {}, *kinds) == [0, 0]
    for kind in kinds:
        check_same(model, tmp_path / "two", tmp_path / "one", kind)


@pytest.mark.slow
def test_processes_that_were_killed_go_on_together(model: Path, tmp_path: Path) -> None:
    assert train_both(model, tmp_path / "two", {}, "gspo", steps=5) != [0, 0]
    assert [*(tmp_path / "two" / "gspo" / "run").rglob("checkpoint/*/0")]
    # What is kept does not depend on how the base model is spread.
    assert train_both(model, tmp_path / "two", SPLIT, "gspo") == [0, 0]
    check_same(model, tmp_path / "two", tmp_path / "one", "gspo")
    lines = (tmp_path / "two" / "gspo" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["done"] for line in lines] == list(range(1, 13))


@pytest.mark.slow
def test_two_processes_train_a_whole_model_as_one_does(model: Path, tmp_path: Path) -> None:
    assert train_both(model, tmp_path / "two", SPLIT, "full") == [0, 0]
    check_same_model(model, tmp_path / "two", tmp_path / "one", "full", parts=0.5)


@pytest.mark.slow
def test_processes_with_parts_of_a_model_that_were_killed_go_on_together(model: Path, tmp_path: Path) -> None:
    assert train_both(model, tmp_path / "two", SPLIT, "full-killed", steps=5) != [0, 0]
    parts = tmp_path / "two" / "full-killed" / "run" / "checkpoint"
    (step,) = (each for each in parts.iterdir() if each.name != "draft")
    assert step.name.endswith("-00000004") and sorted(each.name for each in step.iterdir()) == ["0", "1"]
    with pytest.raises(TrainingError, match="by 2 processes with a shard of the weights each"):
        train(model, tmp_path / "two", "full-killed")
    assert train_both(model, tmp_path / "two", SPLIT, "full-killed") == [0, 0]
    check_same_model(model, tmp_path / "two", tmp_path / "one", "full-killed", parts=0.5)
    lines = (parts.parent / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["done"] for line in lines] == list(range(1, 13))
    assert not parts.exists()


@given(passes=st.integers(0, 40), size=st.integers(1, 9))
def test_every_pass_is_computed_once_and_all_ranks_compute_equally_many(passes: int, size: int) -> None:
    dealt = []
    for rank in range(size):
        dealt.append(Ranks(rank, size).shard(list(range(passes))))
    assert sorted(one for mine, _ in dealt for one in mine) == list(range(passes))
    assert len({len(mine) + len(idle) for mine, idle in dealt}) == 1
    assert all(len(idle) <= 1 for _, idle in dealt)


def test_without_a_launcher_a_process_is_alone(model: Path) -> None:
    with join_ranks() as ranks:
        assert ranks == Ranks() and (ranks.rank, ranks.size) == (0, 1)
    with pytest.raises(TrainingError, match="needs several processes: start with torchrun"):
        LocalTrainer(model, EXACT.model_copy(update={"sharding": "layers"}))

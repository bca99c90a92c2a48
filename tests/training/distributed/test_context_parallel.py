"""Processes that share a micro-batch train what one process does, whatever the loss, the heads and the sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_family
from made_samples import EXACT
from share_families import figures
from tiny_model import write_model
from together import check_same, check_same_model, run_together, train_both

from openhands_rl_plugin.apps.loop.checks import check_trainable
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.training.data.layout import lay_out
from openhands_rl_plugin.training.distributed.context_parallel import ContextGroup
from openhands_rl_plugin.training.distributed.ranks import ProcessGroup, current_ranks
from openhands_rl_plugin.training.policies.packed_rows import PackedRows
from openhands_rl_plugin.training.policies.visible_blocks import visible_blocks
from openhands_rl_plugin.training.trainer.checkpoint import STATE_FILE
from openhands_rl_plugin.training.trainer.full_trainer import FullTrainer
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
from openhands_rl_plugin.training.trainer.note_files import NOTES_FOLDER, frames, note_files, numbers_of

SHARED = {"context_parallel_size": 2}
SPLIT = {**SHARED, "sharding": "layers"}


def compare(model: Path, folder: Path, changes: dict[str, Any], *kinds: str, size: int = 2) -> None:
    assert train_both(model, folder / "both", changes, *kinds, size=size) == [0] * size
    for kind in kinds:
        check_same(model, folder / "both", folder / "one", kind)


def test_two_processes_that_share_each_micro_batch_train_what_one_does(model: Path, tmp_path: Path) -> None:
    compare(model, tmp_path, SHARED, "grpo", "entropy")


@pytest.mark.slow
def test_the_other_losses(model: Path, tmp_path: Path) -> None:
    compare(model, tmp_path, SHARED, "sft", "heated", "dpo", "gspo", "passes")


@pytest.mark.slow
def test_with_split_layers(model: Path, tmp_path: Path) -> None:
    compare(model, tmp_path, SPLIT, "grpo", "entropy", "passes")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [SHARED, SPLIT], ids=["whole", "split"])
def test_two_groups_of_two(model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    compare(model, tmp_path, changes, "passes", "dpo", "gspo", size=4)


@pytest.mark.slow
def test_one_process_of_a_group_keeps_the_notes_of_all_tokens(model: Path, tmp_path: Path) -> None:
    """And of each token once, by the numbers that one process computes alone."""
    compare(model, tmp_path, SHARED, "noted")
    (ours, numbers), (theirs, expected) = (notes_of(tmp_path / each / "noted/run") for each in ("both", "one"))
    assert ours == theirs == ["000001.notes"]
    assert len(numbers) == 2 * 7 and numbers.keys() == expected.keys()
    for name, columns in numbers.items():
        assert {len(each) for each in columns.values()} == {7 + int(name[1]) // 3}, name
        for column, values in columns.items():
            assert values == pytest.approx(expected[name][column], abs=1e-4), (name, column)


def notes_of(run: Path) -> tuple[list[str], dict[tuple[int, str], dict[str, list[float | None]]]]:
    """The files, and the columns of each sample (by step and episode), which is noted once."""
    files, found = note_files(run / NOTES_FOLDER), {}
    for path in files:
        with path.open("rb") as file:
            for each in [numbers_of(file, frame) for frame in frames(file) if frame.begins]:
                assert each is not None
                name = (each[0].step, each[0].episode)
                assert name not in found
                found[name] = dict(each[1])
    return [path.name for path in files], found


@pytest.mark.slow
def test_more_processes_than_keys_heads_have(model: Path, tmp_path: Path) -> None:
    """Four processes of two heads of keys, which are copied: their gradients are sums."""
    compare(model, tmp_path, {"context_parallel_size": 4}, "grpo", size=4)


@pytest.mark.slow
def test_the_loss_of_routers_is_that_of_all_tokens(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    compare(write_model(tmp_path / "model", model_type="qwen3_moe", **experts), tmp_path, SHARED, "router")


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "parts"), [("none", 1.0), ("layers", 0.5)])
def test_all_weights(model: Path, tmp_path: Path, sharding: str, parts: float) -> None:
    assert train_both(model, tmp_path / "two", {**SHARED, "sharding": sharding}, "full") == [0, 0]
    check_same_model(model, tmp_path / "two", tmp_path / "one", "full", parts=parts)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_other_groups(model: Path, tmp_path: Path) -> None:
    assert train_both(model, tmp_path / "two", SHARED, "gspo", steps=5) != [0, 0]
    assert (tmp_path / "two" / "gspo" / "run" / STATE_FILE).exists()
    assert train_both(model, tmp_path / "two", {}, "gspo") == [0, 0]
    check_same(model, tmp_path / "two", tmp_path / "one", "gspo")


@pytest.mark.slow
def test_a_family_is_computed_as_alone_or_refused(tmp_path: Path) -> None:
    """Windows, latent attention, experts, and models whose attention stays their own."""
    torch.set_num_threads(1)
    for family in FAMILIES:
        if family.how != "refused":
            write_family(tmp_path / family.model_type, family)
    statuses, said = run_together(tmp_path, tmp_path / "out", {}, program="share_families.py")
    assert statuses == [0, 0], said
    shared = torch.load(tmp_path / "out")
    for family in FAMILIES:
        if family.how == "refused":
            continue
        found = shared[family.model_type]
        if isinstance(found, str):
            assert "context_parallel_size = 2 is not for" in found and found.endswith("; set 1"), found
            assert family.how == "one sequence" or "cannot be shared by 2 processes evenly" in found, found
            continue
        logprobs, gradient = figures(tmp_path / family.model_type, family.targets)
        torch.testing.assert_close(found[0], logprobs, rtol=1e-5, atol=1e-4, msg=family.model_type)
        difference = (found[1] - gradient).norm() / gradient.norm()
        assert difference < 1e-3, (family.model_type, difference)


def test_what_cannot_be_shared_is_one_line(tmp_path: Path) -> None:
    odd = write_model(tmp_path / "odd", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    statuses, said = run_together(odd, tmp_path / "out", SHARED, "sft")
    assert statuses == [1, 1]
    wanted = (
        "context_parallel_size = 2 is not for llama: its 3 heads (of 3 keys) cannot be shared by 2 processes evenly"
    )
    for each in said:
        assert f"TrainingError: {wanted}; set 1" in each.strip().splitlines()[-1]


@pytest.mark.parametrize("kind", [LoraTrainer, FullTrainer])
def test_processes_that_are_not_there_are_refused(model: Path, kind: type[LoraTrainer] | type[FullTrainer]) -> None:
    method = "full" if kind is FullTrainer else "lora"
    with pytest.raises(TrainingError, match="= 2 needs a multiple of 2 processes, and there is 1: set nproc_per_node"):
        kind(model, EXACT.model_copy(update={**SHARED, "method": method}))


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="context_parallel_size = 3 has to divide nproc_per_node = 4: set 4, or"):
        TrainingSettings(nproc_per_node=4, context_parallel_size=3)
    with pytest.raises(ConfigError, match="context_parallel_size = 2 is for several processes: set nproc_per_node"):
        check_trainable(RLSettings(training=TrainingSettings(context_parallel_size=2)))
    assert TrainingSettings(nproc_per_node=4, context_parallel_size=2).context_parallel_size == 2


def test_a_layout_is_cut_into_equal_parts_and_its_attention_knows_all_of_it() -> None:
    layout = lay_out([tuple(range(2, 150)), (*range(2, 50), *range(200, 277))])
    parts = []
    for rank in range(4):
        group = ContextGroup.__new__(ContextGroup)
        group.rank, group.size = rank, 4
        parts.append(PackedRows(layout, torch.device("cpu"), group))
    whole = PackedRows(layout, torch.device("cpu"))
    count = len(layout.ids)
    for name in ("ids", "positions"):
        own = torch.cat([getattr(each, f"own_{name}")[0] for each in parts])
        assert own.tolist() == [*getattr(layout, name), *[0] * (-count % 4)]
        assert torch.equal(getattr(parts[3], name), getattr(whole, f"own_{name}"))
    assert all(map(torch.equal, visible_blocks(parts[1], 64), visible_blocks(whole, 64)))


def test_ranks_without_a_row_of_a_short_layout_give_none_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows for four ranks are two each, so that the last has padding alone. What a rank adds is summed up here."""
    monkeypatch.setattr(ContextGroup, "all_reduce", lambda self, values: None)
    rows, whole = torch.arange(1.0, 11.0).view(5, 2), torch.zeros(5, 2)
    for rank in range(4):
        group = ContextGroup.__new__(ContextGroup)
        group.rank, group.size = rank, 4
        own = rows[group.own(5).start : group.own(5).stop]
        whole += group.all_rows(torch.cat([own, torch.ones(2 - len(own), 2)]), 5)
    assert torch.equal(whole, rows)


def test_ranks_of_a_group_have_the_same_shard() -> None:
    dealt = []
    for rank in range(6):
        ranks = ProcessGroup.__new__(ProcessGroup)
        ranks.rank, ranks.size, ranks.data_size = rank, 6, 2
        dealt.append(ranks.shard(list(range(5))))
    assert dealt == [([0, 2, 4], [])] * 3 + [([1, 3], [0])] * 3
    assert current_ranks(torch.device("cpu")).data_size == 1

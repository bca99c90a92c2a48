"""Attention on a GPU is that of processors: which rows attend to which here, numbers and gradients on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_layouts import TREES, WINDOWS, Heads, attends, difference, exact, inputs_of, tree_of, with_gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openhands_rl_plugin.training.data.layout import Layout, lay_out
from openhands_rl_plugin.training.policies import attention_on_cuda as on_cuda
from openhands_rl_plugin.training.policies.attention_in_blocks import attention_in_blocks
from openhands_rl_plugin.training.policies.packed_attention import attend, attention_of
from openhands_rl_plugin.training.policies.packed_rows import PackedRows
from openhands_rl_plugin.training.policies.visible_blocks import BLOCK, VisibleBlocks, visible_blocks

CPU = torch.device("cpu")
SHAPES = (
    Heads(),
    Heads(8, 8, 64, 64),
    Heads(6, 2, 40, 40),
    Heads(4, 1, 96, 32),
    Heads(4, 4, 192, 128),
    Heads(2, 1, 8, 8),
    Heads(14, 2, 128, 128),
)
"""No power of two, values of another width than keys, as many heads a key as families have, and too narrow ones."""


TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 1e-2}
"""On a GPU, where float32 is multiplied by TF32."""


def blocks_of(layout: Layout, window: int | None) -> VisibleBlocks:
    return visible_blocks(PackedRows(layout, CPU), window)


def pairs_of(blocks: VisibleBlocks) -> Tensor:
    """[R, R] booleans of the rows with padding, as a kernel sees them pair by pair."""
    at = torch.arange(blocks.rows)
    to_earlier = (at[None] <= at[:, None]) & (at[:, None] < blocks.ends[None])
    return to_earlier & (blocks.positions[None] > blocks.befores[:, None])


def listed(numbers: Tensor, places: Tensor) -> Tensor:
    found = torch.zeros(places.shape[2:], dtype=torch.bool)
    for row, count in enumerate(numbers[0, 0].tolist()):
        found[row, places[0, 0, row, :count].long()] = True
    return found


@settings(max_examples=40)
@given(TREES, WINDOWS)
def test_pairs_are_those_of_the_sequences(layout: Layout, window: int | None) -> None:
    count = len(layout.ids)
    pairs = pairs_of(blocks_of(layout, window))
    assert torch.equal(pairs[:count, :count], attends(layout, window))
    assert not pairs[:count, count:].any()
    assert pairs.any(1).all(), "a row without keys has no softmax"


@settings(max_examples=40)
@given(TREES, WINDOWS)
def test_blocks_that_are_skipped_have_no_pair_and_unmasked_ones_all(layout: Layout, window: int | None) -> None:
    blocks = blocks_of(layout, window)
    size = blocks.rows // BLOCK
    by_block = pairs_of(blocks).view(size, BLOCK, size, BLOCK).transpose(1, 2).flatten(2)
    masked, full = listed(blocks.keys, blocks.key_places), listed(blocks.full_keys, blocks.full_key_places)
    assert not (masked & full).any()
    assert not by_block.any(2)[~(masked | full)].any()
    assert torch.equal(by_block.all(2), full) or window is not None
    assert by_block.all(2)[full].all()
    assert torch.equal(listed(blocks.queries, blocks.query_places), masked.t())
    assert torch.equal(listed(blocks.full_queries, blocks.full_query_places), full.t())


def test_a_long_prefix_is_not_masked_and_other_sequences_are_not_computed() -> None:
    """Of 16 blocks of a prefix and 8 each of two continuations, the kernel masks those on the diagonal only."""
    prefix = tuple(range(16 * BLOCK))
    layout = lay_out([(*prefix, *(at for _ in range(8 * BLOCK))) for at in (5000, 6000)])
    blocks = blocks_of(layout, None)
    assert blocks.keys[0, 0].tolist() == [1] * 32
    assert blocks.full_keys[0, 0].tolist() == [*range(24), *range(16, 24)]


def test_the_mask_is_made_once_a_pass_and_window() -> None:
    rows = PackedRows(tree_of(1, 3, 200), CPU)
    assert visible_blocks(rows, None) is visible_blocks(rows, None)
    assert visible_blocks(rows, None) is not visible_blocks(rows, 20)


def compiled_here(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    torch._dynamo.reset()
    made: dict[tuple[float, float | None], Any] = {}

    def get(scaling: float, softcap: float | None) -> Any:
        key = (scaling, softcap)
        if key not in made:
            made[key] = torch.compile(on_cuda.flex_attention_of(*key), fullgraph=True, **options)
        return made[key]

    monkeypatch.setattr(on_cuda, "_compiled", get)


def flexible(layout: Layout, inputs: list[Tensor], window: int | None, softcap: float | None = None) -> Tensor:
    found = on_cuda.flexible_attention(*inputs, blocks_of(layout, window), 0.3, softcap)
    return found.transpose(1, 2)


@pytest.mark.parametrize("shape", (SHAPES[2], SHAPES[4], SHAPES[5]), ids=str)
def test_flexattention_by_plain_operations_gives_the_processors_numbers(
    shape: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_here(monkeypatch, backend="eager")
    for seed, window in ((1, None), (2, 30), (3, 1)):
        layout = tree_of(seed, 4, 200)
        with torch.no_grad():
            inputs = [each.detach() for each in inputs_of(layout, shape, torch.float32)]
            expected = attention_in_blocks(*inputs, PackedRows(layout, CPU), 0.3, window)
            assert difference(flexible(layout, inputs, window), expected) < 1e-5


def test_one_kernel_serves_all_lengths_and_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_here(monkeypatch, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for seed, leaves, window in ((1, 1, None), (2, 2, 30), (3, 5, None), (4, 9, 200)):
        layout = tree_of(seed, leaves, 300)
        with torch.no_grad():
            flexible(layout, [each.detach() for each in inputs_of(layout, Heads(), torch.float32)], window)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (60, None), (None, 2.0)])
def test_a_compiled_kernel_that_skips_blocks_gives_the_processors_numbers(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor's own kernel of FlexAttention: it has no gradient, and one length at a time."""
    compiled_here(monkeypatch, dynamic=False)
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda *_: None)
    layout = tree_of(7, 5, 500)
    with torch.no_grad():
        inputs = [each.detach() for each in inputs_of(layout, Heads(4, 2, 32, 16), torch.float32)]
        found = flexible(layout, inputs, window, softcap)
        assert difference(found, plain(layout, inputs, window, softcap)) < 1e-5


def plain(layout: Layout, inputs: list[Tensor], window: int | None, softcap: float | None) -> Tensor:
    """Softmax over the whole matrix of scores."""
    query, key, value = inputs
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    hidden = ~attends(layout, window).to(query.device)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2)


def test_score_caps_are_left_to_the_models_own_attention_on_processors() -> None:
    layout = tree_of(1, 2, 50)
    query, key, value = inputs_of(layout, Heads(), torch.float32)
    with pytest.raises(ValueError, match="score caps"):
        attend(torch.nn.Module(), query, key, value, None, rows=PackedRows(layout, CPU), softcap=5.0)


@pytest.mark.gpu
class TestOnAGpu:
    """Against the processor's path, in float64 but for its scores."""

    def compared(
        self, layout: Layout, shape: Heads, dtype: torch.dtype, window: int | None, *, checkpointed: bool = False
    ) -> None:
        inputs = inputs_of(layout, shape, dtype, "cuda")
        rows = PackedRows(layout, torch.device("cuda"))

        def run() -> Tensor:
            if checkpointed:
                found = checkpoint(attention_of, *inputs, rows, 0.2, window, use_reentrant=False)
                assert isinstance(found, Tensor)
                return found
            return attention_of(*inputs, rows, 0.2, window)

        names = ("output", "query", "key", "value")
        mine = with_gradients(run, inputs)
        for name, found, expected in zip(names, mine, exact(layout, inputs, 0.2, window), strict=True):
            assert difference(found, expected) < TOLERANCES[dtype], (name, shape, dtype, window, len(layout.ids))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_flexattention_gives_the_processors_numbers_and_gradients(self, shape: Heads, dtype: torch.dtype) -> None:
        torch.set_float32_matmul_precision("high")
        assert not on_cuda._problem(shape.heads, shape.kv_heads, shape.dim, shape.own, dtype, 0.2, None)
        for seed, window in ((1, None), (2, 30), (3, 1), (4, 129)):
            self.compared(tree_of(seed, 6, 500), shape, dtype, window)

    @settings(max_examples=60)
    @given(TREES, WINDOWS, st.sampled_from([torch.bfloat16, torch.float32]))
    def test_random_trees(self, layout: Layout, window: int | None, dtype: torch.dtype) -> None:
        torch.set_float32_matmul_precision("high")
        self.compared(layout, Heads(), dtype, window)

    @pytest.mark.parametrize("shape", [Heads(8, 2, 64, 64), Heads(4, 4, 128, 128)], ids=str)
    def test_flash_gives_the_processors_numbers_and_gradients(self, shape: Heads) -> None:
        for length in (1, 2, 127, 700):
            layout = lay_out([tuple(range(length))])
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                self.compared(layout, shape, torch.bfloat16, None)
            assert any("flash" in event.name for event in profile.events()), "it was not flash"

    def test_gradient_checkpointing_changes_nothing(self) -> None:
        torch.set_float32_matmul_precision("high")
        self.compared(tree_of(5, 4, 300), Heads(), torch.bfloat16, None, checkpointed=True)
        # Its first use in a process, below checkpointing
        on_cuda._problem.cache_clear()
        on_cuda._compiled.cache_clear()
        self.compared(tree_of(6, 4, 300), Heads(2, 2, 48, 48), torch.bfloat16, 40, checkpointed=True)

    def test_score_caps(self) -> None:
        layout = tree_of(8, 5, 400)
        inputs = inputs_of(layout, Heads(), torch.bfloat16, "cuda")
        rows = PackedRows(layout, torch.device("cuda"))
        wide = [each.detach().double().requires_grad_() for each in inputs]
        mine = with_gradients(lambda: attention_of(*inputs, rows, 0.3, 50, 2.0), inputs)
        for found, expected in zip(mine, with_gradients(lambda: plain(layout, wide, 50, 2.0), wide), strict=True):
            assert difference(found, expected) < TOLERANCES[torch.bfloat16]

    def test_no_kernel_is_compiled_anew_for_another_length(self) -> None:
        self.compared(tree_of(1, 3, 300), Heads(), torch.bfloat16, None)
        torch._dynamo.utils.counters.clear()
        for seed, leaves, window in ((2, 2, 30), (3, 5, None), (4, 9, 200)):
            self.compared(tree_of(seed, leaves, 300), Heads(), torch.bfloat16, window)
        assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def test_without_a_compiler_it_computes_as_processors_do_and_says_so_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refused(*_: object) -> Any:
            raise RuntimeError("Cannot find a working triton installation")

        monkeypatch.setattr(on_cuda, "_compiled", refused)
        on_cuda._problem.cache_clear()
        try:
            for seed in (1, 2):
                self.compared(tree_of(seed, 3, 200), Heads(), torch.bfloat16, None)
        finally:
            on_cuda._problem.cache_clear()
        (line,) = [record.message for record in caplog.records if "FlexAttention" in record.message]
        assert "RuntimeError: Cannot find a working triton installation" in line

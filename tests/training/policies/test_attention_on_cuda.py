"""Attention on a GPU is that of processors: which rows attend to which here, numbers and gradients on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from packed_layouts import (
    TREES,
    WINDOWS,
    Heads,
    attends,
    difference,
    exact,
    inputs_of,
    plain,
    tree_of,
    with_gradients,
    wrong,
)
from rounded_attention import rounded
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
        assert difference(found, plain(layout, inputs, 0.3, window, softcap)) < 1e-5


def test_score_caps_are_left_to_the_models_own_attention_on_processors() -> None:
    layout = tree_of(1, 2, 50)
    query, key, value = inputs_of(layout, Heads(), torch.float32)
    with pytest.raises(ValueError, match="score caps"):
        attend(torch.nn.Module(), query, key, value, None, rows=PackedRows(layout, CPU), softcap=5.0)


ROUNDED = [(None, 150), (30, 150), (2, 100), (1, 100), (None, 1)]
"""Windows, and tokens of the longest sequence."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", (SHAPES[0], SHAPES[4]), ids=str)
def test_bounds_are_above_what_tensor_cores_round_and_below_a_single_token(shape: Heads, dtype: torch.dtype) -> None:
    for seed, (window, longest) in enumerate(ROUNDED):
        layout = tree_of(seed, 3, longest)
        inputs = inputs_of(layout, shape, dtype)
        expected = exact(layout, inputs, shape.scale, window)
        assert not wrong(rounded(layout, inputs, shape.scale, window), expected, dtype), (window, longest)
        if window is not None:
            assert len(wrong(rounded(layout, inputs, shape.scale, window + 1), expected, dtype).split(", ")) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_processors_numbers_and_gradients_are_within_the_bounds(dtype: torch.dtype) -> None:
    for window, longest in ROUNDED:
        compared(tree_of(1, 3, longest), Heads(), dtype, window, device="cpu")


def compared(
    layout: Layout,
    shape: Heads,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None = None,
    *,
    device: str = "cuda",
    checkpointed: bool = False,
) -> None:
    """Attention as the device computes it, against that in float64."""
    inputs = inputs_of(layout, shape, dtype, device)
    rows = PackedRows(layout, torch.device(device))

    def run() -> Tensor:
        given = (*inputs, rows, shape.scale, window, softcap)
        found = checkpoint(attention_of, *given, use_reentrant=False) if checkpointed else attention_of(*given)
        assert isinstance(found, Tensor)
        return found

    problem = wrong(with_gradients(run, inputs), exact(layout, inputs, shape.scale, window, softcap), dtype)
    assert not problem, (problem, shape, dtype, window, len(layout.ids))


@pytest.fixture
def tensor_cores() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
ON_A_GPU = [
    (SHAPES[0], BFLOAT16),
    (SHAPES[2], BFLOAT16),
    (SHAPES[4], BFLOAT16),
    (SHAPES[6], BFLOAT16),
    (SHAPES[1], FLOAT32),
    (SHAPES[3], FLOAT32),
    (SHAPES[5], FLOAT32),
]
"""A kernel each, which takes ten to twenty seconds to compile."""


@pytest.mark.gpu
@pytest.mark.usefixtures("tensor_cores")
class TestOnAGpu:
    """The quick ones first: with ``-x`` they end what cannot go well."""

    @pytest.mark.parametrize("shape", [Heads(8, 2, 64, 64), Heads(4, 4, 128, 128)], ids=str)
    def test_flash_gives_exact_numbers_and_gradients(self, shape: Heads) -> None:
        for length in (1, 2, 127, 700):
            layout = lay_out([tuple(range(length))])
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                compared(layout, shape, BFLOAT16, None)
            used = {event.name for event in profile.events()}
            assert "aten::_scaled_dot_product_flash_attention" in used, "it was not flash"

    def test_without_a_compiler_it_computes_as_processors_do_and_says_so_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refused(*_: object) -> Any:
            raise RuntimeError("Cannot find a working triton installation")

        monkeypatch.setattr(on_cuda, "_compiled", refused)
        on_cuda._problem.cache_clear()
        try:
            for seed in (1, 2):
                compared(tree_of(seed, 3, 200), Heads(), BFLOAT16, None)
        finally:
            on_cuda._problem.cache_clear()
        (line,) = [record.message for record in caplog.records if "FlexAttention" in record.message]
        assert "RuntimeError: Cannot find a working triton installation" in line

    @pytest.mark.parametrize(("shape", "dtype"), ON_A_GPU, ids=str)
    def test_flexattention_gives_exact_numbers_and_gradients(self, shape: Heads, dtype: torch.dtype) -> None:
        problem = on_cuda._problem(shape.heads, shape.kv_heads, shape.dim, shape.own, dtype, shape.scale, None)
        assert problem == ""
        for seed, window in ((1, None), (2, 30), (3, 1), (4, 129)):
            compared(tree_of(seed, 6, 500), shape, dtype, window)

    def test_no_kernel_is_compiled_anew_for_another_length(self) -> None:
        compared(tree_of(1, 3, 300), Heads(), BFLOAT16, None)
        torch._dynamo.utils.counters.clear()
        for seed, leaves, window in ((2, 2, 30), (3, 5, None), (4, 9, 200)):
            compared(tree_of(seed, leaves, 300), Heads(), BFLOAT16, window)
        assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]

    @settings(max_examples=30)
    @given(TREES, WINDOWS)
    def test_random_trees(self, layout: Layout, window: int | None) -> None:
        compared(layout, Heads(), BFLOAT16, window)

    def test_gradient_checkpointing_changes_nothing(self) -> None:
        compared(tree_of(5, 4, 300), Heads(), BFLOAT16, None, checkpointed=True)
        # Its first use in a process, below checkpointing
        on_cuda._problem.cache_clear()
        on_cuda._compiled.cache_clear()
        compared(tree_of(6, 4, 300), Heads(), BFLOAT16, 40, checkpointed=True)

    def test_score_caps(self) -> None:
        compared(tree_of(8, 5, 400), Heads(), BFLOAT16, 50, 2.0)

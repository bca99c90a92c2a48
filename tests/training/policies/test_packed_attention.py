"""The attention of a packed layout: which rows attend to which, and on a GPU the processor's numbers and gradients."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.flex_attention as flex
from hypothesis import given, settings
from packed_layouts import TREES, WINDOWS, Heads, attends, exact, inputs_of, plain, tree_of, with_gradients, wrong
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from openhands_rl_plugin.training.data.packing import Layout, lay_out
from openhands_rl_plugin.training.policies.packed_model import PackedRows, attend, block_mask

CPU = torch.device("cpu")


@settings(max_examples=40)
@given(TREES, WINDOWS)
def test_pairs_are_those_of_the_sequences(layout: Layout, window: int | None) -> None:
    mask, at = block_mask(PackedRows(layout, CPU), window), torch.arange(len(layout.ids))
    assert torch.equal(mask.mask_mod(0, 0, at[:, None], at[None]), attends(layout, window))


@pytest.mark.parametrize(("window", "softcap"), [(30, None), (None, 2.0)])
def test_flexattention_gives_the_processors_numbers(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither compiled nor traced, which takes seconds.
    monkeypatch.setattr(flex, "WrappedFlexAttention", lambda training: lambda: flex_attention)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    layout = tree_of(1, 4, 200)
    inputs = [each.detach() for each in inputs_of(layout, Heads(4, 2, 32, 32), torch.float32)]
    mask = block_mask(PackedRows(layout, CPU), window)
    found, _ = flex.flex_attention_forward(nn.Module(), *inputs, mask, scaling=0.3, softcap=softcap)
    assert torch.allclose(found, plain(layout, inputs, 0.3, window, softcap), atol=1e-5)


def compared(
    layout: Layout, shape: Heads, dtype: torch.dtype, window: int | None, softcap: float | None = None, device="cuda"
) -> None:
    """Attention as the device computes it, against that in float64."""
    inputs, rows, module = (
        inputs_of(layout, shape, dtype, device),
        PackedRows(layout, torch.device(device)),
        nn.Module(),
    )

    def run() -> Tensor:
        return attend(module, *inputs, None, rows=rows, scaling=shape.scale, sliding_window=window, softcap=softcap)[0]

    problem = wrong(with_gradients(run, inputs), exact(layout, inputs, shape.scale, window, softcap), dtype)
    assert not problem, (problem, shape, dtype, window, len(layout.ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("window", "longest"), [(None, 150), (30, 150), (2, 100), (1, 100), (None, 1)])
def test_the_processors_numbers_and_gradients_are_within_the_bounds(
    dtype: torch.dtype, window: int | None, longest: int
) -> None:
    compared(tree_of(1, 3, longest), Heads(), dtype, window, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (Heads(8, 2, 64, 64), torch.bfloat16),
        (Heads(14, 2, 128, 128), torch.bfloat16),
        (Heads(8, 8, 64, 64), torch.float32),
    ],
    ids=str,
)
def test_a_gpu_gives_exact_numbers_and_gradients(shape: Heads, dtype: torch.dtype) -> None:
    compared(lay_out([tuple(range(700))]), shape, dtype, None)
    for seed, window in ((1, None), (2, 30), (3, 1), (4, 129)):
        compared(tree_of(seed, 6, 500), shape, dtype, window)
    compared(tree_of(8, 5, 400), shape, dtype, 50, 2.0)

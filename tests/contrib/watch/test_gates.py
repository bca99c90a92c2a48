"""What lets a candidate in: figures in, a verdict with a sentence out."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.contrib.watch.service import held_out_gate


def tasks(*values: float) -> dict[str, float]:
    return {f"task-{at:03d}": value for at, value in enumerate(values)}


HALF = tasks(*[1.0, 0.0] * 25)


@pytest.mark.parametrize(
    ("after", "passed"),
    [
        (HALF, True),
        (tasks(*[1.0] * 50), True),
        (tasks(*[0.0] * 50), False),
        (tasks(*[1.0, 0.0] * 23, *[0.0] * 4), False),  # -0.04, and it may be more
        ({"another": 1.0}, False),  # nothing in common proves nothing
    ],
)
def test_a_loss_beyond_the_margin_that_the_interval_includes_holds_it_back(
    after: dict[str, float], passed: bool
) -> None:
    assert held_out_gate(after, {"policy-v000001": HALF}, 0.05)[0] is passed


def test_small_losses_do_not_add_up() -> None:
    """Each version loses what the margin allows against the one before, and too much against the best."""
    best, used, after = tasks(*[1.0] * 60), tasks(*[1.0] * 59, 0.0), tasks(*[1.0] * 57, *[0.0] * 3)
    assert held_out_gate(after, {"used": used}, 0.09)[0]
    assert not held_out_gate(after, {"used": used, "best": best}, 0.09)[0]

"""What the terminal says of a finished stage."""

from __future__ import annotations

from openhands_rl_plugin.apps.demo.progress import stage_line
from openhands_rl_plugin.training.loop.plan import StageRecord


def test_what_was_not_learnt_from_is_named_with_its_cause() -> None:
    def line(**metrics: float) -> str:
        return stage_line(StageRecord(name="iteration-000", adapter=None, metrics=metrics, started=0.0, finished=1.0))

    assert "failed" not in line(success=0.5, failed=0.0, unscored=0.0, episodes_used=8.0)
    said = line(failed=0.0, unscored=3.0, episodes_used=0.0, episodes_unscored=3.0, episodes_flat=5.0)
    assert "3 without a reward (`openhands-rl score" in said and "failed" not in said
    assert "nothing learnt: 3 without a reward, 5 of tasks whose attempts have equal rewards" in said

"""What the terminal says of a finished stage."""

from __future__ import annotations

from openhands_rl_plugin.apps.loop.progress import stage_line
from openhands_rl_plugin.training.loop.plan import StageRecord


def test_what_was_not_learnt_from_is_named_with_its_cause() -> None:
    def line(**metrics: float) -> str:
        return stage_line(StageRecord(name="iteration-000", adapter=None, metrics=metrics, started=0.0, finished=1.0))

    assert "failed" not in line(success=0.5, failed=0.0, unscored=0.0, episodes_used=8.0)
    said = line(failed=0.0, unscored=3.0, episodes_used=0.0, episodes_unscored=3.0, episodes_flat=5.0)
    assert "3 without a reward (`openhands-rl score" in said and "failed" not in said
    assert "nothing learnt: 3 without a reward, 5 of tasks whose attempts have equal rewards" in said


def test_of_a_search_it_says_how_many_states_teach() -> None:
    found = {"success": 0.1, "proposals": 64.0, "states": 8.0, "states_differing": 3.0}

    def line(**more: float) -> str:
        metrics = {**found, "episodes_used": 0.0, "episodes_alone": 3.0, **more}
        return stage_line(StageRecord(name="iteration-000", adapter=None, metrics=metrics, started=0.0, finished=1.0))

    assert line(samples=20.0, last_loss=0.5).endswith("success 0.100, loss 0.500, answers differ in 3 of 8 states")
    assert line(states_differing=0.0).endswith("answers differ in 0 of 8 states: nothing learnt")
    assert "nothing learnt: no answer of the search was judged" in line(states=0.0, states_differing=0.0)

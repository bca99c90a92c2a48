"""The journal survives half lines, full disks and other writers, and says what state follows."""

from __future__ import annotations

from openhands_rl_plugin.contrib.watch.journal import Entry, WatchStep, state_of


def entry(number: int, step: WatchStep, adapter: str = "", at: float = 0.0, **figures: object) -> Entry:
    return Entry.model_validate(
        {"number": number, "at": at, "step": step, "round": 1, "adapter": adapter, "said": "", "figures": figures}
    )


def test_a_rollback_ends_the_round_and_what_was_decided_too_late_changes_nothing() -> None:
    begun = entry(1, WatchStep.GATHERED, algorithm="sft", parent=None, latest=0, episodes={"a": 1.0}, others=["b"])
    trained = entry(2, WatchStep.TRAINED, "policy-v000001")
    back = entry(3, WatchStep.ROLLED_BACK, dropped=["policy-v000001"])
    late = entry(4, WatchStep.PASSED, "policy-v000001", gate="held-out")
    state = state_of([begun, trained, back, late])
    assert (state.round, state.dropped, state.seen) == (None, {"policy-v000001"}, {"a", "b"})
    assert state.learnt == set(), "what was only tried may be tried again with others"

"""The journal survives half lines, full disks and other writers, and says what state follows."""

from __future__ import annotations

from pathlib import Path

import pytest
from full_disk import no_file_larger_than

from openhands_rl_plugin.contrib.watch.journal import Entry, Journal, WatchStep, state_of
from openhands_rl_plugin.core.errors import StorageError


def test_nothing_of_a_line_stays_that_a_full_disk_did_not_take(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(WatchStep.FROZEN, "one", figures={"digest": "d"})
    size = journal.file.stat().st_size
    with no_file_larger_than(size + 20), pytest.raises(StorageError, match=r"journal\.jsonl cannot be written"):
        journal.append(WatchStep.JUDGED, "two")
    assert journal.file.stat().st_size == size
    journal.append(WatchStep.JUDGED, "three")
    assert [entry.said for entry in journal.read()] == ["one", "three"]


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

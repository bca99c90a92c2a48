"""What the watch is doing, from the journal and the pointer; nothing is locked or asked."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.contrib.watch.gates import CANARY, HELD_OUT, SAFETY
from openhands_rl_plugin.contrib.watch.journal import Entry, Journal
from openhands_rl_plugin.contrib.watch.pausing import is_paused
from openhands_rl_plugin.contrib.watch.state import Round, state_of
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.models.adapters.store import AdapterStore

_LAST = 8


class RoundStatus(Frozen):
    """A candidate on its way. ``candidate``: empty until it is trained. ``began``: Unix seconds. ``stage``: what is
    done now."""

    number: int
    algorithm: str
    parent: str | None
    candidate: str
    passed: tuple[str, ...]
    episodes: int
    began: float
    stage: str

    @classmethod
    def of(cls, current: Round) -> RoundStatus:
        """Of the round in progress."""
        return cls(
            number=current.number,
            algorithm=current.algorithm,
            parent=current.parent,
            candidate=current.candidate,
            passed=current.passed,
            episodes=len(current.episodes),
            began=current.began,
            stage=_stage_of(current),
        )


def _stage_of(current: Round) -> str:
    if not current.candidate:
        return "training"
    return next(
        (f"{gate} gate" for gate in (CANARY, HELD_OUT, SAFETY) if gate not in current.passed), "coming into use"
    )


class Status(Frozen):
    """``in_use``: the version, ``None`` for the base model. ``measured``: version -> mean success on the held-out
    suite, the base model's under an empty name. ``judged``: the figures of the last look at the store."""

    adapter: str
    in_use: str | None
    paused: bool
    rounds: int
    learnt: int
    admitted: tuple[str, ...]
    dropped: tuple[str, ...]
    round: RoundStatus | None
    measured: dict[str, float]
    judged: JsonObject
    last: tuple[Entry, ...]

    def lines(self) -> list[str]:
        """For a terminal."""
        told = [f"{self.adapter}: {self.in_use or 'the base model'} is in use" + (", paused" if self.paused else "")]
        if self.round is not None:
            candidate = f"{self.round.candidate}, " if self.round.candidate else ""
            gates = ", ".join(self.round.passed) or "none yet"
            about = f"from {self.round.episodes} episodes; passed: {gates}; now: {self.round.stage}"
            told.append(f"round {self.round.number}: {candidate}{about}")
        elif self.judged:
            told.append(f"waits: {self.judged.get('missing') or 'nothing is missing'}")
        told.append(f"rounds: {self.rounds}, admitted: {len(self.admitted)}, held or rolled back: {len(self.dropped)}")
        return [*told, *(f"  {each.number} {each.step}: {each.said}" for each in self.last)]


def status_of(folder: Path, adapters: AdapterStore, name: str) -> Status:
    """As it is now. Raises ``StorageError`` for a journal or a pointer that is damaged."""
    entries = Journal(folder).read()
    state, current = state_of(entries), adapters.current(name)
    return Status(
        adapter=name,
        in_use=current.name if current is not None else None,
        paused=is_paused(folder),
        rounds=state.rounds,
        learnt=len(state.learnt),
        admitted=state.admitted,
        dropped=tuple(sorted(state.dropped)),
        round=RoundStatus.of(state.round) if state.round is not None else None,
        measured={name: each.mean for name, each in state.measured.items()},
        judged={**state.judged},
        last=entries[-_LAST:],
    )

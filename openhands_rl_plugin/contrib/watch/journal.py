"""The watch's journal, the state that follows from it, its status, and the way back to an earlier version."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pydantic import Field, ValidationError

from openhands_rl_plugin.apps.serving import BASE, find_version
from openhands_rl_plugin.config.rl import AlgorithmName
from openhands_rl_plugin.core.errors import ConfigError, StorageError, describe
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import Adapter, Frozen, JsonObject
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore

JOURNAL = "journal.jsonl"
_LAST = 8


class WatchStep(StrEnum):
    """The event of a journal line. After ``COULD_NOT`` the state is unchanged, and the same step is tried again."""

    FROZEN = "frozen"
    """The held-out suite is fixed to these tasks."""
    JUDGED = "judged"
    """New episodes were judged; the line has the counts, and what a round still needs."""
    GATHERED = "gathered"
    """A round begins: these episodes, this algorithm, this parent."""
    TRAINED = "trained"
    MEASURED = "measured"
    """A version was rolled out on the held-out suite."""
    PASSED = "passed"
    """In older journals: the candidate passed a gate."""
    HELD = "held"
    """A gate rejected the candidate: the round ends, and the version in use stays."""
    ADMITTED = "admitted"
    """The candidate passed the gates and is in use: the round ends."""
    ROLLED_BACK = "rolled-back"
    """An earlier version, or the base model, is in use again; a round in progress ends."""
    COULD_NOT = "could-not"


class Entry(Frozen):
    """A line. ``at``: Unix seconds. ``round``: 0 outside of one. ``adapter``: the version that it is about."""

    number: int = Field(ge=1)
    at: float
    step: WatchStep
    round: int = 0
    adapter: str = ""
    said: str
    figures: JsonObject = Field(default_factory=dict)


class Round(Frozen):
    """A round: one candidate, from its episodes to a decision.

    ``episodes``: id -> value, for training; ``others``: ids of the other judged episodes. ``latest``: the newest
    version number when the round began. ``candidate``: its versioned name, once trained.
    """

    number: int
    algorithm: AlgorithmName
    parent: str | None
    latest: int
    episodes: dict[str, float]
    others: tuple[str, ...] = ()
    candidate: str = ""


class _Measured(Frozen, extra="ignore"):
    success: dict[str, float]


@dataclass
class State:
    """The state after all lines of the journal.

    ``suite``: digest of the frozen suite, empty before. ``seen``: episodes judged when a round began, which are not
    new; ``learnt``: those that a candidate was trained on that came into use, rolled back since or not.
    ``admitted``: the versions in the order in which they came into use; ``dropped``: those that were held back or
    rolled back. ``measured``: version, or an empty name for the base model -> task -> share of its attempts that
    succeeded. ``tries``: how often the present step could not be done. ``judged``: figures of the last look.
    """

    round: Round | None = None
    rounds: int = 0
    suite: str = ""
    seen: set[str] = field(default_factory=set[str])
    learnt: set[str] = field(default_factory=set[str])
    admitted: list[str] = field(default_factory=list[str])
    dropped: set[str] = field(default_factory=set[str])
    measured: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    tries: int = 0
    judged: JsonObject = field(default_factory=dict)


class Journal:
    """The journal in ``folder``, which one process writes at a time. Methods raise ``StorageError``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / JOURNAL

    def read(self) -> tuple[Entry, ...]:
        """All lines, oldest first; an incomplete last line is ignored."""
        try:
            lines = self._lines()
            return tuple(map(Entry.model_validate_json, lines))
        except ValidationError as error:
            raise StorageError(f"{self.file} is damaged ({describe(error)}); move it away to begin anew") from error

    def append(
        self, step: WatchStep, said: str, *, round: int = 0, adapter: str = "", figures: JsonObject | None = None
    ) -> Entry:
        """Append a line durably. If this raises, no part of the line is in the journal."""
        lines, own = self._lines(), {"step": step, "round": round, "adapter": adapter, "figures": figures or {}}
        entry = Entry.model_validate({**own, "number": len(lines) + 1, "at": time.time(), "said": redact_text(said)})
        content = b"\n".join([*lines, entry.model_dump_json().encode(), b""])
        write_file(self.file, content, PRIVATE, parents=True)
        return entry

    def _lines(self) -> list[bytes]:
        try:
            return self.file.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.file} cannot be read: {describe(error)}") from error

    def state(self) -> State:
        """The state that follows from all lines."""
        return state_of(self.read())


def state_of(entries: Sequence[Entry]) -> State:
    """The state that follows from these lines. Raises ``StorageError`` for figures that do not fit their step."""
    state = State()
    for entry in entries:
        try:
            _advance(state, entry)
        except (KeyError, ValidationError) as error:
            raise StorageError(f"line {entry.number} of the journal is damaged: {describe(error)}") from error
    return state


def _advance(state: State, entry: Entry) -> None:
    figures, current = entry.figures, state.round
    match entry.step:
        case WatchStep.COULD_NOT:
            state.tries += 1
            return
        case WatchStep.JUDGED:
            state.judged = figures
            return
        case WatchStep.FROZEN:
            state.suite, state.measured = str(figures["digest"]), {}
        case WatchStep.GATHERED:
            state.round = Round.model_validate({**figures, "number": entry.round})
            state.rounds = entry.round
            state.seen |= {*state.round.episodes, *state.round.others}
        case WatchStep.MEASURED:
            state.measured[entry.adapter] = _Measured.model_validate(figures).success
        case WatchStep.TRAINED if current is not None:
            state.round = current.model_copy(update={"candidate": entry.adapter})
        case WatchStep.HELD:
            state.round = None
            state.dropped |= {entry.adapter} - {""}
        case WatchStep.ADMITTED:
            state.learnt |= current.episodes.keys() if current is not None else set[str]()
            state.admitted.append(entry.adapter)
            state.round = None
        case WatchStep.ROLLED_BACK:
            gone = figures.get("dropped")
            state.dropped |= {str(name) for name in gone} if isinstance(gone, list) else set[str]()
            state.dropped -= {entry.adapter}
            state.round = None
        case _:
            pass
    state.tries = 0


def status_lines(journal: Journal, adapters: AdapterStore, name: str) -> list[str]:
    """The version in use, the running round, and the last lines. Raises ``StorageError`` for a damaged journal."""
    entries = journal.read()
    state, current = state_of(entries), adapters.current(name)
    lines = [f"{name}: {current.name if current else 'the base model'} is in use"]
    if (going := state.round) is not None:
        lines.append(f"round {going.number}: {going.candidate or 'a candidate'} from {len(going.episodes)} episodes")
    elif state.judged:
        lines.append(f"waits: {state.judged.get('missing') or 'nothing is missing'}")
    lines.append(f"rounds: {state.rounds}, admitted: {len(state.admitted)}, held or rolled back: {len(state.dropped)}")
    return lines + [f"  {each.number} {each.step}: {each.said}" for each in entries[-_LAST:]]


async def roll_back(
    journal: Journal, adapters: AdapterStore, publisher: AdapterPublisher, name: str, wanted: str | None
) -> Entry:
    """Use an earlier version of ``name`` again: ``wanted`` (a number, a name or ``base``), or the one before.

    Nothing is learnt any more from the episodes of the versions that are left. Raises ``ConfigError``, ``PublishError``
    and ``StorageError``; then what was in use still is.
    """
    state, current = journal.state(), adapters.current(name)
    target = _target(state, adapters, name, current, wanted)
    back = target.name if target is not None else ""
    if target is not None:
        await publisher.publish(target)
    else:
        adapters.point_at_base(name)
    # Those admitted since the target, what was in use, and a candidate that was on its way.
    since = state.admitted[state.admitted.index(back) + 1 :] if back in state.admitted else []
    candidate = state.round.candidate if state.round else ""
    also = [*([] if back else state.admitted), current.name if current else "", candidate]
    left = [each for each in dict.fromkeys([*since, *also]) if each and each != back]
    words = f"{back or 'the base model'} is in use again{f', {", ".join(left)} no more' if left else ''}"
    return journal.append(WatchStep.ROLLED_BACK, words, adapter=back, figures={"dropped": [*left]})


def _target(
    state: State, adapters: AdapterStore, name: str, current: Adapter | None, wanted: str | None
) -> Adapter | None:
    if wanted is not None:
        return None if wanted == BASE else find_version(adapters, name, wanted, "--to")
    if current is None:
        raise ConfigError(f"no version of {name} is in use in {adapters.root}: there is nothing to roll back from")
    at = state.admitted.index(current.name) if current.name in state.admitted else len(state.admitted)
    before = [each for each in state.admitted[:at] if each not in state.dropped and each != current.name]
    previous = before[-1] if before else current.parent
    return adapters.get(previous) if previous else None

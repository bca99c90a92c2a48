"""The watch's journal, where it stands by it, the pause, its status, and the way back to an earlier version."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from pathlib import Path

from pydantic import Field, ValidationError

from openhands_rl_plugin.core.errors import ConfigError, StorageError, describe
from openhands_rl_plugin.core.files import PRIVATE, locked_folder, write_file
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import Adapter, Frozen, JsonObject, JsonValue
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore

JOURNAL = "journal.jsonl"


CANARY, HELD_OUT, SAFETY = "canary", "held-out", "safety"
"""The gates."""


class WatchStep(StrEnum):
    """What a line says. ``COULD_NOT`` changes nothing: the same step is tried again."""

    FROZEN = "frozen"
    """The held-out suite is these tasks from now on."""
    JUDGED = "judged"
    """Tasks of users were played again, so that there are attempts to compare."""
    GATHERED = "gathered"
    """A round begins: these episodes, this algorithm, this parent."""
    TRAINED = "trained"
    MEASURED = "measured"
    """A version was played on the held-out suite."""
    PASSED = "passed"
    """The candidate passed a gate."""
    HELD = "held"
    """A gate held the candidate back: the round ends, and what was in use stays."""
    ADMITTED = "admitted"
    """The candidate is in use: the round ends."""
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


def folder_of(root: Path, name: str) -> Path:
    """Where the journal of an adapter's watch lies: beside its versions below ``root``."""
    return root / f"{name}.watch"


class Journal:
    """The journal in ``folder``, which several processes may append to. Methods raise ``StorageError``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / JOURNAL
        self._alone = False

    def read(self) -> tuple[Entry, ...]:
        """All whole lines, oldest first."""
        try:
            lines = self.file.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise StorageError(f"{self.file} cannot be read: {describe(error)}") from error
        return tuple(self._entry(number, line) for number, line in enumerate(lines, 1))

    def append(
        self, step: WatchStep, said: str, *, round: int = 0, adapter: str = "", figures: JsonObject | None = None
    ) -> Entry:
        """Add a line, which is on the disk when this returns; when it raises, there is nothing of it."""
        if not self._alone:
            with self.alone():
                return self.append(step, said, round=round, adapter=adapter, figures=figures)
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
            try:
                return self._write(descriptor, step, redact_text(said), round, adapter, figures or {})
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(f"{self.file} cannot be written: {describe(error)}; free some space") from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else appends until the block ends, so that what was read stays true meanwhile."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked_folder(self.folder):
                self._alone = True
                yield
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be used: {describe(error)}") from error
        finally:
            self._alone = False

    def _write(
        self, descriptor: int, step: WatchStep, said: str, round: int, adapter: str, figures: JsonObject
    ) -> Entry:
        whole = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        end = whole.rfind(b"\n") + 1
        number = whole.count(b"\n") + 1
        entry = Entry(
            number=number, at=time.time(), step=step, round=round, adapter=adapter, said=said, figures=figures
        )
        line = entry.model_dump_json().encode() + b"\n"
        os.ftruncate(descriptor, end)
        try:
            if os.pwrite(descriptor, line, end) != len(line):
                raise OSError(28, "No space left on device")
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
        return entry

    def _entry(self, number: int, line: bytes) -> Entry:
        try:
            return Entry.model_validate_json(line)
        except ValidationError as error:
            raise StorageError(f"{self.file}: line {number} is damaged; move the file away to begin anew") from error


@dataclass(frozen=True)
class Round:
    """A candidate on its way. ``episodes``: id -> value that it is trained on. ``latest``: the newest version number
    when it began. ``candidate``: its versioned name, once it is trained; ``passed``: the gates that it has passed."""

    number: int
    algorithm: str
    parent: str | None
    latest: int
    episodes: Mapping[str, float]
    began: float
    candidate: str = ""
    passed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """A version on the held-out suite. ``success``: task -> share of its attempts that succeeded. ``trouble``: kind of
    trouble -> task -> mean over its attempts."""

    version: str
    success: Mapping[str, float]
    trouble: Mapping[str, Mapping[str, float]]

    @property
    def mean(self) -> float:
        """Over the tasks."""
        return sum(self.success.values()) / max(1, len(self.success))


@dataclass(frozen=True)
class State:
    """What was so far.

    ``suite``: digest of the frozen suite, empty before. ``seen``: episodes judged when a round began, which are not
    new; ``learnt``: those that a candidate was trained on that came into use, rolled back since or not.
    ``admitted``: the versions in the order in which they came into use; ``dropped``: those that were held back or
    rolled back. ``measured``: by version, an empty name for the base model. ``tries``: how often the present step could
    not be done; ``failures``: of its training; ``restarts``: evaluations that were begun anew, ever.
    ``judged``: figures of the last look.
    """

    round: Round | None = None
    rounds: int = 0
    suite: str = ""
    seen: frozenset[str] = frozenset()
    learnt: frozenset[str] = frozenset()
    admitted: tuple[str, ...] = ()
    dropped: frozenset[str] = frozenset()
    measured: Mapping[str, Measurement] = field(default_factory=dict)
    tries: int = 0
    failures: int = 0
    restarts: int = 0
    judged: Mapping[str, JsonValue] = field(default_factory=dict)


def state_of(entries: Sequence[Entry]) -> State:
    """What has happened so far comes to."""
    return reduce(_after, entries, State())


def _after(state: State, entry: Entry) -> State:
    if entry.step is WatchStep.COULD_NOT:
        failures = state.failures + (entry.figures.get("failed") is True)
        restarts = state.restarts + (entry.figures.get("unmeasured") is True)
        return replace(state, tries=state.tries + 1, failures=failures, restarts=restarts)
    if entry.step is not WatchStep.JUDGED:
        state = replace(state, tries=0, failures=0)
    current = state.round
    match entry.step:
        case WatchStep.FROZEN:
            return replace(state, suite=str(entry.figures["digest"]), measured={})
        case WatchStep.JUDGED:
            return replace(state, judged=entry.figures)
        case WatchStep.GATHERED:
            begun = _begun(entry)
            seen = state.seen | begun.episodes.keys() | {str(each) for each in _listed(entry.figures.get("others"))}
            return replace(state, round=begun, rounds=entry.round, seen=seen)
        case WatchStep.MEASURED:
            trouble = entry.figures.get("trouble")
            kinds = {kind: numbers(each) for kind, each in trouble.items()} if isinstance(trouble, dict) else {}
            found = Measurement(entry.adapter, numbers(entry.figures["success"]), kinds)
            return replace(state, measured={**state.measured, entry.adapter: found})
        case WatchStep.TRAINED if current is not None:
            return replace(state, round=replace(current, candidate=entry.adapter))
        case WatchStep.PASSED if current is not None:
            return replace(state, round=replace(current, passed=(*current.passed, str(entry.figures["gate"]))))
        case WatchStep.HELD:
            return replace(state, round=None, dropped=state.dropped | ({entry.adapter} if entry.adapter else set()))
        case WatchStep.ADMITTED:
            learnt = state.learnt | (current.episodes.keys() if current is not None else set())
            return replace(state, round=None, learnt=learnt, admitted=(*state.admitted, entry.adapter))
        case WatchStep.ROLLED_BACK:
            gone = {str(name) for name in _listed(entry.figures.get("dropped"))}
            return replace(state, round=None, dropped=(state.dropped | gone) - {entry.adapter})
        case _:
            return state


def _begun(entry: Entry) -> Round:
    parent, latest = entry.figures["parent"], entry.figures["latest"]
    return Round(
        number=entry.round,
        algorithm=str(entry.figures["algorithm"]),
        parent=str(parent) if parent else None,
        latest=latest if isinstance(latest, int) else 0,
        episodes=numbers(entry.figures["episodes"]),
        began=entry.at,
    )


def numbers(value: JsonValue) -> dict[str, float]:
    """Of a JSON object those values that are numbers."""
    found = value if isinstance(value, dict) else {}
    return {name: float(each) for name, each in found.items() if isinstance(each, int | float)}


def _listed(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


PAUSED = "paused"


def is_paused(folder: Path) -> bool:
    """Whether nothing is to begin now."""
    return (folder / PAUSED).exists()


def pause(folder: Path) -> None:
    """Let the step in progress end, and begin no other. Raises ``StorageError``."""
    write_file(folder / PAUSED, "openhands-rl watch resume removes this file\n", parents=True)


def resume(folder: Path) -> bool:
    """Go on; whether it was paused. Raises ``StorageError``."""
    try:
        (folder / PAUSED).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{folder / PAUSED} cannot be removed: {describe(error)}") from error
    return True


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


BASE = "base"


async def roll_back(
    journal: Journal,
    adapters: AdapterStore,
    publisher: AdapterPublisher,
    name: str,
    wanted: str | None,
    *,
    force: bool = False,
) -> Entry:
    """Use an earlier version of ``name`` again: ``wanted`` (a number, a name or ``base``), or the one before. A
    candidate that has not passed the gates is used with ``force`` only.

    Nothing is learnt any more from the episodes of the versions that are left. Raises ``ConfigError``, ``PublishError``
    and ``StorageError``; then what was in use still is.
    """
    with journal.alone():
        state, current = state_of(journal.read()), adapters.current(name)
        target = _target(state, adapters, name, current, wanted)
        waiting = {state.round.candidate} if state.round is not None else set[str]()
        if target is not None and not force and target.name in (state.dropped | waiting) - {*state.admitted}:
            raise ConfigError(f"{target.name} was held back, or has not passed the gates yet: --force uses it anyway")
        if target is not None:
            await publisher.publish(target)
        else:
            adapters.point_at_base(name)
        left = _left(state, current, target)
        said = f"{target.name if target else 'the base model'} is in use again"
        told = f", {', '.join(left)} no more" if left else ""
        return journal.append(
            WatchStep.ROLLED_BACK,
            said + told,
            adapter=target.name if target else "",
            figures={"dropped": [*left]},
        )


def _target(
    state: State, adapters: AdapterStore, name: str, current: Adapter | None, wanted: str | None
) -> Adapter | None:
    versions = adapters.versions(name)
    if wanted == BASE:
        return None
    if wanted is not None:
        found = [each for each in versions if wanted in (str(each.version), each.name)]
        if not found:
            known = ", ".join(str(each.version) for each in versions) or "none"
            raise ConfigError(f"--to {wanted}: {name} has no such version in {adapters.root}; available: {known}, base")
        return found[0]
    if current is None:
        raise ConfigError(f"no version of {name} is in use in {adapters.root}: there is nothing to roll back from")
    at = state.admitted.index(current.name) if current.name in state.admitted else len(state.admitted)
    before = [each for each in state.admitted[:at] if each not in state.dropped and each != current.name]
    return adapters.get(before[-1]) if before else adapters.get(current.parent) if current.parent else None


def _left(state: State, current: Adapter | None, target: Adapter | None) -> list[str]:
    """The version that was in use and those admitted since the target, and a candidate that was on its way."""
    names = list(state.admitted)
    after = names[names.index(target.name) + 1 :] if target is not None and target.name in names else names
    left = [*(after if target is None or target.name in names else []), *([current.name] if current else [])]
    left += [state.round.candidate] if state.round is not None and state.round.candidate else []
    return [each for each in dict.fromkeys(left) if target is None or each != target.name]

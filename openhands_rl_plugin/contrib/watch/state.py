"""Where the watch stands: a fold over the journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from openhands_rl_plugin.contrib.watch.journal import Entry, WatchStep
from openhands_rl_plugin.core.types import JsonValue


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
    ``replayed``: tasks of users that were played again, in ``replay_runs``. ``judged``: figures of the last look.
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
    replayed: frozenset[str] = frozenset()
    replay_runs: int = 0
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
        case WatchStep.REPLAYED:
            tasks = {str(each) for each in _listed(entry.figures.get("tasks"))}
            return replace(state, replayed=state.replayed | tasks, replay_runs=state.replay_runs + 1)
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

"""Going back to an earlier version, also while the service runs: its round, which began from what was in use, ends."""

from __future__ import annotations

from openhands_rl_plugin.contrib.watch.journal import Entry, Journal, WatchStep
from openhands_rl_plugin.contrib.watch.state import State, state_of
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore

BASE = "base"


async def roll_back(
    journal: Journal,
    adapters: AdapterStore,
    publisher: AdapterPublisher,
    name: str,
    wanted: str | None,
) -> Entry:
    """Use an earlier version of ``name`` again: ``wanted`` (a number, a name or ``base``), or the one before.

    Nothing is learnt any more from the episodes of the versions that are left. Raises ``ConfigError``, ``PublishError``
    and ``StorageError``; then what was in use still is.
    """
    with journal.alone():
        state, current = state_of(journal.read()), adapters.current(name)
        target = _target(state, adapters, name, current, wanted)
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

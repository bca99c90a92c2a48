"""Rows for preference training: pairs of siblings in search trees, and of attempts that people compared; and value
targets of states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from openhands_rl_plugin.core.types import JsonObject, Score, Trajectory
from openhands_rl_plugin.trajectories.exchange.conversations import CONVERSATION, TOOLS, conversation_of
from openhands_rl_plugin.trajectories.exchange.episodes import identity_columns
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError
from openhands_rl_plugin.trajectories.exchange.sft import IDENTITY
from openhands_rl_plugin.trajectories.exchange.writing import Columns

SMALLEST_MARGIN = 0.05
"""Siblings whose values differ by less are no preference: search has not seen enough of a difference."""

PREFERENCE_COLUMNS: Columns = {
    "prompt": CONVERSATION,
    "chosen": CONVERSATION,
    "rejected": CONVERSATION,
    "tools": TOOLS,
    "margin": "float64",
    "chosen_visits": "int64",
    "rejected_visits": "int64",
    "rejected_id": "string",
    **IDENTITY,
}
VALUE_COLUMNS: Columns = {
    "messages": CONVERSATION,
    "tools": TOOLS,
    "value": "float64",
    "visits": "int64",
    "on_path": "bool",
    **IDENTITY,
}


def preference_rows(
    trajectory: Trajectory, scores: Sequence[Score], beaten: Sequence[Trajectory] = ()
) -> Iterator[JsonObject]:
    """One row for each state with two or more valued actions, the best against the worst of them, and one for each
    attempt at the same task that people found worse than this one.

    ``prompt``, ``chosen`` and ``rejected`` are conversations in OpenAI's form, as preference trainers read them; the
    prompt of two attempts is what both begin with. ``margin`` is the difference of mean returns, and ``None`` where a
    person chose; ``rejected_id`` is the rejected one's trajectory. Raises ``LeftOutError`` where there is neither.
    """
    pairs: list[JsonObject] = []
    for other in beaten:
        shared = _shared_beginning(trajectory, other)
        prompt, chosen = trajectory.path()[:shared], trajectory.path()[shared:]
        rejected = conversation_of(other, other.path()[shared:])
        pairs.append({**_pair(trajectory, prompt, chosen), "rejected": rejected, "rejected_id": other.id})
    for state, siblings in _valued(trajectory).items():
        best = max(siblings, key=lambda at: trajectory.nodes[at].value or 0.0)
        worst = min(siblings, key=lambda at: trajectory.nodes[at].value or 0.0)
        margin = (trajectory.nodes[best].value or 0.0) - (trajectory.nodes[worst].value or 0.0)
        if len(siblings) < 2 or margin < SMALLEST_MARGIN:
            continue
        valued: JsonObject = {
            "rejected": conversation_of(trajectory, (worst,)),
            "margin": margin,
            "chosen_visits": trajectory.nodes[best].visits,
            "rejected_visits": trajectory.nodes[worst].visits,
        }
        prompt = trajectory.path(state) if state is not None else ()
        pairs.append({**_pair(trajectory, prompt, (best,)), **valued})
    if not pairs:
        raise LeftOutError("no state of it has two actions whose values differ, and nobody preferred it to another")
    yield from ({**pair, **identity_columns(trajectory, scores)} for pair in pairs)


def _pair(trajectory: Trajectory, prompt: Sequence[int], chosen: Sequence[int]) -> JsonObject:
    return {
        **dict.fromkeys(PREFERENCE_COLUMNS),
        "prompt": conversation_of(trajectory, prompt),
        "chosen": conversation_of(trajectory, chosen),
        "tools": [*trajectory.tools],
        "rejected_id": trajectory.id,
    }


def value_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One row for each valued action: the conversation up to it, and the mean return that search saw from there on.

    Raises ``LeftOutError`` for an episode without values.
    """
    acted = set(trajectory.acted())
    found = False
    for siblings in _valued(trajectory).values():
        for at in siblings:
            found = True
            node = trajectory.nodes[at]
            yield {
                "messages": conversation_of(trajectory, trajectory.path(at)),
                "tools": [*trajectory.tools],
                "value": node.value,
                "visits": node.visits,
                "on_path": at in acted,
                **identity_columns(trajectory, scores),
            }
    if not found:
        raise LeftOutError("no action of it was valued by a search")


def _shared_beginning(one: Trajectory, other: Trajectory) -> int:
    """How many messages both begin with, before the first answer that either of them gave."""
    pairs = zip(one.path(), other.path(), strict=False)
    nodes = ((one.nodes[at], other.nodes[there]) for at, there in pairs)
    said = takewhile(
        lambda both: both[0].message == both[1].message and not (both[0].sampled or both[1].sampled), nodes
    )
    return sum(1 for _ in said)


def _valued(trajectory: Trajectory) -> dict[int | None, list[int]]:
    """State -> the sampled nodes below it that a search has valued."""
    states: dict[int | None, list[int]] = {}
    for at, node in enumerate(trajectory.nodes):
        if node.sampled and node.value is not None and node.visits:
            states.setdefault(node.parent, []).append(at)
    return states

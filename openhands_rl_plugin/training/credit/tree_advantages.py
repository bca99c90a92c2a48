"""Advantages inside a search tree, and step rewards from the values that search estimated.

Besides the acted path a tree has siblings that were tried in forks, with the mean return of the search below each.
Comparing an action with its siblings gives credit per turn, where a whole rollout gives it per episode only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.rollout.strategies.annotations import notes, times_merged

NodeAdvantages = dict[int, float]
"""``node -> advantage`` of one episode."""


def sibling_advantages(trajectory: Trajectory, *, least_visits: int = 1) -> dict[int, float]:
    """Advantage of every sampled node, Q(s, a) - V(s): its value minus the mean value of its siblings and itself.

    The mean is weighted by visits, so it is the search's estimate of the state's value; an action that was proposed
    several times counts at least as often. Nodes with fewer visits than ``least_visits``, without a value or without a
    sibling are left out.
    """
    siblings: dict[int | None, list[int]] = {}
    for index, node in enumerate(trajectory.nodes):
        if node.sampled and node.value is not None and node.visits >= least_visits:
            siblings.setdefault(node.parent, []).append(index)
    return {
        index: advantage
        for members in siblings.values()
        if len(members) > 1
        for index, advantage in _over_the_mean(trajectory, members).items()
    }


def times_sampled(trajectory: Trajectory) -> dict[int, int]:
    """How often the answer of each sampled node was sampled: a search merges equal proposals into one node.

    Only the first one's ids are kept, so that those of others which say the same in other tokens count as that one.
    """
    return {at: 1 + times_merged(notes(node)) for at, node in enumerate(trajectory.nodes) if node.sampled}


def step_advantages(trajectory: Trajectory, rewards: Mapping[int, float], *, discount: float = 1.0) -> dict[int, float]:
    """``node -> return to go`` of what was acted on, in order, from step rewards (``node -> reward``)."""
    returns: dict[int, float] = {}
    following = 0.0
    for at in reversed(trajectory.acted()):
        following = rewards.get(at, 0.0) + discount * following
        returns[at] = following
    return returns


def environment_rewards(trajectory: Trajectory) -> dict[int, float]:
    """``node -> reward`` as the environment returned it."""
    return {at: trajectory.nodes[at].reward or 0.0 for at in trajectory.acted()}


def state_before(trajectory: Trajectory, at: int) -> tuple[str, ...]:
    """The messages between the policy's last answer and node ``at``: the observation that stands for the state.

    In a fully observable Markov environment equal text means equal state.
    """
    said: list[str] = []
    before = trajectory.nodes[at].parent
    while before is not None and not trajectory.nodes[before].sampled:
        said.append(trajectory.nodes[before].message.content or "")
        before = trajectory.nodes[before].parent
    return tuple(reversed(said))


def repeated_turns(trajectory: Trajectory) -> tuple[int, ...]:
    """The acted turns that do what an earlier turn of the episode did and see what it saw: nothing is learnt from them.

    To run the tests again after an edit is no repeat, as long as their output is another one.
    """
    path = trajectory.acted()
    seen: set[tuple[str, tuple[str, ...]]] = set()
    found: list[int] = []
    for at, after in pairwise(path):
        message = trajectory.nodes[at].message
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        turn = (f"{message.content or ''}{calls}", state_before(trajectory, after))
        if turn in seen:
            found.append(at)
        seen.add(turn)
    return tuple(found)


def search_rewards(trajectory: Trajectory) -> dict[int, float]:
    """``node -> reward`` as the change of the episode's expected return with each turn.

    The value of a turn's action is the expected return from that turn on. Added to the rewards so far, it is the
    expected return of the episode. A turn's reward is the change of that sum (potential-based shaping, Ng et al. 1999),
    so the rewards of an episode sum to its return. Turns without a value from search keep the environment's reward.
    """
    path = trajectory.acted()
    rewards: dict[int, float] = {}
    earned, expected = 0.0, 0.0
    for at in path:
        node = trajectory.nodes[at]
        opinion = earned + node.value if node.value is not None else earned + (node.reward or 0.0)
        earned += node.reward or 0.0
        rewards[at] = opinion - expected
        expected = opinion
    if path:
        rewards[path[-1]] += earned - expected
    return rewards


def _over_the_mean(trajectory: Trajectory, members: Sequence[int]) -> dict[int, float]:
    times = times_sampled(trajectory)
    visits = {at: max(trajectory.nodes[at].visits, times[at]) for at in members}
    values = {at: trajectory.nodes[at].value or 0.0 for at in members}
    mean = sum(visits[at] * values[at] for at in members) / sum(visits.values())
    return {at: values[at] - mean for at in members}

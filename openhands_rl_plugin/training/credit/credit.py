"""From scored episodes to training sequences: the advantage of every sampled token.

By default every sampled token of an episode has the episode's advantage. ``step_rewards`` gives each turn its return to
go, ``state_weight`` adds a comparison with other actions in the same state (GiGPO), ``tree = "proposals"`` trains all
that a search proposed, whatever was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import TURN, Node, Sample, Trajectory, kind_of
from openhands_rl_plugin.rollout.strategies.search import notes
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.credit.advantages import (
    EQUAL,
    NodeAdvantages,
    group_advantages,
    groups_with_signal,
    sampled_tokens,
    state_advantages,
    times_sampled,
    turn_advantages,
)
from openhands_rl_plugin.training.credit.estimators import RolloutBatch, dr_grpo, whiten
from openhands_rl_plugin.training.data.batch import samples_of, samples_of_tree, trained_nodes


def credited_samples(
    trajectories: Sequence[Trajectory], rewards: Sequence[float | None], settings: TrainingSettings
) -> list[Sample]:
    """The training sequences of scored episodes, with advantages, by the algorithm of ``settings``.

    Siblings in a tree are compared also where there is no other episode to compare with. Where the KL divergence from
    the base model is part of the reward, advantages are not whitened here: the trainer subtracts the divergence first,
    and whitens then. Raises ``TrainingError`` as ``samples_of`` does.
    """
    late = settings.kl != "none" and settings.kl_in == "reward"
    if settings.tree == "path" and settings.step_rewards == "episode" and not settings.state_weight:
        whole = group_advantages(trajectories, rewards, settings, whitened=not late)
        weighted = [(t, a) for t, a in zip(trajectories, whole, strict=True) if a is not None]
        return [s for t, a in weighted for s in samples_of(t, a, condensations=settings.condensations)]
    first, again = _node_advantages(trajectories, rewards, settings)
    times = {index: times_sampled(trajectories[index]) for index in {*first, *again}}
    if algorithm_of(settings).estimator.whitened and not late:
        first, again = _whitened(trajectories, first, again, times)
    samples: list[Sample] = []
    for index, of_nodes in first.items():
        more = {at: (times[index][at] - 1, value) for at, value in again.get(index, {}).items()}
        samples += samples_of_tree(trajectories[index], of_nodes, again=more)
    return samples


def _node_advantages(
    trajectories: Sequence[Trajectory], rewards: Sequence[float | None], settings: TrainingSettings
) -> tuple[dict[int, NodeAdvantages], dict[int, NodeAdvantages]]:
    """``trajectory index -> node -> advantage``, before whitening; and of what was sampled again and merged into it."""
    if settings.tree == "proposals":
        proposed = {index: proposal_advantages(each, settings) for index, each in enumerate(trajectories)}
        return _filled(proposed), _sampled_again(trajectories, proposed)
    groups = groups_with_signal(trajectories, rewards, settings)
    if settings.step_rewards == "episode":
        whole = group_advantages(trajectories, rewards, settings, whitened=False)
        nodes = {
            index: dict.fromkeys(trained_nodes(trajectories[index], condensations=settings.condensations), advantage)
            for index, advantage in enumerate(whole)
            if advantage is not None
        }
    else:
        nodes = turn_advantages(trajectories, rewards, groups, settings)
        if settings.condensations:
            _credit_condensations(trajectories, nodes)
    if settings.state_weight:
        _add(nodes, state_advantages(trajectories, rewards, groups, settings), settings.state_weight)
    return _filled(nodes), {}


def _filled(nodes: Mapping[int, NodeAdvantages]) -> dict[int, NodeAdvantages]:
    return {index: of_nodes for index, of_nodes in nodes.items() if of_nodes}


def _sampled_again(
    trajectories: Sequence[Trajectory], proposed: Mapping[int, NodeAdvantages]
) -> dict[int, NodeAdvantages]:
    """The advantages of proposals that a search merged into the first of their kind; those were never acted on."""
    times = {index: times_sampled(trajectories[index]) for index in proposed}
    merged = {index: {at: v for at, v in nodes.items() if times[index][at] > 1} for index, nodes in proposed.items()}
    return _filled(merged)


def _credit_condensations(trajectories: Sequence[Trajectory], nodes: dict[int, NodeAdvantages]) -> None:
    """A summary gets the advantage of the turn after it, which is the first that depends on it."""
    for index, of_nodes in nodes.items():
        turns = sorted(of_nodes)
        for at in set(trained_nodes(trajectories[index], condensations=True)) - of_nodes.keys():
            of_nodes[at] = of_nodes[next((turn for turn in turns if turn > at), turns[-1])]


def _add(nodes: dict[int, NodeAdvantages], more: Mapping[int, NodeAdvantages], weight: float) -> None:
    for index, of_nodes in more.items():
        mine = nodes.setdefault(index, {})
        for at, value in of_nodes.items():
            mine[at] = mine.get(at, 0.0) + weight * value


def _whitened(
    trajectories: Sequence[Trajectory],
    first: dict[int, NodeAdvantages],
    again: dict[int, NodeAdvantages],
    times: Mapping[int, Mapping[int, int]],
) -> tuple[dict[int, NodeAdvantages], dict[int, NodeAdvantages]]:
    values: list[float] = []
    lengths: list[int] = []
    for part, nodes in enumerate((first, again)):
        for index, of_nodes in nodes.items():
            values += of_nodes.values()
            lengths += [
                sampled_tokens(trajectories[index], at) * (times[index][at] - 1 if part else 1) for at in of_nodes
            ]
    found = iter(whiten(values, lengths))
    whitened = [
        {index: {at: next(found) for at in of_nodes} for index, of_nodes in nodes.items()} for nodes in (first, again)
    ]
    return whitened[0], whitened[1]


def is_searched(trajectory: Trajectory) -> bool:
    """Whether an answer that was acted on is one that a search chose from several."""
    nodes = trajectory.nodes
    acted = set(trajectory.acted())
    decided = {nodes[at].parent for at in acted}
    others = (
        node for at, node in enumerate(nodes) if node.sampled and node.parent in decided and at not in acted
    )  # a host keeps malformed answers beside the acted one, but no search has evaluated them
    return any(node.visits > 0 or node.value is not None or bool(notes(node)) for node in others)


def proposal_advantages(trajectory: Trajectory, settings: TrainingSettings) -> NodeAdvantages:
    """The advantage of every proposal over the others in its state, by the baseline of the algorithm.

    Proposals that nothing is known about (not judged, or dropped) are left out, and so are states with a single
    proposal or with equal values: they have no signal, and their tokens are not in the mean of the loss either, unlike
    those of whole episodes with an advantage of 0. Where the algorithm has no groups, the mean is the baseline.
    """
    siblings: dict[int | None, list[int]] = {}
    for at, node in enumerate(trajectory.nodes):
        if _is_judged(node):
            siblings.setdefault(node.parent, []).append(at)
    estimator = algorithm_of(settings).estimator
    baseline = estimator.baseline if estimator.grouped else dr_grpo
    times = times_sampled(trajectory)
    found: NodeAdvantages = {}
    for members in siblings.values():
        values = [trajectory.nodes[at].value or 0.0 for at in members]
        if max(values) - min(values) <= EQUAL:
            continue
        sampled = _repeated(values, members, times)
        advantages = baseline(RolloutBatch(sampled, [0] * len(sampled), [1] * len(sampled)))
        first = 0
        for at in members:
            found[at] = advantages[first]
            first += times[at]
    return found


def proposal_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """``proposals``: the answers that a search judged, in so many ``states``, of which in ``states_differing`` they are
    not worth the same; only these teach."""
    states: dict[tuple[int, int | None], list[float]] = {}
    count = 0
    for index, trajectory in enumerate(trajectories):
        times = times_sampled(trajectory)
        for at, node in enumerate(trajectory.nodes):
            if _is_judged(node):
                count += times[at]
                states.setdefault((index, node.parent), []).append(node.value or 0.0)
    differing = sum(max(values) - min(values) > EQUAL for values in states.values())
    return {"proposals": float(count), "states": float(len(states)), "states_differing": float(differing)}


def _repeated(values: Sequence[float], members: Sequence[int], times: dict[int, int]) -> list[float]:
    return [value for at, value in zip(members, values, strict=True) for _ in range(times[at])]


def _is_judged(node: Node) -> bool:
    return node.sampled and node.value is not None and kind_of(node) == TURN and "dropped" not in notes(node)

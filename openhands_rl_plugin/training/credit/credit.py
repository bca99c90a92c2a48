"""From scored episodes to training sequences: the advantage of every sampled token.

By default every sampled token of an episode has the episode's advantage. ``step_rewards`` gives each turn its return to
go, ``state_weight`` adds a comparison with other actions in the same state (GiGPO), ``tree`` also trains the branches
of search trees.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Sample, Trajectory
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.credit.advantages import GroupAdvantages, ValidGroups, group_advantages, valid_groups
from openhands_rl_plugin.training.credit.estimators import RolloutBatch, dr_grpo, whiten
from openhands_rl_plugin.training.credit.tree_advantages import (
    environment_rewards,
    search_rewards,
    sibling_advantages,
    state_before,
    step_advantages,
)
from openhands_rl_plugin.training.data.batch import samples_of, samples_of_tree, trained_nodes

NodeAdvantages = dict[int, float]


@dataclass(frozen=True)
class Credit:
    """The sequences with advantages, and the group advantages with the counts of excluded episodes.

    The sequences may come from more episodes than have a group advantage, because siblings in a tree can be compared
    where there is no other episode to compare with.
    """

    baseline: GroupAdvantages
    samples: list[Sample]


def credited_samples(
    trajectories: Sequence[Trajectory], rewards: Sequence[float | None], settings: TrainingSettings
) -> Credit:
    """The training sequences of scored episodes by the algorithm of ``settings``.

    Where the KL divergence from the base model is part of the reward, advantages are not whitened here: the trainer
    subtracts the divergence first, and whitens then. Raises ``TrainingError`` as ``samples_of`` does.
    """
    late = settings.kl != "none" and settings.kl_in == "reward"
    baseline = group_advantages(trajectories, rewards, settings, whitened=not late)
    if settings.tree == "path" and settings.step_rewards == "episode" and not settings.state_weight:
        weighted = [(t, a) for t, a in zip(trajectories, baseline.advantages, strict=True) if a is not None]
        summaries = settings.condensations
        return Credit(baseline, [s for t, a in weighted for s in samples_of(t, a, condensations=summaries)])
    nodes = _node_advantages(trajectories, rewards, settings)
    if algorithm_of(settings).estimator.whitened and not late:
        nodes = _whitened(trajectories, nodes, settings)
    samples = [s for index, of_nodes in nodes.items() for s in samples_of_tree(trajectories[index], of_nodes)]
    return Credit(baseline, samples)


def _node_advantages(
    trajectories: Sequence[Trajectory], rewards: Sequence[float | None], settings: TrainingSettings
) -> dict[int, NodeAdvantages]:
    """``trajectory index -> node -> advantage``, before whitening."""
    chosen = valid_groups(trajectories, rewards, settings)
    if settings.step_rewards == "episode":
        whole = group_advantages(trajectories, rewards, settings, whitened=False).advantages
        nodes = {
            index: dict.fromkeys(trained_nodes(trajectories[index], condensations=settings.condensations), advantage)
            for index, advantage in enumerate(whole)
            if advantage is not None
        }
    else:
        nodes = _turn_advantages(trajectories, rewards, chosen, settings)
        if settings.condensations:
            _credit_condensations(trajectories, nodes)
    if settings.state_weight:
        _add(nodes, _state_advantages(trajectories, rewards, chosen, settings), settings.state_weight)
    if settings.tree == "branches":
        siblings = {
            index: sibling_advantages(trajectories[index], least_visits=settings.tree_visits) for index in chosen.valid
        }
        _add(nodes, siblings, settings.tree_weight)
    return {index: of_nodes for index, of_nodes in nodes.items() if of_nodes}


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


def _turn_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    chosen: ValidGroups,
    settings: TrainingSettings,
) -> dict[int, NodeAdvantages]:
    """Return to go of every turn relative to the same turn of the other episodes of the group."""
    turns = _turns(trajectories, rewards, chosen, settings)
    baseline = algorithm_of(settings).estimator.baseline
    return _compared(turns, [(turn.group, turn.number) for turn in turns], baseline, settings)


def _state_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    chosen: ValidGroups,
    settings: TrainingSettings,
) -> dict[int, NodeAdvantages]:
    """Return to go of every turn relative to the group's turns in the same state, at whatever step.

    The step level of GiGPO (Feng et al. 2025, arXiv 2505.10978). A state is the text that the policy received since its
    last answer. A turn in a state that occurs only once in the group gets 0. Where the algorithm has no groups, the
    mean of the state is the baseline.
    """
    turns = _turns(trajectories, rewards, chosen, settings)
    states = [(turn.group, state_before(trajectories[turn.index], turn.at)) for turn in turns]
    estimator = algorithm_of(settings).estimator
    return _compared(turns, states, estimator.baseline if estimator.grouped else dr_grpo, settings)


@dataclass(frozen=True)
class _Turn:
    """Node ``at`` of trajectory ``index``, which is the ``number``-th answer of an episode of ``group``.

    ``tokens``: number of sampled tokens; ``to_go``: the discounted return from this turn to the end.
    """

    index: int
    at: int
    group: int
    number: int
    tokens: int
    to_go: float


def _turns(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    chosen: ValidGroups,
    settings: TrainingSettings,
) -> list[_Turn]:
    turns: list[_Turn] = []
    for group, members in enumerate(chosen.groups):
        for index in members:
            steps = _step_rewards(trajectories[index], rewards[index] or 0.0, settings)
            to_go = step_advantages(trajectories[index], steps, discount=settings.discount)
            for number, at in enumerate(trained_nodes(trajectories[index])):
                turns.append(_Turn(index, at, group, number, _tokens(trajectories[index], at), to_go[at]))
    return turns


def _compared(
    turns: Sequence[_Turn],
    keys: Sequence[Hashable],
    baseline: Callable[[RolloutBatch, float], list[float]],
    settings: TrainingSettings,
) -> dict[int, NodeAdvantages]:
    """Returns to go relative to those of the turns with the same key; ``keys[i]`` is the key of ``turns[i]``."""
    numbers: dict[Hashable, int] = {}
    rollouts = RolloutBatch(
        rewards=[turn.to_go for turn in turns],
        groups=[numbers.setdefault(key, len(numbers)) for key in keys],
        lengths=[turn.tokens for turn in turns],
    )
    nodes: dict[int, NodeAdvantages] = {}
    for turn, value in zip(turns, baseline(rollouts, settings.std_epsilon), strict=True):
        nodes.setdefault(turn.index, {})[turn.at] = value
    return nodes


def _step_rewards(trajectory: Trajectory, reward: float, settings: TrainingSettings) -> Mapping[int, float]:
    """Step rewards that sum to ``reward``: the difference from the environment's return is added to the last turn."""
    steps = search_rewards(trajectory) if settings.step_rewards == "search" else environment_rewards(trajectory)
    if steps:
        steps[max(steps)] += reward - trajectory.episode_return
    return steps


def _whitened(
    trajectories: Sequence[Trajectory], nodes: dict[int, NodeAdvantages], settings: TrainingSettings
) -> dict[int, NodeAdvantages]:
    places = [(index, at) for index, of_nodes in nodes.items() for at in of_nodes]
    lengths = [_tokens(trajectories[index], at) for index, at in places]
    values = whiten([nodes[index][at] for index, at in places], lengths, variance=settings.variance)
    whitened: dict[int, NodeAdvantages] = {index: {} for index in nodes}
    for (index, at), value in zip(places, values, strict=True):
        whitened[index][at] = value
    return whitened


def _tokens(trajectory: Trajectory, at: int) -> int:
    tokens = trajectory.nodes[at].tokens
    return len(tokens.sampled_ids) if tokens is not None else 0

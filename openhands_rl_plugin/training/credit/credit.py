"""From judged episodes to weighted training sequences: whose tokens get which advantage.

The default gives every sampled token of an episode the episode's advantage. ``step_rewards`` gives each turn what
followed it, ``state_weight`` adds the comparison with what else was done in the same state, ``tree`` trains the
branches of search trees too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Sample, Trajectory
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.credit.advantages import GroupAdvantages, ValidGroups, group_advantages, valid_groups
from openhands_rl_plugin.training.credit.estimators import Rollouts, dr_grpo, whiten
from openhands_rl_plugin.training.credit.tree_advantages import (
    environment_rewards,
    search_rewards,
    sibling_advantages,
    state_before,
    step_advantages,
)
from openhands_rl_plugin.training.data.batch import samples_of, samples_of_tree

NodeAdvantages = dict[int, float]


@dataclass(frozen=True)
class Credit:
    """The weighted sequences, and the baseline with the counts of who was left out.

    The sequences may be of more episodes than the baseline's, because the siblings in a tree can be compared where
    there is no other episode to compare with.
    """

    baseline: GroupAdvantages
    samples: list[Sample]


def credited_samples(
    trajectories: Sequence[Trajectory], rewards: Sequence[float | None], settings: TrainingSettings
) -> Credit:
    """The training sequences of judged episodes by the algorithm of ``settings``.

    Where the divergence from the base model is part of the reward, advantages are left unwhitened: the trainer knows
    the divergence, and whitens what comes of both. Raises ``TrainingError`` as ``samples_of`` does.
    """
    late = settings.kl != "none" and settings.kl_in == "reward"
    baseline = group_advantages(trajectories, rewards, settings, whitened=not late)
    if settings.tree == "path" and settings.step_rewards == "episode" and not settings.state_weight:
        weighted = [(t, a) for t, a in zip(trajectories, baseline.advantages, strict=True) if a is not None]
        return Credit(baseline, [s for t, a in weighted for s in samples_of(t, a)])
    nodes = _node_advantages(trajectories, rewards, settings)
    if algorithm_of(settings).estimator.whitened and not late:
        nodes = _whitened(trajectories, nodes, settings)
    samples = [s for index, of_nodes in nodes.items() for s in samples_of_tree(trajectories[index], of_nodes)]
    return Credit(baseline, samples)


def _node_advantages(
    trajectories: Sequence[Trajectory], rewards: Sequence[float | None], settings: TrainingSettings
) -> dict[int, NodeAdvantages]:
    """``trajectory index -> node -> advantage``, not whitened."""
    chosen = valid_groups(trajectories, rewards, settings)
    if settings.step_rewards == "episode":
        whole = group_advantages(trajectories, rewards, settings, whitened=False).advantages
        nodes = {
            index: dict.fromkeys(_acted(trajectories[index]), advantage)
            for index, advantage in enumerate(whole)
            if advantage is not None
        }
    else:
        nodes = _turn_advantages(trajectories, rewards, chosen, settings)
    if settings.state_weight:
        _add(nodes, _state_advantages(trajectories, rewards, chosen, settings), settings.state_weight)
    if settings.tree == "branches":
        siblings = {
            index: sibling_advantages(trajectories[index], least_visits=settings.tree_visits) for index in chosen.valid
        }
        _add(nodes, siblings, settings.tree_weight)
    return {index: of_nodes for index, of_nodes in nodes.items() if of_nodes}


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
    """Return to go of every turn, compared with that of the same turn in the other episodes of the group."""
    turns = _turns(trajectories, rewards, chosen, settings)
    baseline = algorithm_of(settings).estimator.baseline
    return _compared(turns, [(turn.group, turn.number) for turn in turns], baseline, settings)


def _state_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    chosen: ValidGroups,
    settings: TrainingSettings,
) -> dict[int, NodeAdvantages]:
    """Return to go of every turn, compared with the turns of the group that were taken in the same state, whenever.

    The step level of GiGPO (Feng et al. 2025, arXiv 2505.10978). A state is what was said to the policy since its last
    answer; a turn in a state that nobody else of the group has met gets 0. Where the algorithm has no groups, the mean
    of the state is the baseline.
    """
    turns = _turns(trajectories, rewards, chosen, settings)
    states = [(turn.group, state_before(trajectories[turn.index], turn.at)) for turn in turns]
    estimator = algorithm_of(settings).estimator
    return _compared(turns, states, estimator.baseline if estimator.grouped else dr_grpo, settings)


@dataclass(frozen=True)
class _Turn:
    """Node ``at`` of trajectory ``index``, which is the ``number``-th answer of an episode of ``group``.

    ``tokens``: how many were sampled; ``to_go``: the discounted return from here on.
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
            for number, at in enumerate(_acted(trajectories[index])):
                turns.append(_Turn(index, at, group, number, _tokens(trajectories[index], at), to_go[at]))
    return turns


def _compared(
    turns: Sequence[_Turn],
    keys: Sequence[Hashable],
    baseline: Callable[[Rollouts, float], list[float]],
    settings: TrainingSettings,
) -> dict[int, NodeAdvantages]:
    """Returns to go over those of the turns with the same key; ``keys[i]`` is that of ``turns[i]``."""
    numbers: dict[Hashable, int] = {}
    rollouts = Rollouts(
        rewards=[turn.to_go for turn in turns],
        groups=[numbers.setdefault(key, len(numbers)) for key in keys],
        lengths=[turn.tokens for turn in turns],
    )
    nodes: dict[int, NodeAdvantages] = {}
    for turn, value in zip(turns, baseline(rollouts, settings.std_epsilon), strict=True):
        nodes.setdefault(turn.index, {})[turn.at] = value
    return nodes


def _step_rewards(trajectory: Trajectory, reward: float, settings: TrainingSettings) -> Mapping[int, float]:
    """Step rewards that add up to ``reward``: what the judgement says beyond the environment is paid at the end."""
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


def _acted(trajectory: Trajectory) -> list[int]:
    return [at for at in trajectory.path() if trajectory.nodes[at].sampled]


def _tokens(trajectory: Trajectory, at: int) -> int:
    tokens = trajectory.nodes[at].tokens
    return len(tokens.sampled_ids) if tokens is not None else 0

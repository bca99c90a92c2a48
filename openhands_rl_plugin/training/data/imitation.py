"""Selection of episodes for SFT, and of preference pairs for DPO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Sample, Trajectory
from openhands_rl_plugin.training.credit.advantages import EQUAL
from openhands_rl_plugin.training.data.batch import recorded_nodes, samples_of, samples_of_tree


@dataclass(frozen=True)
class PreferencePair:
    """Two continuations from one state, as training sequences; ``chosen`` is the better one."""

    chosen: tuple[Sample, ...]
    rejected: tuple[Sample, ...]


def select_for_sft(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], settings: TrainingSettings
) -> tuple[int, ...]:
    """Indices of the episodes for SFT: rewards above ``imitate_above``; for rejection sampling the best of each group.

    Of equally good episodes of a group the shorter ones come first.
    """
    good = [index for index, reward in enumerate(rewards) if reward > settings.imitate_above]
    if settings.algorithm != "rejection-sampling":
        return tuple(good)
    best = sorted(good, key=lambda at: (-rewards[at], _sampled_tokens(trajectories[at]), trajectories[at].id))
    taken: dict[str, int] = {}
    kept: list[int] = []
    for index in best:
        group = trajectories[index].group_id
        taken[group] = taken.get(group, 0) + 1
        if taken[group] <= settings.keep_best:
            kept.append(index)
    return tuple(sorted(kept))


def preference_pairs(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], settings: TrainingSettings
) -> list[PreferencePair]:
    """The best episode of a group with the worst, the second best with the second worst, and so on while they differ.

    With ``tree = "branches"`` also the best and the worst action that search tried in one state of an episode. Raises
    ``TrainingError`` when a sampled node has no token ids.
    """
    groups: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group_id, []).append(index)
    pairs = []
    for members in groups.values():
        order = sorted(members, key=lambda at: (-rewards[at], trajectories[at].id))
        for better, worse in zip(order[: len(order) // 2], reversed(order), strict=False):
            if rewards[better] - rewards[worse] > EQUAL:
                pairs.append(PreferencePair(_path(trajectories[better]), _path(trajectories[worse])))
    if settings.tree == "branches":
        pairs += [pair for trajectory in trajectories for pair in _sibling_pairs(trajectory, settings.tree_visits)]
    return [pair for pair in pairs if pair.chosen and pair.rejected]


def _sibling_pairs(trajectory: Trajectory, least_visits: int) -> Iterator[PreferencePair]:
    siblings: dict[int | None, list[int]] = {}
    recorded = recorded_nodes(trajectory, need_logprobs=False)
    for at, node in enumerate(trajectory.nodes):
        if at in recorded and node.sampled and node.value is not None and node.visits >= least_visits:
            siblings.setdefault(node.parent, []).append(at)
    for members in siblings.values():
        values = {at: trajectory.nodes[at].value or 0.0 for at in members}
        best, worst = max(members, key=values.__getitem__), min(members, key=values.__getitem__)
        if values[best] - values[worst] > EQUAL:
            yield PreferencePair(_action(trajectory, best), _action(trajectory, worst))


def _path(trajectory: Trajectory) -> tuple[Sample, ...]:
    return tuple(samples_of(trajectory, need_logprobs=False))


def _action(trajectory: Trajectory, at: int) -> tuple[Sample, ...]:
    """One action alone, with everything before it as context."""
    return tuple(samples_of_tree(trajectory, {at: 1.0}, need_logprobs=False))[:1]


def _sampled_tokens(trajectory: Trajectory) -> int:
    return sum(len(node.tokens.sampled_ids) for node in trajectory.sampled() if node.tokens is not None)

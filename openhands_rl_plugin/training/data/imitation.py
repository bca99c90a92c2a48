"""Selection of episodes for SFT, and of preference pairs for DPO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.judgements import Preferences
from openhands_rl_plugin.core.types import Sample, Trajectory
from openhands_rl_plugin.training.credit.advantages import EQUAL
from openhands_rl_plugin.training.data.batch import recorded_nodes, samples_of, samples_of_tree


@dataclass(frozen=True)
class PreferencePair:
    """Two continuations from one state, as training sequences; ``chosen`` is the better one, by what a person ``said``
    or by the rewards."""

    chosen: tuple[Sample, ...]
    rejected: tuple[Sample, ...]
    said: bool = False


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
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    settings: TrainingSettings,
    said: Preferences | None = None,
) -> list[PreferencePair]:
    """The best episode of a group with the worst, the second best with the second worst, and so on while they differ.

    What people ``said`` of two episodes comes first: those two make that pair, of whatever policies and rewards, or
    none where neither is better. With ``tree = "proposals"`` also the best and the worst action that search tried in
    one state of an episode. Raises ``TrainingError`` when a sampled node has no token ids.
    """
    said = said or {}
    groups: dict[str, list[int]] = {}
    judged: dict[int, float] = {}
    for index, (trajectory, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        if reward is not None:
            judged[index] = reward
            groups.setdefault(trajectory.group_id, []).append(index)
    pairs = _said_pairs(trajectories, said)
    for members in groups.values():
        order = sorted(members, key=lambda at: (-judged[at], trajectories[at].id))
        for better, worse in zip(order[: len(order) // 2], reversed(order), strict=False):
            if frozenset((trajectories[better].id, trajectories[worse].id)) in said:
                continue
            if judged[better] - judged[worse] > EQUAL:
                pairs.append(PreferencePair(_path(trajectories[better]), _path(trajectories[worse])))
    if settings.tree == "proposals":
        pairs += [pair for trajectory in trajectories for pair in _sibling_pairs(trajectory, settings.tree_visits)]
    return [pair for pair in pairs if pair.chosen and pair.rejected]


def _said_pairs(trajectories: Sequence[Trajectory], said: Preferences) -> list[PreferencePair]:
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    pairs: list[PreferencePair] = []
    for both, better in said.items():
        if better is not None and both <= by_id.keys():
            (worse,) = both - {better}
            pairs.append(PreferencePair(_path(by_id[better]), _path(by_id[worse]), said=True))
    return pairs


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

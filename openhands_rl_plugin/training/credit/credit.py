"""From scored episodes to training sequences: the advantage of every sampled token.

``algorithms`` has the formulas (GRPO, RLOO, ...); this module says which rewards are compared, and which tokens get the
result. By default every sampled token has the episode's advantage. ``step_rewards`` gives each turn its return to go.
``state_weight`` adds a comparison with other actions in the same state (GiGPO). ``tree = "proposals"`` trains all
proposals of a search, chosen or not.

One difference from OpenRLHF, verl and TRL: every algorithm with groups leaves out a group whose rewards are all equal.
Such a group has no signal, but whitening over tokens would give it advantages other than zero where lengths differ. For
DAPO this is its dynamic sampling (Yu et al. 2025, arXiv 2503.14476) without the resampling.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import TURN, Sample, Trajectory, kind_of
from openhands_rl_plugin.rollout.strategies.search import notes, times_merged
from openhands_rl_plugin.training.algorithms import RolloutBatch, algorithm_of, dr_grpo, whiten
from openhands_rl_plugin.training.data.batch import sampled_nodes, samples_of, samples_of_tree, trained_nodes


def turn_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
    groups: Groups,
    settings: TrainingSettings,
    *,
    by_state: bool,
) -> dict[int, NodeAdvantages]:
    """Return to go of every turn relative to other turns of its group: the same turn, or with ``by_state`` those in the
    same state, at whatever step.

    By turn, an episode that had ended by then has nothing left to come: it counts with 0, so that every turn is
    compared with the whole group. A baseline per time step from the other episodes leaves the gradient unbiased
    (Greensmith et al. 2004, JMLR 5: 1471; from the other samples: Kool et al. 2019, "Buy 4 REINFORCE samples, get a
    baseline for free!"). A baseline from those that got so far scales each turn by how many did, and to 0 where one
    did. By state it is the step level of GiGPO (Feng et al. 2025, arXiv 2505.10978): a state is the text that the
    policy received since its last answer, and a turn in a state that occurs only once in the group gets 0. Where the
    algorithm has no groups, the mean of the state is the baseline.
    """
    places: dict[tuple[int, Hashable], int] = {}
    found: list[tuple[int, int | None, int, float]] = []
    for group, members in enumerate(groups):
        longest = max(len(trajectories[index].acted()) for index in members)
        for index in members:
            one, to_go = trajectories[index], returns_to_go(trajectories[index], rewards[index], settings)
            trained = trained_nodes(one)
            ended = [None] * (longest - len(to_go))
            for number, at in enumerate(trained if by_state else (*to_go, *ended)):
                place: Hashable = state_before(one, at) if by_state and at is not None else number
                key = places.setdefault((group, place), len(places))
                found.append((index, at if at in trained else None, key, 0.0 if at is None else to_go[at]))
    estimator = algorithm_of(settings).estimator
    baseline = dr_grpo if by_state and not estimator.grouped else estimator.baseline
    rollouts = RolloutBatch([each[3] for each in found], [each[2] for each in found], [1] * len(found))
    nodes: dict[int, NodeAdvantages] = {}
    for (index, at, *_), value in zip(found, baseline(rollouts), strict=True):
        if at is not None:
            nodes.setdefault(index, {})[at] = value
    return nodes


def sampled_tokens(trajectory: Trajectory, at: int) -> int:
    """How many tokens of node ``at`` were sampled."""
    tokens = trajectory.nodes[at].tokens
    return len(tokens.sampled_ids) if tokens is not None else 0


EQUAL = 1e-9
"""Rewards that differ by at most this much are equal: sums of step rewards, such as 10 x 0.1, have rounding errors."""


Groups = Sequence[Sequence[int]]
"""Indices of the episodes that are compared with each other."""


def groups_with_signal(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], settings: TrainingSettings
) -> Groups:
    """The groups whose rewards differ; without a group are those that are the only one of theirs, too.

    An algorithm without groups compares all episodes with each other: equal rewards of all are no signal.
    """
    groups: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group_id, []).append(index)
    members, chosen = list(groups.values()), algorithm_of(settings)
    if chosen.estimator.grouped:
        return [each for each in members if not _all_equal([rewards[i] for i in each])]
    flat = members and settings.step_rewards == "episode" and _all_equal(rewards)
    return [] if flat else members


def group_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
    settings: TrainingSettings | None = None,
    *,
    whitened: bool = True,
) -> list[float | None]:
    """Advantages of whole episodes; ``rewards[i]`` is the reward of ``trajectories[i]``; ``None`` without a signal.

    The formulas are in ``algorithms``. ``whitened=False`` skips the whitening, for callers that add other advantages
    before it.
    """
    settings = settings or TrainingSettings()
    groups = groups_with_signal(trajectories, rewards, settings)
    order = [(index, number) for number, members in enumerate(groups) for index in members]
    episodes = [trajectories[index] for index, _ in order]
    rollouts = RolloutBatch(
        rewards=[rewards[index] for index, _ in order],
        groups=[number for _, number in order],
        lengths=[sum(sampled_tokens(each, at) for at in trained_nodes(each)) for each in episodes],
    )
    estimator = algorithm_of(settings).estimator
    values = estimator(rollouts) if whitened else estimator.baseline(rollouts)
    advantages: list[float | None] = [None] * len(trajectories)
    for (index, _), advantage in zip(order, values, strict=True):
        advantages[index] = advantage
    return advantages


def _all_equal(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) <= EQUAL


NodeAdvantages = dict[int, float]
"""``node -> advantage`` of one episode."""


def times_sampled(trajectory: Trajectory) -> dict[int, int]:
    """How often the answer of each sampled node was sampled: a search merges equal proposals into one node.

    Only the first one's ids are kept, so that those of others which say the same in other tokens count as that one.
    """
    return {at: 1 + times_merged(notes(node)) for at, node in enumerate(trajectory.nodes) if node.sampled}


def returns_to_go(trajectory: Trajectory, reward: float, settings: TrainingSettings) -> dict[int, float]:
    """``node -> return to go`` of the executed completions, in order. What ``reward`` adds to the return comes at the
    end."""
    path, returns, following = trajectory.acted(), list[float](), reward - trajectory.episode_return
    steps = search_rewards(trajectory) if settings.step_rewards == "search" else environment_rewards(trajectory)
    for step in reversed(steps):
        following = step + (settings.discount if returns else 1.0) * following
        returns.append(following)
    return dict(zip(path, reversed(returns), strict=True))


def environment_rewards(trajectory: Trajectory) -> list[float]:
    """The rewards of the executed completions as the environment returned them."""
    return [trajectory.nodes[at].reward or 0.0 for at in trajectory.acted()]


def search_rewards(trajectory: Trajectory) -> list[float]:
    """The rewards of the executed completions as the change of the episode's expected return with each.

    The value of a turn's action is the expected return from that turn on. Added to the rewards so far, it is the
    expected return of the episode. A turn's reward is the change of that sum (potential-based shaping, Ng et al. 1999),
    so the rewards of an episode sum to its return. Turns without a value from search keep the environment's reward.
    """
    given = environment_rewards(trajectory)
    earned = list(accumulate(given, initial=0.0))
    values = (trajectory.nodes[at].value for at in trajectory.acted())
    expected = [a if v is None else b + v for b, a, v in zip(earned, earned[1:], values, strict=False)]
    return [after - before for before, after in pairwise((0.0, *expected[:-1], *earned[-1:]))] if given else []


def state_before(trajectory: Trajectory, at: int) -> tuple[str, ...]:
    """The messages between the policy's last answer and node ``at``: the observation that stands for the state.

    In a fully observable Markov environment equal text means equal state.
    """
    texts: list[str] = []
    before = trajectory.nodes[at].parent
    while before is not None and not trajectory.nodes[before].sampled:
        texts.append(trajectory.nodes[before].message.content or "")
        before = trajectory.nodes[before].parent
    return tuple(reversed(texts))


def credited_samples(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], settings: TrainingSettings
) -> list[Sample]:
    """The training sequences of scored episodes, with advantages, by the algorithm of ``settings``.

    Siblings in a tree are compared also where there is no other episode to compare with. Without rewards all that was
    sampled is trained, also malformed completions. Raises ``TrainingError`` as ``samples_of`` does.
    """
    if not algorithm_of(settings).rewarded:
        return [s for t in trajectories for s in samples_of_tree(t, dict.fromkeys(sampled_nodes(t), 0.0))]
    if settings.tree == "path" and settings.step_rewards == "episode" and not settings.state_weight:
        whole = group_advantages(trajectories, rewards, settings)
        weighted = [(t, a) for t, a in zip(trajectories, whole, strict=True) if a is not None]
        return [s for t, a in weighted for s in samples_of(t, a)]
    advantages = {index: nodes for index, nodes in _node_advantages(trajectories, rewards, settings).items() if nodes}
    # A search merges equal proposals; those were sampled as often, but never executed.
    merged = settings.tree == "proposals"
    times = {index: times_sampled(trajectories[index]) if merged else {} for index in advantages}
    if algorithm_of(settings).estimator.whitened:
        places = [(index, at) for index, nodes in advantages.items() for at in nodes]
        lengths = [sampled_tokens(trajectories[index], at) * times[index].get(at, 1) for index, at in places]
        whitened = whiten([advantages[index][at] for index, at in places], lengths)
        for (index, at), value in zip(places, whitened, strict=True):
            advantages[index][at] = value
    samples: list[Sample] = []
    for index, nodes in advantages.items():
        again = {at: (often - 1, nodes[at]) for at, often in times[index].items() if at in nodes and often > 1}
        samples += samples_of_tree(trajectories[index], nodes, again=again)
    return samples


def _node_advantages(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], settings: TrainingSettings
) -> dict[int, NodeAdvantages]:
    """``trajectory index -> node -> advantage``, before whitening."""
    if settings.tree == "proposals":
        return {index: proposal_advantages(each, settings) for index, each in enumerate(trajectories)}
    groups = groups_with_signal(trajectories, rewards, settings)
    if settings.step_rewards == "episode":
        whole = group_advantages(trajectories, rewards, settings, whitened=False)
        nodes = {
            index: dict.fromkeys(trained_nodes(trajectories[index]), advantage)
            for index, advantage in enumerate(whole)
            if advantage is not None
        }
    else:
        nodes = turn_advantages(trajectories, rewards, groups, settings, by_state=False)
    if settings.state_weight:
        for index, more in turn_advantages(trajectories, rewards, groups, settings, by_state=True).items():
            nodes[index] = {at: nodes[index][at] + settings.state_weight * value for at, value in more.items()}
    return nodes


def is_searched(trajectory: Trajectory) -> bool:
    """Whether an answer that was acted on is one that a search chose from several."""
    nodes = trajectory.nodes
    acted = set(trajectory.acted())
    decided = {nodes[at].parent for at in acted}
    others = (
        node for at, node in enumerate(nodes) if node.sampled and node.parent in decided and at not in acted
    )  # siblings without search data are malformed completions that the host could not execute
    return any(node.visits > 0 or node.value is not None or bool(notes(node)) for node in others)


def proposal_advantages(trajectory: Trajectory, settings: TrainingSettings) -> NodeAdvantages:
    """The advantage of every proposal over the others in its state, by the baseline of the algorithm.

    Proposals that nothing is known about (not judged, or dropped) are left out, and so are states with a single
    proposal or with equal values: they have no signal, and their tokens are not in the mean of the loss either, unlike
    those of whole episodes with an advantage of 0. Where the algorithm has no groups, the mean is the baseline.
    """
    siblings: dict[int | None, list[int]] = {}
    for at, node in enumerate(trajectory.nodes):
        if node.sampled and node.value is not None and kind_of(node) == TURN and "dropped" not in notes(node):
            siblings.setdefault(node.parent, []).append(at)
    estimator = algorithm_of(settings).estimator
    baseline = estimator.baseline if estimator.grouped else dr_grpo
    times = times_sampled(trajectory)
    found: NodeAdvantages = {}
    for members in siblings.values():
        values = [trajectory.nodes[at].value or 0.0 for at in members]
        if max(values) - min(values) <= EQUAL:
            continue
        sampled = [value for at, value in zip(members, values, strict=True) for _ in range(times[at])]
        advantages = baseline(RolloutBatch(sampled, [0] * len(sampled), [1] * len(sampled)))
        first = 0
        for at in members:
            found[at] = advantages[first]
            first += times[at]
    return found

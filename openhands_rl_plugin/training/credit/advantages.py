"""Groups of comparable episodes, and one advantage per episode.

One difference from OpenRLHF, verl and TRL: every algorithm with groups leaves out a group whose rewards are all equal.
Such a group has no signal, but whitening over tokens would give it advantages other than zero where lengths differ. For
DAPO this is its dynamic sampling (Yu et al. 2025, arXiv 2503.14476) without the resampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.rollout.strategies.search import notes, times_merged
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.credit.estimators import RolloutBatch, dr_grpo
from openhands_rl_plugin.training.data.batch import trained_nodes


@dataclass(frozen=True)
class _Turn:
    """Turn ``number`` of trajectory ``index`` of ``group``.

    ``at``: its node, ``None`` if it is not trained or was not reached;
    ``tokens``: number of sampled tokens; ``to_go``: the discounted return from this turn to the end.
    """

    index: int
    at: int | None
    group: int
    number: int
    tokens: int
    to_go: float


def turn_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    groups: Groups,
    settings: TrainingSettings,
) -> dict[int, NodeAdvantages]:
    """Return to go of every turn relative to the same turn of the other episodes of the group.

    An episode that had ended by then has nothing left to come: it counts with 0, so that every turn is compared with
    the whole group. A baseline per time step from the other episodes leaves the gradient unbiased (Greensmith et al.
    2004, JMLR 5: 1471; from the other samples: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!").
    A baseline from those that got so far scales each turn by how many did, and to 0 where one did.
    """
    turns = _turns(trajectories, rewards, groups, settings)
    counts = Counter(turn.index for turn in turns)
    for group, members in enumerate(groups):
        reached = {index: counts[index] for index in members}
        turns += [
            _Turn(index, None, group, number, 0, 0.0)
            for index, count in reached.items()
            for number in range(count, max(reached.values()))
        ]
    baseline = algorithm_of(settings).estimator.baseline
    return _compared(turns, [(turn.group, turn.number) for turn in turns], baseline)


def state_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    groups: Groups,
    settings: TrainingSettings,
) -> dict[int, NodeAdvantages]:
    """Return to go of every turn relative to the group's turns in the same state, at whatever step.

    The step level of GiGPO (Feng et al. 2025, arXiv 2505.10978). A state is the text that the policy received since its
    last answer. A turn in a state that occurs only once in the group gets 0. Where the algorithm has no groups, the
    mean of the state is the baseline.
    """
    turns, states = [], []
    for turn in _turns(trajectories, rewards, groups, settings):
        if turn.at is not None:
            turns.append(turn)
            states.append((turn.group, state_before(trajectories[turn.index], turn.at)))
    estimator = algorithm_of(settings).estimator
    return _compared(turns, states, estimator.baseline if estimator.grouped else dr_grpo)


def _turns(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    groups: Groups,
    settings: TrainingSettings,
) -> list[_Turn]:
    """The turns that were acted on."""
    turns: list[_Turn] = []
    for group, members in enumerate(groups):
        for index in members:
            one = trajectories[index]
            trained = set(trained_nodes(one))
            steps = _step_rewards(one, rewards[index] or 0.0, settings)
            to_go = step_advantages(one, steps, discount=settings.discount)
            for number, at in enumerate(one.acted()):
                turns.append(
                    _Turn(index, at if at in trained else None, group, number, sampled_tokens(one, at), to_go[at])
                )
    return turns


def _compared(
    turns: Sequence[_Turn],
    keys: Sequence[Hashable],
    baseline: Callable[[RolloutBatch], list[float]],
) -> dict[int, NodeAdvantages]:
    """Returns to go relative to those of the turns with the same key; ``keys[i]`` is the key of ``turns[i]``."""
    numbers: dict[Hashable, int] = {}
    rollouts = RolloutBatch(
        rewards=[turn.to_go for turn in turns],
        groups=[numbers.setdefault(key, len(numbers)) for key in keys],
        lengths=[turn.tokens for turn in turns],
    )
    nodes: dict[int, NodeAdvantages] = {}
    for turn, value in zip(turns, baseline(rollouts), strict=True):
        if turn.at is not None:
            nodes.setdefault(turn.index, {})[turn.at] = value
    return nodes


def _step_rewards(trajectory: Trajectory, reward: float, settings: TrainingSettings) -> Mapping[int, float]:
    """Step rewards that sum to ``reward``: the difference from the environment's return is added to the last turn."""
    steps = search_rewards(trajectory) if settings.step_rewards == "search" else environment_rewards(trajectory)
    if steps:
        steps[max(steps)] += reward - trajectory.episode_return
    return steps


def sampled_tokens(trajectory: Trajectory, at: int) -> int:
    """How many tokens of node ``at`` were sampled."""
    tokens = trajectory.nodes[at].tokens
    return len(tokens.sampled_ids) if tokens is not None else 0


EQUAL = 1e-9
"""Rewards that differ by at most this much are equal: sums of step rewards, such as 10 x 0.1, have rounding errors."""


Groups = Sequence[Sequence[int]]
"""Indices of the episodes that are compared with each other."""


def groups_with_signal(
    trajectories: Sequence[Trajectory], rewards: Sequence[float | None], settings: TrainingSettings
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
    flat = members and chosen.rewarded and settings.step_rewards == "episode" and _all_equal(rewards)
    return [] if flat else members


def group_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    settings: TrainingSettings | None = None,
    *,
    whitened: bool = True,
) -> list[float | None]:
    """Advantages of whole episodes; ``rewards[i]`` is the reward of ``trajectories[i]``; ``None`` without a signal.

    The formulas are in ``estimators``. ``whitened=False`` skips the whitening, for callers that add other advantages
    before it.
    """
    settings = settings or TrainingSettings()
    groups = groups_with_signal(trajectories, rewards, settings)
    order = [(index, number) for number, members in enumerate(groups) for index in members]
    rollouts = RolloutBatch(
        rewards=[float(rewards[index] or 0.0) for index, _ in order],
        groups=[number for _, number in order],
        lengths=[_trained_tokens(trajectories[index], settings) for index, _ in order],
    )
    estimator = algorithm_of(settings).estimator
    values = estimator(rollouts) if whitened else estimator.baseline(rollouts)
    advantages: list[float | None] = [None] * len(trajectories)
    for (index, _), advantage in zip(order, values, strict=True):
        advantages[index] = advantage
    return advantages


def _all_equal(rewards: Sequence[float | None]) -> bool:
    known = [reward for reward in rewards if reward is not None]
    return max(known) - min(known) <= EQUAL


def _trained_tokens(trajectory: Trajectory, settings: TrainingSettings) -> int:
    tokens = (trajectory.nodes[at].tokens for at in trained_nodes(trajectory, condensations=settings.condensations))
    return sum(len(each.sampled_ids) for each in tokens if each is not None)


NodeAdvantages = dict[int, float]
"""``node -> advantage`` of one episode."""


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

"""Advantages of single turns: their return to go relative to the group's at that turn, or in that state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.credit.advantages import ValidGroups
from openhands_rl_plugin.training.credit.estimators import RolloutBatch, dr_grpo
from openhands_rl_plugin.training.credit.tree_advantages import (
    NodeAdvantages,
    environment_rewards,
    search_rewards,
    state_before,
    step_advantages,
)
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
    chosen: ValidGroups,
    settings: TrainingSettings,
) -> dict[int, NodeAdvantages]:
    """Return to go of every turn relative to the same turn of the other episodes of the group.

    An episode that had ended by then has nothing left to come: it counts with 0, so that every turn is compared with
    the whole group. A baseline per time step from the other episodes leaves the gradient unbiased (Greensmith et al.
    2004, JMLR 5: 1471; from the other samples: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!").
    A baseline from those that got so far scales each turn by how many did, and to 0 where one did.
    """
    turns = _turns(trajectories, rewards, chosen, settings)
    counts = Counter(turn.index for turn in turns)
    for group, members in enumerate(chosen.groups):
        reached = {index: counts[index] for index in members}
        turns += [
            _Turn(index, None, group, number, 0, 0.0)
            for index, count in reached.items()
            for number in range(count, max(reached.values()))
        ]
    baseline = algorithm_of(settings).estimator.baseline
    return _compared(turns, [(turn.group, turn.number) for turn in turns], baseline, settings)


def state_advantages(
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
    turns, states = [], []
    for turn in _turns(trajectories, rewards, chosen, settings):
        if turn.at is not None:
            turns.append(turn)
            states.append((turn.group, state_before(trajectories[turn.index], turn.at)))
    estimator = algorithm_of(settings).estimator
    return _compared(turns, states, estimator.baseline if estimator.grouped else dr_grpo, settings)


def _turns(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    chosen: ValidGroups,
    settings: TrainingSettings,
) -> list[_Turn]:
    """The turns that were acted on."""
    turns: list[_Turn] = []
    for group, members in enumerate(chosen.groups):
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

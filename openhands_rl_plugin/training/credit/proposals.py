"""The policy gradient of searched episodes: the policy sampled each proposal, and the search's choice is no sample.

In a state s a search asks the policy for proposals a_1 .. a_n, estimates the return Q(s, a_i) from each one on, and
acts on one of them. To train the acted path as if it had been sampled is wrong: its probability is that of the search's
choice, and not the policy's. What was sampled are the proposals, each from pi(. | s), whatever was chosen afterwards,
so each is credited with its own estimated return, relative to the others in its state:

    g(s) = 1/n * sum_i (Q(s, a_i) - b_i) * grad log pi(a_i | s)

b_i is the estimator's baseline with the n proposals of s as the group. The choice has no gradient. Equal proposals that
were merged into one node count as often as they were sampled, and an answer of a rollout that later becomes a proposal
of the chosen state counts as sampled there (it was, from the same pi(. | s)). This is REINFORCE with several samples in
one state (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024, arXiv
2402.14740), with the siblings of a tree as the group as in TreeRPO (Yang et al. 2025, arXiv 2506.05183) and in the
intra-tree advantage of Tree-GRPO (Ji et al. 2025, arXiv 2509.21240).

The expectation of g(s) is the gradient of E_{a ~ pi}[Q(s, a)] (exactly with ``rloo``, up to a scale with ``dr-grpo``)
where n does not depend on what was found and the estimates are right in expectation: best-of-n and one level of ToT
with the value ``rollout``, with ``none`` in the last turn, or with an unbiased verifier. It is biased

- between turns: the states after the first are those that the search's choices led to, not the policy's own (they are
  with ``BestOfN`` and ``act = "sampled"``). The sum over turns is the off-policy policy gradient (Degris et al. 2012,
  arXiv 1205.4839), which leaves out how the policy changes its own values;
- with MCTS and deeper ToT: values are those of the searching policy, larger than the policy's own by what search gains
  below (ToT: on the best way only), and progressive widening asks for more proposals where more was found;
- by what the value gets wrong (``model``, ``verifier``, ``reward``);
- as any batch is by averages over tokens, where some proposals are longer than others.

AlphaZero's target, the visit counts (Silver et al. 2017, arXiv 1712.01815), is imitation instead, of the search.
"""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import TURN, Node, Trajectory, kind_of
from openhands_rl_plugin.rollout.strategies.annotations import notes
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.credit.advantages import EQUAL
from openhands_rl_plugin.training.credit.estimators import RolloutBatch, dr_grpo
from openhands_rl_plugin.training.credit.tree_advantages import NodeAdvantages, times_sampled


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
    proposal or with equal values: they have no signal. Where the algorithm has no groups, the mean is the baseline.
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
        advantages = baseline(RolloutBatch(sampled, [0] * len(sampled), [1] * len(sampled)), settings.std_epsilon)
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

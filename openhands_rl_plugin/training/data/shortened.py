"""Episodes of which a part can be trained on: all that was sampled before a secret came into the conversation."""

from __future__ import annotations

from openhands_rl_plugin.config.training import TrainingSettings
from openhands_rl_plugin.core.redaction import is_redacted
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.data.batch import recorded_nodes


def may_be_shortened(settings: TrainingSettings) -> bool:
    """Whether the algorithm gives each answer the weight of its episode, so that one can be left out of the sum.

    Rewards to go need all later steps, and a preference compares whole episodes.
    """
    whole = settings.step_rewards == "episode" and not settings.state_weight
    return whole and algorithm_of(settings).kind != "preference"


def until_secret(trajectory: Trajectory) -> Trajectory:
    """The episode up to the last answer before the first one whose token ids were dropped with a secret.

    The same object when there is none, when the ids are missing for another reason, and when nothing comes before.
    """
    nodes, path = trajectory.nodes, trajectory.path()
    own = (at for at in path if nodes[at].sampled)
    cut = next((at for at in own if nodes[at].tokens is None), None)
    if cut is None or not any(is_redacted(nodes[at].message) for at in path if at <= cut):
        return trajectory
    recorded = recorded_nodes(trajectory, need_logprobs=False)
    before = [at for at in trajectory.acted() if at < cut and at in recorded]
    # A parent has a smaller index than its children, so that the tree of those before is whole.
    return trajectory.model_copy(update={"nodes": nodes[:cut], "head": before[-1]}) if before else trajectory

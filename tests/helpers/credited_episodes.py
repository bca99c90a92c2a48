"""Episodes whose turns differ by their numbers of tokens, and settings of an algorithm."""

from __future__ import annotations

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Message, Node, StopReason, Tokens, Trajectory
from openhands_rl_plugin.testing import example_trajectory


def settings(**changes: object) -> TrainingSettings:
    return TrainingSettings.model_validate(changes)


def episode(number: int, *rewards: float, group: str = "g", stop: StopReason = StopReason.TERMINATED) -> Trajectory:
    """Turn ``t`` samples ``number + t + 1`` tokens and has the reward ``rewards[t]``."""
    nodes: list[Node] = [Node(parent=None, message=Message(role="user", content="?"))]
    for turn, reward in enumerate(rewards):
        count = number + turn + 1
        tokens = Tokens(extends=turn > 0, prompt_ids=(1, 2), sampled_ids=tuple(range(count)), logprobs=(-0.5,) * count)
        answer = Message(role="assistant", content="!")
        nodes.append(Node(parent=len(nodes) - 1, message=answer, sampled=True, tokens=tokens, reward=reward))
    changes = {"id": str(number), "group_id": group, "failure": None, "stop": stop}
    return example_trajectory(number).model_copy(
        update={**changes, "nodes": tuple(nodes), "head": len(nodes) - 1 if rewards else None}
    )

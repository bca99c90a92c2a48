"""A verifier as the value of search: one model for all episodes, and the choice is what it likes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from small_shop import INSTRUCTION

from openhands_rl_plugin import RLAgent, RLAgentConfig
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_agent_acts_as_its_verifier_likes(verifier: Path, judge_model: Path, shop: str, tmp_path: Path) -> None:
    config = RLAgentConfig.model_validate(
        {
            "max_turns": 1,
            "max_response_length": 8,
            "react_format": False,
            "env_server_base": shop,
            "rollout_strategy": "BestOfN",
            "strategy": {"n": 4, "value": "verifier", "value_options": {"adapter": str(verifier)}},
            "storage": {"path": str(tmp_path / "trajectories"), "durable": False},
            "serving": {"adapters_path": str(tmp_path / "adapters")},
            "training": {"dtype": "float32"},
        }
    )
    with RLAgent(judge_model, config=config) as agent:
        episodes = agent.run(INSTRUCTION, task_indices=[1, 4], batch_size=2)
    assert [each["failure"] for each in episodes] == [None] * 4
    for trajectory in asyncio.run(stored(config.storage.directory)):
        (turn,) = (at for at in trajectory.path() if trajectory.nodes[at].sampled)
        parent = trajectory.nodes[turn].parent
        offered = [at for at, node in enumerate(trajectory.nodes) if node.sampled and node.parent == parent]
        values = {at: trajectory.nodes[at].value for at in offered}
        assert len(offered) > 1 and values[turn] == max(value for value in values.values() if value is not None)
        # The shop can be forked, so that what it would answer is judged too.
        noted = trajectory.nodes[turn].metadata["search"]
        assert isinstance(noted, dict) and isinstance(noted["state"], int)
        judged = asyncio.run(judged_at(verifier, trajectory, noted["state"]))
        assert values[turn] == pytest.approx(judged, abs=1e-4)


async def stored(path: Path) -> list[Trajectory]:
    async with FileTrajectoryStorage(path) as storage:
        return [trajectory async for trajectory, _ in storage.find()]


async def judged_at(verifier: Path, trajectory: Trajectory, leaf: int) -> float | None:
    """What the verifier makes of an episode up to a node."""
    reward = build("rewards", "verifier", {"adapter": str(verifier)})
    return (await reward(trajectory.model_copy(update={"head": leaf}))).reward

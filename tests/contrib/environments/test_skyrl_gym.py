"""SkyRL-Gym's own environments, played in this process with rows of its data sets."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import skyrl_gym
from one_episode import one_episode
from skyrl_gym.envs.base_text_env import BaseTextEnv

from openhands_rl_plugin.contrib.environments.skyrl_gym import SkyRLGymEnvironment, SkyRLGymOptions
from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.types import (
    Message,
    Observation,
    StopReason,
    Task,
)
from openhands_rl_plugin.testing import check_environment

ROW = {
    "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": "What is 6 times 7?"}],
    "env_class": "gsm8k_multi_turn",
    "reward_spec": {"method": "rule", "ground_truth": "42"},
    "extra_info": {"max_turns": 3},
}


def task(environment: str = "skyrl-gym/gsm8k_multi_turn", row: Any = ROW) -> Task:
    return Task(id="t", environment=environment, data={"idx": 0, "row": row})


def said(answer: str) -> Message:
    return Message(role="assistant", content=answer)


async def answered(*answers: str, of: Task | None = None) -> list[Observation]:
    player = SkyRLGymEnvironment()
    seen = [await player.reset(of or task())]
    seen += [await player.step(said(answer)) for answer in answers]
    await player.close()
    return seen


async def test_every_turn_pays_what_skyrl_pays_and_the_conversation_is_its_own():
    answers = ["about forty", "#### 41", "#### 42"]
    opening, *steps = await answered(*answers)
    assert [(m.role, m.content) for m in opening.messages] == [("system", "Think."), ("user", "What is 6 times 7?")]
    theirs = skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras={k: v for k, v in ROW.items() if k != "prompt"})
    expected = [theirs.step(answer) for answer in answers]
    assert [each.reward for each in steps] == [each["reward"] for each in expected] == [0, pytest.approx(0.2 / 3), 1.0]
    assert [each.terminated for each in steps] == [each["done"] for each in expected]
    assert [m.content for m in steps[0].messages] == [m["content"] for m in expected[0]["observations"]]


async def test_a_session_plays_one_turn_and_keeps_the_metrics():
    of = task("skyrl-gym/gsm8k", {**ROW, "env_class": "gsm8k"})
    found = await one_episode(SkyRLGymEnvironment(), ["6 * 7 = 42\n#### 42"], of)
    assert (found.stop, found.episode_return, found.failure) == (StopReason.TERMINATED, 1.0, None)
    assert found.evidence["metrics"] == {}


@pytest.mark.parametrize("fork", ["copy", "replay"])
async def test_it_conforms_and_forks(fork: str):
    await check_environment(
        lambda: SkyRLGymEnvironment(SkyRLGymOptions.model_validate({"fork": fork})),
        task(row={**ROW, "extra_info": {"max_turns": 9}}),
        actions=["maybe", "#### 41", "#### 40"],
    )


class Unpaid(BaseTextEnv):
    """Its reward is missing."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def step(self, action: str) -> Any:
        return {"observations": [], "reward": None, "done": True, "metadata": {}}


async def test_rows_names_and_rewards_that_are_missing_say_so():
    with pytest.raises(BadEnvironmentError, match="needs a row of SkyRL's data set"):
        await answered(of=task(row=None))
    with pytest.raises(BadEnvironmentError, match="reward_spec field is required"):
        await answered(of=task("skyrl-gym/gsm8k", {"prompt": ROW["prompt"]}))
    with pytest.raises(BadEnvironmentError, match="No registered env with id: gsm9k"):
        await answered(of=task("skyrl-gym/gsm9k"))
    module = ModuleType("unpaid_environment")
    module.Unpaid = Unpaid  # type: ignore[attr-defined]
    sys.modules["unpaid_environment"] = module
    with pytest.raises(BadEnvironmentError, match="returned the reward None"):
        await answered("go", of=task("skyrl-gym/unpaid_environment:Unpaid"))
    del sys.modules["unpaid_environment"]

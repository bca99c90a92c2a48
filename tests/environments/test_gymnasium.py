"""Gymnasium's own environments, played in this process."""

from __future__ import annotations

import re
import string
import sys
import time
from types import ModuleType
from typing import Any

import gymnasium
import numpy
import pytest
from gymnasium import spaces
from one_episode import one_episode

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.types import (
    Message,
    Observation,
    StopReason,
    Task,
)
from openhands_rl_plugin.environments.gyms import ActionSpace, GymnasiumEnvironment, GymnasiumOptions
from openhands_rl_plugin.environments.http.client import RefusedActionError
from openhands_rl_plugin.rollout.strategies.mcts import MCTSStrategy
from openhands_rl_plugin.testing import ScriptedEngine, check_environment

LAKE = "gymnasium/FrozenLake-v1"
# Around the holes of the 4 by 4 map.
WAY = ["down", "down", "right", "right", "down", "right"]


def task(environment: str = LAKE, idx: int = 0, **data: Any) -> Task:
    return Task(id="t", environment=environment, data={"idx": idx, **data})


def lake(**options: Any) -> GymnasiumEnvironment:
    return GymnasiumEnvironment(GymnasiumOptions.model_validate({"arguments": {"is_slippery": False}, **options}))


def said(action: str) -> Message:
    return Message(role="assistant", content=f"Action: {action}")


def text(found: Observation) -> str:
    return found.messages[-1].content or ""


async def play(player: GymnasiumEnvironment, of: Task, actions: list[str]) -> list[Observation]:
    seen = [await player.reset(of)]
    for action in actions:
        seen.append(await player.step(said(action)))
    return seen


async def test_frozen_lake_is_crossed_and_says_what_a_player_sees():
    player = lake()
    opening, *_, last = await play(player, task(), WAY)
    system = opening.messages[0].content or ""
    assert "Walk from the start S to the goal G" in system and "left (0), down (1), right (2), up (3)" in system
    assert text(opening).endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    evidence = await player.evidence()
    assert (evidence["return"], evidence["rewards"]) == (1.0, [0.0] * 5 + [1.0])
    await player.close()


@pytest.mark.parametrize("fork", ["copy", "replay"])
async def test_it_conforms_and_forks(fork: str):
    actions = ["Action: down", "Action: 1", "Action: jump", "Action: right"]
    await check_environment(lambda: lake(fork=fork), task(), actions=actions)


async def test_a_search_finds_the_goal_in_copies():
    engine = ScriptedEngine(lambda messages: f"Action: {WAY[sum(m.role == 'assistant' for m in messages) % 6]}")
    strategy = MCTSStrategy(MCTSStrategy.Options(num_simulations=12, depth=8, seed=1))
    found = await one_episode(lake(), engine, task(), strategy=strategy)
    assert (found.stop, found.episode_return, found.failure) == (StopReason.TERMINATED, 1.0, None)


@pytest.mark.parametrize(
    ("name", "action", "expected"),
    [
        ("CliffWalking-v1", "up", "You are in cell 24"),
        ("Taxi-v4", "south", "+---------+"),
    ],
)
async def test_other_environments_speak(name: str, action: str, expected: str):
    player = GymnasiumEnvironment()
    opening, step = await play(player, task(f"gymnasium/{name}"), [action])
    assert expected in text(opening if name == "Taxi-v4" else step) and step.reward is not None
    await player.close()


class Odd(gymnasium.Env):
    """Does what ``mode`` says."""

    observation_space = spaces.Text(50)
    action_space = spaces.Text(50, charset=string.printable)

    def __init__(self, mode: str) -> None:
        self.mode, self.count = mode, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"begin {options}" if options else "begin", {}

    def step(self, action: str) -> Any:
        self.count += 1
        if self.mode == "hangs":
            time.sleep(0.6)
        if self.mode == "raises":
            raise KeyError("lost")
        if self.mode == "old":
            return "seen", 0.0, False, {}
        reward = {"none": None, "nan": float("nan")}.get(self.mode, 0.5)
        said = f"{action} {time.monotonic_ns()}" if self.mode == "clock" else f"{action} {self.count}"
        return said, reward, False, self.count == 2, {"at": numpy.int64(3)}


@pytest.fixture(autouse=True)
def odd_is_registered():
    gymnasium.register("Odd-v0", entry_point=lambda **arguments: Odd(**arguments))
    yield
    gymnasium.registry.pop("Odd-v0")


def odd(mode: str, **options: Any) -> GymnasiumEnvironment:
    return GymnasiumEnvironment(GymnasiumOptions.model_validate({"arguments": {"mode": mode}, **options}))


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("none", "returned the reward None, which is no finite number"),
        ("nan", "returned the reward nan"),
        ("old", r"step must return .*not 4 values: wrap an environment of old Gym"),
        ("raises", "KeyError: 'lost'"),
    ],
)
async def test_what_is_no_reward_is_a_failure_and_never_0(mode: str, message: str):
    found = await one_episode(odd(mode), ["Action: go"], task("gymnasium/Odd-v0"))
    assert found.failure is not None and found.known_return is None
    assert re.search(message, found.failure.message), found.failure.message


async def test_truncation_rows_and_plain_answers_arrive():
    player = odd("ok", react_format=False)
    opening = await player.reset(task("gymnasium/Odd-v0", row={"size": 3}))
    assert text(opening) == "begin {'size': 3}"
    first = await player.step(Message(role="assistant", content="two\nlines"))
    assert (text(first), first.truncated) == ("two\nlines 1", False)
    last = await player.step(Message(role="assistant", content="go"))
    assert (last.terminated, last.truncated, last.reward) == (False, True, 0.5)
    assert (await player.evidence())["info"] == {"at": 3}


async def test_a_step_that_hangs_ends_typed_and_leaves_the_others_alone():
    stuck, other = odd("hangs", timeout=0.2), odd("ok")
    await stuck.reset(task("gymnasium/Odd-v0"))
    await other.reset(task("gymnasium/Odd-v0"))
    with pytest.raises(InfrastructureError, match=r"gymnasium/Odd-v0.step did not return within 0.2 s"):
        await stuck.step(said("go"))
    assert text(await other.step(said("go"))) == "go 1"
    with pytest.raises(InfrastructureError, match="still executes an earlier call"):
        await stuck.step(said("go"))
    await stuck.close()


async def test_a_replay_that_diverges_is_refused():
    player = odd("clock")
    await play(player, task("gymnasium/Odd-v0"), ["go"])
    assert player.info.fork_steps == 1
    with pytest.raises(BadEnvironmentError, match="answered the same actions differently"):
        await player.fork()


async def test_a_formatter_of_ones_own_is_shown():
    player = lake(formatter="test_gymnasium_words:words")
    module = ModuleType("test_gymnasium_words")
    module.words = lambda observation, info: f"at {observation} with {info['prob']}"  # type: ignore[attr-defined]
    sys.modules["test_gymnasium_words"] = module
    assert text(await player.reset(task())) == "at 0 with 1"
    del sys.modules["test_gymnasium_words"]


def test_actions_of_every_space():
    assert ActionSpace(spaces.Discrete(3, start=5)).read("6") == 6
    box = ActionSpace(spaces.Box(-1, 1, (2,), numpy.float32))
    assert box.read("[0.5, -1]").tolist() == [0.5, -1.0]
    assert ActionSpace(spaces.MultiDiscrete([3, 2])).read("[2, 1]").tolist() == [2, 1]
    both = ActionSpace(spaces.Dict({"move": spaces.Discrete(2), "say": spaces.Text(9)}))
    assert both.read('{"move": 1, "say": "hello"}') == {"move": 1, "say": "hello"}
    assert ActionSpace(spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2)))).read("[1, [0, 1]]")[0] == 1
    for space, wrong in (
        (spaces.Discrete(3), "3"),
        (spaces.Discrete(3), "1.0"),
        (spaces.Box(-1, 1, (2,)), "[0, 5]"),
        (spaces.Box(-1, 1, (2,)), "[0]"),
        (spaces.MultiDiscrete([3, 2]), "[0.5, 1]"),
        (spaces.Text(3), "too long"),
        (spaces.Dict({"a": spaces.Discrete(2)}), '{"b": 1}'),
        (spaces.MultiDiscrete([3, 2]), "[[[[["),
    ):
        with pytest.raises(RefusedActionError, match="Invalid action: it must be"):
            ActionSpace(space).read(wrong)

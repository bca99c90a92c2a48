"""Gymnasium's own environments, in this process."""

from __future__ import annotations

import re
import string
import time
from typing import Any

import gymnasium
import numpy
import pytest
from gymnasium import spaces
from one_episode import one_episode

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.types import Message, Observation, Task
from openhands_rl_plugin.environments.gyms import GymnasiumEnvironment, GymnasiumOptions
from openhands_rl_plugin.testing import check_environment

LAKE = "gymnasium/FrozenLake-v1"
# Around the holes of the 4 by 4 map.
WAY = ["1", "1", "2", "2", "1", "2"]


def task(environment: str = LAKE, idx: int = 0, **data: Any) -> Task:
    return Task(id="t", environment=environment, data={"idx": idx, **data})


def lake(**options: Any) -> GymnasiumEnvironment:
    return GymnasiumEnvironment(GymnasiumOptions.model_validate({"arguments": {"is_slippery": False}, **options}))


def reply(action: str) -> Message:
    return Message(role="assistant", content=f"Action: {action}")


def text(found: Observation) -> str:
    return found.messages[-1].content or ""


async def play(player: GymnasiumEnvironment, of: Task, actions: list[str]) -> list[Observation]:
    seen = [await player.reset(of)]
    for action in actions:
        seen.append(await player.step(reply(action)))
    return seen


async def test_frozen_lake_is_crossed_and_shows_its_state():
    player = lake(arguments={"is_slippery": False, "render_mode": "ansi"})
    opening, *_, last = await play(player, task(), WAY)
    assert "a whole number from 0 to 3" in (opening.messages[0].content or "")
    assert text(opening).split() == ["0", "SFFF", "FHFH", "FFFH", "HFFG"]
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    evidence = await player.evidence()
    assert (evidence["return"], evidence["rewards"]) == (1.0, [0.0] * 5 + [1.0])
    await player.close()


async def test_it_conforms_and_forks():
    await check_environment(lake, task(), actions=["Action: 1", "Action: 1", "Action: jump", "Action: 2"])
    of = task("gymnasium/Odd-v0")
    await check_environment(lambda: odd("ok"), of, actions=["Action: a", "Action: b"])


@pytest.mark.parametrize(
    ("space", "right", "wrong"),
    [
        (spaces.Discrete(3, start=5), "6", ["8", "1.0", "six"]),
        (spaces.Box(-1, 1, (2,), numpy.float32), "[0.5, -1]", ["[0, 5]", "[0]", "[[[["]),
        (spaces.MultiDiscrete([3, 2]), "[2, 1]", ["[0.5, 1]", "[3, 0]"]),
        (spaces.Text(3), "yes", ["too long"]),
        (spaces.Dict({"move": spaces.Discrete(2), "say": spaces.Text(9)}), '{"move": 1, "say": "hi"}', ['{"b": 1}']),
    ],
)
async def test_actions_are_texts_or_json(space: spaces.Space[Any], right: str, wrong: list[str]):
    player = odd("ok", space=space)
    await player.reset(task("gymnasium/Odd-v0"))
    for each in wrong:
        assert text(await player.step(reply(each))).startswith("Invalid action: it must be")
    assert text(await player.step(reply(right))).endswith(" 1"), "what is refused is not executed"
    await player.close()


class Odd(gymnasium.Env):
    """Does what ``mode`` says."""

    observation_space = spaces.Text(50)

    def __init__(self, mode: str, space: spaces.Space[Any] | None = None) -> None:
        self.mode, self.count = mode, 0
        self.action_space = space or spaces.Text(50, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"begin {options}" if options else "begin", {}

    def step(self, action: str) -> Any:
        self.count += 1
        if self.mode == "hangs":
            time.sleep(0.6)
        if self.mode == "raises":
            raise KeyError("lost")
        if self.mode == "exits":
            raise SystemExit(3)
        if self.mode == "old":
            return "seen", 0.0, False, {}
        reward = {"none": None, "nan": float("nan")}.get(self.mode, 0.5)
        observed = f"{action} {time.monotonic_ns()}" if self.mode == "clock" else f"{action} {self.count}"
        return observed, reward, False, self.count == 2, {"at": numpy.int64(3)}


@pytest.fixture(autouse=True)
def odd_is_registered():
    gymnasium.register("Odd-v0", entry_point=lambda **arguments: Odd(**arguments))
    yield
    gymnasium.registry.pop("Odd-v0")


def odd(mode: str, space: spaces.Space[Any] | None = None, **options: Any) -> GymnasiumEnvironment:
    arguments = {"mode": mode, **({"space": space} if space is not None else {})}
    given = GymnasiumOptions.model_validate(options)
    return GymnasiumEnvironment(given.model_copy(update={"arguments": arguments}))


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("none", "NoneType"),
        ("nan", "reward.*finite number"),
        ("old", "expected 5, got 4"),
        ("raises", "KeyError: 'lost'"),
        ("exits", "SystemExit: 3"),
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
        await stuck.step(reply("go"))
    assert text(await other.step(reply("go"))) == "go 1"
    with pytest.raises(InfrastructureError, match="still executes an earlier call"):
        await stuck.step(reply("go"))
    await stuck.close()


async def test_a_replay_that_diverges_is_refused():
    player = odd("clock")
    await play(player, task("gymnasium/Odd-v0"), ["go"])
    assert player.info.fork_steps == 1
    with pytest.raises(BadEnvironmentError, match="answered the same actions differently"):
        await player.fork()

"""The reward of localization tasks: F1 over files, modules and functions."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.core.errors import ConfigError, GraderError
from openhands_rl_plugin.core.records import LocatedPlaces, Places
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.evals.runs.swe_runner import with_verdict
from openhands_rl_plugin.evals.swe.types import PatchVerdict, VerdictKind
from openhands_rl_plugin.testing import check_reward, example_trajectory

FIX = Places(files=("a.py",), modules=("a.py::A",), functions=("a.py::A.f", "a.py::A.g"))
NEAR = Places(files=("a.py", "b.py"), modules=("a.py::A",), functions=("a.py::A.f",))


def judged(named: Places, fix: Places = FIX) -> Trajectory:
    places = LocatedPlaces(fix=fix, named=named, by="answer")
    return with_verdict(example_trajectory(), PatchVerdict(instance_id="a", kind=VerdictKind.UNRESOLVED, places=places))


async def test_it_is_the_mean_of_three_f1():
    score = await build("rewards", "localization")(judged(NEAR))
    assert score.detail["f1"] == {"file": 2 / 3, "module": 1.0, "function": 2 / 3}
    assert score.reward == pytest.approx((2 / 3 + 1 + 2 / 3) / 3) and score.detail["resolved"] is False
    assert (score.reward_version, score.detail["by"]) == ("localization-1@1/1/1", "answer")


@pytest.mark.parametrize(("named", "reward"), [(FIX, 1.0), (Places(), 0.0), (Places(files=("b.py",)), 0.0)])
async def test_the_fix_is_one_and_nothing_is_zero(named: Places, reward: float):
    for options in ({}, {"file": 0.1, "module": 0.2, "function": 0.3}, {"module": 0, "function": 0}):
        score = await build("rewards", "localization", options)(judged(named))
        assert (score.reward, score.detail["resolved"]) == (reward, named == FIX)


async def test_naming_everything_pays_little():
    everything = Places(
        files=tuple(f"{at}.py" for at in range(99)) + FIX.files,
        modules=tuple(f"{at}.py::A" for at in range(99)) + FIX.modules,
        functions=tuple(f"{at}.py::f" for at in range(98)) + FIX.functions,
    )
    score = await build("rewards", "localization")(judged(everything))
    assert score.reward is not None and score.reward < 0.03


async def test_levels_without_a_place_of_the_fix_do_not_count():
    new_file = Places(files=("new.py",))
    score = await build("rewards", "localization")(judged(new_file, fix=new_file))
    assert (score.reward, score.detail["f1"]) == (1.0, {"file": 1.0})
    wordy = await build("rewards", "localization")(judged(NEAR, fix=Places(files=("a.py",), modules=("a.py::A",))))
    assert wordy.reward == pytest.approx((2 / 3 + 1) / 2)


async def test_weights_are_in_the_version():
    options = {"file": 1, "module": 0, "function": 3}
    reward = build("rewards", "localization", options)
    score = await reward(judged(NEAR))
    assert (score.reward, score.reward_version) == (pytest.approx(2 / 3), "localization-1@1/0/3")
    for wrong in ({"file": 0}, {"module": -1}, {"function": float("inf")}, {"level": 1}):
        with pytest.raises(ConfigError, match="localization"):
            build("rewards", "localization", wrong)


async def test_what_is_not_graded_has_no_reward():
    tested = with_verdict(example_trajectory(), PatchVerdict(instance_id="a", kind=VerdictKind.RESOLVED))
    for each in (example_trajectory(), tested):
        with pytest.raises(GraderError, match="grade it first"):
            await build("rewards", "localization")(each)
    with pytest.raises(GraderError, match="nothing to find"):
        await build("rewards", "localization")(judged(NEAR, fix=Places()))
    broken = judged(NEAR)
    broken.evidence["test_result"]["verdict"]["places"] = {"fix": 3}  # pyright: ignore
    with pytest.raises(GraderError, match="cannot be read"):
        await build("rewards", "localization")(broken)


async def test_it_is_a_reward_like_others():
    await check_reward(build("rewards", "localization"), [judged(FIX), judged(NEAR), judged(Places())])

"""The generated shop: the same everywhere, worth choosing in, and every goal can be met."""

from __future__ import annotations

import hashlib

import pytest

from openhands_rl_plugin.contrib.webshop import WebShop, oracle_actions

CATALOGUE_SHA256 = "80b98b7d1127683b3c0a3dca32d085d47a405a53596fa7b65aba71ee04a10848"
GOALS_SHA256 = "593db8cfcd43f55d1055947030a4a8ac5effec7d2568e375525b7a207b4dc4d6"


@pytest.fixture(scope="module")
def world() -> WebShop:
    return WebShop(results_per_page=5)


def sha256(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def test_the_default_catalogue_and_goals_never_change(world: WebShop) -> None:
    assert sha256(world.products) == CATALOGUE_SHA256
    assert sha256(world.goals) == GOALS_SHA256


@pytest.mark.parametrize("results_per_page", [5])
def test_the_oracle_meets_every_goal(results_per_page: int) -> None:
    world = WebShop(results_per_page=results_per_page)
    for goal in world.goals:
        session = world.session(goal.index)
        results = [session.step(action) for action in oracle_actions(world, goal.index)]
        assert results[-1].reward == 1.0 and results[-1].done and not results[-1].truncated, goal
        assert [result.reward for result in results[:-1]] == [0.0] * (len(results) - 1)

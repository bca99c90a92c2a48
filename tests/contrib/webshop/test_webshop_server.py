"""The shop over HTTP: two protocols, isolation, expiry, limits and leaks."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from starlette.testclient import TestClient

from openhands_rl_plugin.contrib.webshop import WebShop, oracle_actions, running_webshop
from openhands_rl_plugin.contrib.webshop.server import create_app
from openhands_rl_plugin.core.types import Task
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.testing import check_environment

WORLD = WebShop()


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with running_webshop(WORLD) as url:
        yield url


@pytest.fixture
def shop(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, trust_env=False, headers={"content-type": "application/json"}) as client:
        yield client


def play(client: httpx.Client, body: dict) -> dict:
    answer = {}
    for action in oracle_actions(WORLD, 7):
        answer = client.post("/step", json={**body, "action": action}).json()
    return answer


def test_the_simple_protocol(shop: httpx.Client) -> None:
    opened = shop.post("/reset", json={"idx": 7}).json()
    goal, mine = WORLD.goals[7], {"session": opened.pop("session")}
    assert opened == {
        "state": WORLD.session(7).observation,
        "reward": 0.0,
        "done": False,
        "info": {"goal_index": 7, "instruction": goal.instruction},
    }
    searched = shop.post("/step", json={**mine, "action": "search[tea]"}).json()
    assert searched.keys() == {"state", "reward", "done", "truncated", "info"} and searched["info"] == {}
    mine = {"session": shop.post("/reset", json={"idx": 7}).json()["session"]}
    bought = play(shop, mine)
    assert (bought["reward"], bought["done"], bought["truncated"]) == (1.0, True, False)
    assert bought["info"]["goal_index"] == 7
    assert bought["info"]["purchase"]["options"] == dict(goal.options)
    assert bought["info"]["purchase"]["reward"] == bought["info"]["purchase"]["r_type"] == 1.0
    assert [shop.post("/close", json=mine).json() for _ in range(2)] == [True, False]
    assert shop.post("/reset", json={"idx": 10**6}).status_code == 422


def test_the_oldest_session_makes_room() -> None:
    with TestClient(create_app(WORLD, max_sessions=2)) as shop:
        names = [shop.post("/reset", json={"idx": 0}).json()["session"] for _ in range(3)]
        found = [shop.post("/step", json={"session": each, "action": "x"}).status_code for each in names]
    assert found == [404, 200, 200]


async def test_the_shop_passes_the_conformance_check(base_url: str) -> None:
    actions = ["Action: search[lamp]", "Action: click[nothing]", "Action: search[chair]"]
    options = HttpEnvironmentOptions(base_url=base_url)
    task = Task(id="webshop-0", environment="webshop", data={"idx": 0})
    await check_environment(lambda: WebEnvClient(options), task, actions=actions)

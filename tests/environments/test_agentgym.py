"""AgentGym's forms, as its webshop, textcraft, sciworld, babyai and alfworld servers word them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from raw_server import raw_server, respond
from small_shop import running_shop

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.core.types import Message, Observation, Task
from openhands_rl_plugin.environments.http.client import AgentGymClient, HttpEnvironmentOptions
from openhands_rl_plugin.testing import check_environment


def task(environment: str = "agentgym/textcraft", idx: int = 3) -> Task:
    return Task(id="t", environment=environment, instruction="craft a boat", data={"idx": idx})


def client(url: str) -> AgentGymClient:
    return AgentGymClient(HttpEnvironmentOptions(base_url=url, timeout=5))


async def play(player: AgentGymClient, of: Task, steps: int = 1) -> list[Observation]:
    seen = [await player.reset(of)]
    seen += [await player.step(Message(role="assistant", content=f"Action: act {at}")) for at in range(steps)]
    await player.close()
    return seen


async def test_webshop_keys_list_answer_and_no_close():
    def handler(path: str, body: Any) -> bytes:
        if path == "/create":
            return respond(41157437)
        if path == "/reset":
            return respond(["WebShop [SEP] Instruction:", None])
        if path == "/step":
            return respond({"state": "Thank you", "reward": 1.0, "done": True, "info": None})
        return respond("Method Not Allowed", status="405 Method Not Allowed")

    async with raw_server(handler) as server:
        opening, last = await play(client(server.url), task("webshop"))
    assert opening.messages[1].content == "WebShop [SEP] Instruction:"
    assert "search[keywords]" in (opening.messages[0].content or "")
    assert (last.reward, last.terminated) == (1.0, True)
    assert server.requests == [
        ("/create", {}),
        ("/reset", {"env_idx": 41157437, "session_id": 3}),
        ("/step", {"env_idx": 41157437, "action": "act 0"}),
        ("/close", {"env_idx": 41157437}),
    ]


@pytest.mark.parametrize(
    ("score", "terminated", "truncated"), [(40, False, True), (100, True, False), (-100, True, False)]
)
async def test_sciworld_s_own_limit_is_no_end_of_the_task(score: int, terminated: bool, truncated: bool):
    gains = iter([30, score - 30])

    def handler(path: str, body: Any) -> bytes:
        if path == "/create":
            return respond({"id": 5})
        gain = next(gains) if path == "/step" else 0
        return respond({"observation": "o", "reward": gain, "score": 0, "done": gain not in (0, 30)})

    async with raw_server(handler) as server:
        *_, first, last = await play(client(server.url), task("agentgym/sciworld"), steps=2)
    assert not first.terminated and not first.truncated
    assert (last.terminated, last.truncated) == (terminated, truncated)
    assert first.reward + last.reward == pytest.approx(score / 100)


@pytest.mark.parametrize("at", ["/create", "/reset", "/step"])
async def test_an_error_in_a_200_is_an_error(at: str):
    def handler(path: str, body: Any) -> bytes:
        if path == at:
            return respond({"error": "The id 77 is not valid."})
        return respond({"id": 77} if path == "/create" else {"observation": "o"})

    async with raw_server(handler) as server:
        player = client(server.url)
        with pytest.raises(BadEnvironmentError, match=f"{at} answered .*The id 77 is not valid"):
            await play(player, task())
        await player.close()
        assert ("/close" in server.paths()) == (at != "/create")


async def test_an_unknown_server_is_refused():
    with pytest.raises(ConfigError, match=r"unknown AgentGym server 'chess'; available: alfworld"):
        await client("http://127.0.0.1:9").reset(task("agentgym/chess"))


async def test_a_shop_speaks_agentgym_to_twenty_clients():
    with running_shop() as url:
        actions = ["Action: search[lamp]", "Action: click[nothing]"]
        await check_environment(lambda: client(url), task("webshop"), actions=actions)
        openings = await asyncio.gather(*(play(client(url), task("webshop", idx), steps=2) for idx in range(20)))
    assert len({opening[0].messages[1].content for opening in openings}) == 20

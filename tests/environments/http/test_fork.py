"""Forks of an episode behind a server, by taking the same actions again."""

from __future__ import annotations

from typing import Any

import pytest
from one_episode import one_episode
from raw_server import raw_server, respond
from small_shop import running_shop
from test_client import CountingServer, options, reply, task

from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.protocols import Forkable
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.environments.http.client import WebEnvClient
from openhands_rl_plugin.rollout.strategies.base import BestOfNStrategy
from openhands_rl_plugin.testing import ScriptedEngine

pytestmark = pytest.mark.contract


def react(action: str) -> Any:
    return reply(f"Thought: go on\nAction: {action}")


async def test_forks_take_the_same_actions_again_and_then_go_their_own_ways():
    with running_shop() as url:
        shopper = WebEnvClient(options(url))
        assert isinstance(shopper, Forkable)
        await shopper.reset(task(3))
        await shopper.step(react("search[red lamp]"))
        await shopper.step(reply("nothing to act on in here"))
        before = await shopper.evidence()
        twins = [await shopper.fork() for _ in range(6)]
        assert shopper.info.fork_steps == 1
        pages = [(await twin.step(react("click[Next >]"))).messages for twin in twins[:4]]
        assert all(page == pages[0] for page in pages)
        await twins[5].step(react("click[Back to Search]"))
        assert await shopper.evidence() == before
        assert [len(twin.steps) for twin in twins] == [3, 3, 3, 3, 2, 3]
        for twin in twins:
            await twin.close()
        assert (await shopper.step(react("click[Next >]"))).messages == pages[0]
        await shopper.close()


async def test_a_server_that_answers_otherwise_the_second_time_is_refused():
    class Moody(CountingServer):
        async def __call__(self, path: str, body: Any) -> bytes:
            if path == "/step":
                mood = f"mood {sum(self.counts.values())} {len(self.counts)}"
                return respond({"state": mood, "reward": 0, "done": False})
            return await super().__call__(path, body)

    async with raw_server(Moody(sessions=True)) as server:
        client = WebEnvClient(options(server.url))
        await client.reset(task(7))
        await client.step(react("one"))
        with pytest.raises(BadEnvironmentError, match="cannot be forked: it answered the same actions differently"):
            await client.fork()
        assert (await client.step(react("two"))).messages, "the original goes on"
        await client.close()


async def test_a_search_on_a_server_without_sessions_fails_once_with_the_remedy():
    """It is the environment's failure, which no retry mends: candidates would be sampled again."""
    async with raw_server(CountingServer(sessions=False)) as server:
        engine, strategy = ScriptedEngine(["Action: one", "Action: two"] * 8), BestOfNStrategy(n=2, value="rollout")
        trajectory = await one_episode(WebEnvClient(options(server.url)), engine, task(7), strategy=strategy)
        assert trajectory.failure is not None and trajectory.failure.kind is FailureKind.ENVIRONMENT
        assert "has no sessions" in trajectory.failure.message and '"StandardReAct"' in trajectory.failure.message
        assert server.paths() == ["/reset"]

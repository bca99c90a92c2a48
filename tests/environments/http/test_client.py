"""The simple protocol, against servers on real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from raw_server import raw_server, respond
from small_shop import running_shop

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.types import Message, Task
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.testing import check_environment


def task(idx: Any = 0, instruction: str = "buy the red lamp", environment: str = "webshop") -> Task:
    return Task(id=f"task-{idx}", environment=environment, instruction=instruction, data={"idx": idx})


def reply(text: str | None) -> Message:
    return Message(role="assistant", content=text)


def options(url: str, **changes: Any) -> HttpEnvironmentOptions:
    return HttpEnvironmentOptions.model_validate({"base_url": url, "timeout": 5, **changes})


class CountingServer:
    """Counts the steps of each episode; with sessions, every reset is an episode of its own."""

    def __init__(self, *, sessions: bool) -> None:
        self.sessions = sessions
        self.counts: dict[object, int] = {}

    async def __call__(self, path: str, body: Any) -> bytes:
        await asyncio.sleep(0.002)
        if path == "/reset":
            key = len(self.counts) if self.sessions else body["idx"]
            self.counts[key] = 0
            answer = {"state": f"start of {body['idx']}"}
            return respond({**answer, "session": f"s{key}"} if self.sessions else answer)
        key = int(body["session"][1:]) if self.sessions else body["idx"]
        if path == "/close":
            del self.counts[key]
            return respond({"closed": True})
        self.counts[key] += 1
        count = self.counts[key]
        return respond({"state": f"count {count}", "reward": 0.5, "done": count == 3, "info": {"count": count}})


async def test_an_episode_from_reset_to_close():
    async with raw_server(CountingServer(sessions=True)) as server:
        client = WebEnvClient(options(server.url))
        opening = await client.reset(task(7))
        assert [message.role for message in opening.messages] == ["system", "user"]
        assert opening.messages[1].content == "start of 7"
        first = await client.step(reply("Thought: look.\nAction: search[lamp]"))
        assert (first.messages[0].content, first.reward, first.terminated) == ("count 1", 0.5, False)
        await client.step(reply("Action: click[a]"))
        last = await client.step(reply("Action: click[b]"))
        assert last.terminated and not last.truncated
        evidence = await client.evidence()
        await client.close()
        await client.close()
    assert server.paths() == ["/reset", "/step", "/step", "/step", "/close"]
    assert server.requests[1][1] == {"action": "search[lamp]", "idx": 7, "session": "s0"}
    assert evidence == {
        "idx": 7,
        "final_state": "count 3",
        "return": 1.5,
        "rewards": [0.5, 0.5, 0.5],
        "steps": 3,
        "malformed": 0,
        "done": True,
        "truncated": False,
        "info": {"count": 3},
    }


async def test_without_sessions_one_index_is_one_episode_at_a_time():
    async with raw_server(CountingServer(sessions=False)) as server:
        first, second, other = (WebEnvClient(options(server.url)) for _ in range(3))
        await first.reset(task(3))
        await other.reset(task(4))
        with pytest.raises(InfrastructureError, match="has no sessions and an episode of idx 3 is running already"):
            await second.reset(task(3))
        assert server.paths() == ["/reset", "/reset"], "the refused episode must not touch the running one"
        await second.close()
        await first.close()
        third = WebEnvClient(options(server.url))
        await third.reset(task(3))
        await third.close()
        await other.close()


async def test_the_task_and_the_actions_reach_the_model():
    async with raw_server(CountingServer(sessions=True)) as server:
        for changes, expected in [
            ({}, ["Thought:", "Action:", "search[keywords]", "Task: buy the red lamp"]),
            ({"react_format": False}, ["Answer with the action only.", "search[keywords]", "Task: buy the red lamp"]),
            ({"system_prompt": "You are thrifty."}, ["You are thrifty.", "Action:", "Task: buy the red lamp"]),
            ({"action_language": "hop, skip"}, ["hop, skip", "Task: buy the red lamp"]),
        ]:
            client = WebEnvClient(options(server.url, **changes))
            system = (await client.reset(task())).messages[0].content or ""
            assert [part for part in expected if part not in system] == []
            await client.close()


@pytest.mark.parametrize(("react_format", "text", "complaint"), [(True, None, "'Action:'"), (False, " ", "empty")])
async def test_a_malformed_action_is_answered_here_and_counts(react_format: bool, text: str | None, complaint: str):
    async with raw_server(CountingServer(sessions=True)) as server:
        client = WebEnvClient(options(server.url, react_format=react_format))
        await client.reset(task())
        answer = await client.step(reply(text))
        assert complaint in (answer.messages[0].content or "")
        assert (answer.reward, answer.terminated, answer.truncated) == (0.0, False, False)
        evidence = await client.evidence()
        assert (evidence["steps"], evidence["malformed"], evidence["rewards"]) == (1, 1, [0.0])
        await client.close()
    assert server.paths() == ["/reset", "/close"]


async def test_a_shop_passes_the_conformance_check():
    actions = ["Action: search[lamp]", "Action: click[nothing]", "Action: search[chair]"]
    with running_shop() as shop:
        await check_environment(lambda: WebEnvClient(options(shop)), task(0), actions=actions)

"""Clients that condense their history: what of a session was acted on, and what was asked beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from gateway_world import SYSTEM, TOOL, Model, user, world

from openhands_rl_plugin.core.types import CONDENSATION, SIDE, TURN, Trajectory, kind_of
from openhands_rl_plugin.training.data.batch import samples_of
from openhands_rl_plugin.trajectories.view import Cause, breaks_of

pytestmark = pytest.mark.contract

SUMMARY = "The files were looked at and the first test passes."


def trained(trajectory: Trajectory) -> str:
    """The text of all trained tokens: the model's tokens are bytes."""
    ids = [
        token
        for sample in samples_of(trajectory)
        for token, on in zip(sample.input_ids, sample.mask, strict=True)
        if on
    ]
    return bytes(ids).decode()


async def summing_up(request: web.Request, body: dict) -> web.StreamResponse | None:
    _, found, number = body["messages"][-1]["content"].partition("sum up: ")
    if not found:
        return None
    said = f"{SUMMARY} {number}"
    answer = Model().completion({**body, "tools": None})
    answer["choices"][0]["message"] = {"role": "assistant", "content": said}
    answer["choices"][0]["token_ids"] = list(f"{said}</>".encode())
    answer["choices"][0]["logprobs"] = {
        "content": [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * len(said + "</>")
    }
    return web.json_response(answer)


@pytest.mark.parametrize("tools", [[TOOL], None], ids=["tools", "text"])
async def test_every_turn_of_a_condensed_session_is_trained_and_no_summary(tmp_path: Path, tools: list | None) -> None:
    async with world(tmp_path, Model(behave=summing_up)) as gateway:
        asked = {"tools": tools} if tools else {}
        history, turns = [SYSTEM, user("mend it")], []
        for number in range(6):
            answer = await gateway.say(*history, **asked)
            turns.append(answer["content"])
            calls = answer.get("tool_calls")
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": f"done {number}"} if calls else None
            history += [answer, result or user(f"done {number}")]
            if number in (2, 4):
                summary = await gateway.say(user(f"sum up: {len(history)}"))
                history = [SYSTEM, user("mend it"), user(f"So far: {summary['content']}"), *history[-2:]]
        assert (await gateway.end()).status_code == 200
    (episode,) = [each for each in await gateway.stored() if each.task.id == "s"]
    text = trained(episode)
    assert [turn for turn in turns if turn and turn in text] == turns and SUMMARY not in text
    assert len(episode.acted()) == 6 and len(episode.ends()) == 3
    kinds = [
        kind_of(node) for node in episode.nodes if node.sampled and (node.message.content or "").startswith(SUMMARY)
    ]
    assert kinds == [CONDENSATION] * 2
    assert len([each for each in breaks_of(episode) if each.cause in (Cause.CONDENSED, Cause.REWRITTEN)]) >= 2


async def test_a_request_without_tools_beside_a_session_with_tools_is_no_turn(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway:
        first = await gateway.say(SYSTEM, user("one"), tools=[TOOL])
        title = await gateway.say(user("A title for this conversation?"))
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "1"}
        await gateway.say(SYSTEM, user("one"), first, result, tools=[TOOL])
        assert (await gateway.end()).status_code == 200
    episode = await gateway.only()
    assert [node.message.content for node in episode.sampled()] == ["answer 1", "answer 3"]
    assert title["content"] not in trained(episode)
    assert [kind_of(node) for node in episode.nodes if node.message.content == title["content"]] == [SIDE]
    assert not any(node.metadata.get("history_rewritten") for node in episode.nodes)


@pytest.mark.parametrize("kind", ["recorded", "searched"])
async def test_a_title_that_was_asked_for_before_the_first_tools_is_no_turn(tmp_path: Path, kind: str) -> None:
    async with world(tmp_path) as gateway:
        if kind == "searched":
            await gateway.http.post("/session", json={"session": "s", "task": "mend it"})
        title = await gateway.say(user("A title for `mend it`?"), model="small")
        topic = await gateway.say(SYSTEM, user("A topic for `mend it`?"), model="small")
        mine = {"role": "system", "content": "You mend code."}
        first = await gateway.say(mine, user("mend it"), tools=[TOOL])
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "1"}
        last = await gateway.say(mine, user("mend it"), first, result, tools=[TOOL])
        assert (await gateway.end()).status_code == 200
    (episode,) = [each for each in await gateway.stored() if each.task.id == "s"]
    kinds = {node.message.content: kind_of(node) for node in episode.nodes if node.sampled}
    turns = [first["content"], last["content"]]
    assert kinds == {title["content"]: SIDE, topic["content"]: SIDE, **dict.fromkeys(turns, TURN)}
    assert title["content"] not in trained(episode) and topic["content"] not in trained(episode)
    assert (episode.task.instruction, episode.policy.base_model, episode.tools) == ("mend it", "policy", (TOOL,))
    assert not any(node.metadata.get("history_rewritten") for node in episode.sampled())
    assert [node.message.content for node in episode.sampled()] == turns
    assert [node.metadata.get("tools") for node in episode.nodes if node.sampled] == [[], [], None, None]


async def test_a_conversation_that_got_its_tools_later_is_one_episode(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway:
        plan = await gateway.say(SYSTEM, user("make a plan"))
        await gateway.say(SYSTEM, user("make a plan"), plan, user("do it"), tools=[TOOL])
        assert (await gateway.end()).status_code == 200
    assert [node.message.content for node in (await gateway.only()).sampled()] == ["answer 1", "answer 2"]


async def test_only_the_choice_that_the_client_used_was_acted_on(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway:
        body = (await gateway.ask(SYSTEM, user("one"), n=3)).json()
        second = body["choices"][1]["message"]
        await gateway.say(SYSTEM, user("one"), second, user("two"))
        await gateway.say(SYSTEM, user("so far: one and two"))
        assert (await gateway.end()).status_code == 200
    episode = await gateway.only()
    assert [node.message.content for node in episode.sampled()] == ["answer 2", "answer 4", "answer 5"]


async def test_an_answer_that_the_client_asked_for_again_was_not_acted_on(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway:
        await gateway.say(SYSTEM, user("one"))
        again = await gateway.say(SYSTEM, user("one"))
        await gateway.say(SYSTEM, user("one"), again, user("two"))
        await gateway.say(SYSTEM, user("summary"))
        assert (await gateway.end()).status_code == 200
    episode = await gateway.only()
    assert [node.message.content for node in episode.sampled()] == ["answer 2", "answer 3", "answer 4"]

"""What the calls of a session become in the store, also where the client condenses its history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from gateway_world import SYSTEM, TOOL, Model, prompt_ids, stored, streamed, user, world
from wire_shapes import MESSAGES, STREAMS

from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, reasoning_of
from openhands_rl_plugin.core.types import CONDENSATION, SIDE, TURN, SamplingParams, Trajectory, kind_of
from openhands_rl_plugin.training.algorithms import is_sampled_off_policy, samples_of
from openhands_rl_plugin.trajectories.drift import Cause, breaks_of

pytestmark = pytest.mark.contract


async def test_several_answers_are_siblings_and_the_conversation_goes_on_below_the_chosen_one(tmp_path: Path):
    async with world(tmp_path) as gateway:
        answers = (await gateway.ask(user("one"), n=3)).json()["choices"]
        history = [user("one"), answers[1]["message"], user("two")]
        await gateway.chat(*history)
    trajectory = await gateway.only()
    siblings = [index for index, node in enumerate(trajectory.nodes) if node.sampled and node.parent == 0]
    assert [trajectory.nodes[index].message.content for index in siblings] == ["answer 1", "answer 2", "answer 3"]
    assert [message.content for message in trajectory.messages()] == ["one", "answer 2", "two", "answer 4"]
    ids = [token for node in trajectory.sampled() if node.tokens for token in node.tokens.prompt_ids]
    assert len(ids) < len(prompt_ids(history)), "the second prompt extends the first"
    assert [trajectory.nodes[index].reward for index in siblings] != [0.0, 0.0, 0.0]
    assert trajectory.usage.calls == 2


async def test_ids_that_are_none_are_left_out(tmp_path: Path) -> None:
    odd = (None, [1, -2], [1.5], ["]", 2], [2**40], 7)

    async def behave(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({**model.completion(body), "prompt_token_ids": odd[int(body["user"])]})

    model = Model(behave=behave)
    async with world(tmp_path, model) as gateway:
        for at in range(len(odd)):
            answer = await gateway.chat(user("one"), session=f"{at}", user=f"{at}")
            await gateway.chat(user("one"), answer, user("two"), session=f"{at}", user=f"{at}")
    trajectories = await gateway.stored()
    assert [len(each.nodes) for each in trajectories] == [4] * len(odd)
    assert all(node.tokens is None for each in trajectories for node in each.nodes)


async def test_text_that_looks_like_ids_stays_text(tmp_path: Path) -> None:
    trap = 'say "prompt_token_ids":[1,2] and \\"prompt_token_ids\\": [3]'

    async def parrot(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response(model.completion(body, {"role": "assistant", "content": trap}))

    model = Model(behave=parrot)
    async with world(tmp_path, model) as gateway:
        for asked in ({}, {"return_token_ids": True}):
            response = await gateway.ask(user("one"), **asked)
            assert response.json()["choices"][0]["message"]["content"] == trap
            assert ("prompt_token_ids" in response.json()) == bool(asked)
    assert {node.message.content for node in (await gateway.only()).nodes} == {"one", trap}


async def test_session_ends_with_a_reward(tmp_path: Path):
    async with world(tmp_path) as gateway:
        await gateway.chat(user("one"), session="a")
        await gateway.chat(user("one"), session="b")
        ended = (await gateway.end("a", success=True, evidence={"tests": 3})).json()
        assert ended["ended"] and ended["scored"]
        assert (await gateway.end("b", reward=0.25)).json()["scored"]
        assert (await gateway.end("nobody")).status_code == 404
        assert (await gateway.end("a", rewrad=1)).status_code == 400
        later = (await gateway.end("a", reward=0.5)).json()
        assert later["trajectory_id"] == ended["trajectory_id"] and not later["ended"]
        for _ in range(2):  # a session that comes back after its end is a new episode
            await gateway.chat(user("one"), session="c")
            await gateway.end("c")
    episodes = await stored(tmp_path)
    assert len({trajectory.id for trajectory, _ in episodes}) == 4
    found = {trajectory.task.id: (trajectory, scores) for trajectory, scores in episodes}
    trajectory, scores = found["a"]
    assert [score.reward for score in scores] == [1.0, 0.5] and scores[0].detail == {"success": True}
    assert trajectory.evidence == {"tests": 3, "success": True, "ended_by": "client"}
    assert [score.reward for score in found["b"][1]] == [0.25]


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, **NEUTRAL_PARAMETERS}


async def test_what_a_request_leaves_open_is_sampled_neutrally_and_its_own_values_stand(tmp_path: Path) -> None:
    asked = [{}, {"temperature": None, "top_k": None}, {"temperature": 0.4, "min_p": 0.1}]
    async with world(tmp_path) as gateway:
        for at, own in enumerate(asked):
            assert (await gateway.ask(user("one"), session=f"{at}", stream=at == 2, **own)).status_code == 200
    for own, body, episode in zip(asked, gateway.model.bodies, await gateway.stored(), strict=True):
        given = {name: value for name, value in own.items() if value is not None}
        assert {name: body[name] for name in NEUTRAL} == {**NEUTRAL, **given}
        node = episode.nodes[1]
        assert node.sampling == SamplingParams.model_validate({**NEUTRAL, **given})
        assert node.metadata["request"] == given, "what the client asked for"
        assert is_sampled_off_policy(node.sampling) == ("min_p" in given)


SUMMARY = "The files were looked at and the first test passes."


def trained(trajectory: Trajectory) -> str:
    """The text of all trained tokens: those of the model are bytes, and marks."""
    return "".join(
        chr(token) if token < 256 else ""
        for sample in samples_of(trajectory)
        for token, on in zip(sample.input_ids, sample.mask, strict=True)
        if on
    )


async def summing_up(request: web.Request, body: dict) -> web.StreamResponse | None:
    _, found, number = body["messages"][-1]["content"].partition("sum up: ")
    summary = {"role": "assistant", "content": f"{SUMMARY} {number}"}
    return web.json_response(Model().completion({**body, "tools": None}, summary)) if found else None


@pytest.mark.parametrize("tools", [[TOOL], None], ids=["tools", "text"])
async def test_every_turn_of_a_condensed_session_is_trained_and_no_summary(tmp_path: Path, tools: list | None) -> None:
    async with world(tmp_path, Model(behave=summing_up)) as gateway:
        asked = {"tools": tools} if tools else {}
        history, turns = [SYSTEM, user("mend it")], []
        for number in range(6):
            answer = await gateway.chat(*history, **asked)
            turns.append(answer["content"])
            calls = answer.get("tool_calls")
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": f"done {number}"} if calls else None
            history += [answer, result or user(f"done {number}")]
            if number in (2, 4):
                summary = await gateway.chat(user(f"sum up: {len(history)}"))
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


@pytest.mark.parametrize("kind", ["recorded", "searched"])
async def test_a_title_that_was_asked_for_before_the_first_tools_is_no_turn(tmp_path: Path, kind: str) -> None:
    async with world(tmp_path) as gateway:
        if kind == "searched":
            await gateway.http.post("/session", json={"session": "s", "task": "mend it"})
        title = await gateway.chat(user("A title for `mend it`?"), model="small")
        topic = await gateway.chat(SYSTEM, user("A topic for `mend it`?"), model="small")
        mine = {"role": "system", "content": "You mend code."}
        first = await gateway.chat(mine, user("mend it"), tools=[TOOL])
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "1"}
        last = await gateway.chat(mine, user("mend it"), first, result, tools=[TOOL])
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


def answer(name: str, given: Any) -> dict[str, Any]:
    choice = {"index": 0, name: given, "finish_reason": None if name == "delta" and given else "stop"}
    return {"id": "c1", "model": "m", "error": None, "choices": [choice], "usage": None}


async def test_answers_streams_and_the_histories_that_repeat_them(tmp_path: Path) -> None:
    meant = {f"whole {name}": each for name, each in MESSAGES.items()}
    meant |= {f"stream {name}": each for name, each in STREAMS.items()}
    asked = [given for given, _, _ in meant.values() for _ in range(2)]

    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        given = asked.pop(0)
        if isinstance(given, list):
            return await streamed(request, [answer("delta", delta) for delta in (*given, None)])
        return web.json_response(answer("message", {"role": "assistant", **given}))

    async with world(tmp_path, Model(behave=behave)) as gateway:
        for name, (given, _, _) in meant.items():
            repeated = {"content": "Hi"} if (stream := isinstance(given, list)) else given
            await gateway.ask(user("one"), session=name, stream=stream)
            await gateway.ask(user("one"), {"role": "assistant", **repeated}, user("two"), session=name, stream=stream)
            await gateway.end(session=name)
    stored = await gateway.stored()
    assert {trajectory.task.id for trajectory in stored} == set(meant)
    for trajectory in stored:
        given, reply, reasoning = meant[trajectory.task.id]
        first, last = trajectory.nodes[1], trajectory.nodes[-1]
        assert (first.message, reasoning_of(first), last.message) == (reply, reasoning, reply), trajectory.task.id
        assert isinstance(given, list) or [node.sampled for node in trajectory.nodes] == [False, True, False, True]

"""What a session's calls become in the store."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from gateway_world import SYSTEM, TOOL, Model, prompt_ids, sampled_ids, stored, user, world

from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS
from openhands_rl_plugin.core.types import PolicyRef, SamplingParams, StopReason, Trajectory
from openhands_rl_plugin.training.data.batch import is_sampled_off_policy, samples_of

pytestmark = pytest.mark.contract


def ids_along(trajectory: Trajectory, leaf: int | None = None) -> list[int]:
    """All tokens from the start of the last segment on the path to its end."""
    ids: list[int] = []
    for node in trajectory.sampled(leaf):
        assert node.tokens is not None
        ids = (ids if node.tokens.extends else []) + [*node.tokens.prompt_ids, *node.tokens.sampled_ids]
    return ids


async def test_turns_that_go_on_are_one_path_of_deltas(tmp_path: Path):
    async with world(tmp_path) as gateway:
        history = [SYSTEM, user("one")]
        for text in ("two", "three", "four"):
            answer = await gateway.say(*history, tools=[TOOL], temperature=0.7, max_tokens=9, seed=4)
            result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": text}
            history = [*history, answer, result]
        last = await gateway.say(*history, tools=[TOOL])
        assert (await gateway.end()).json()["ended"] is True
    trajectory = await gateway.only()
    assert [message.role for message in trajectory.messages()] == [*(each["role"] for each in history), "assistant"]
    assert len(trajectory.nodes) == len(history) + 1
    times = [node.at or 0.0 for node in trajectory.nodes]
    assert trajectory.times.started <= times[0] and times == sorted(times) and times[-1] <= time.time()
    first, *others = trajectory.sampled()
    assert first.tokens and not first.tokens.extends
    assert all(node.tokens and node.tokens.extends and len(node.tokens.prompt_ids) < 60 for node in others)
    assert ids_along(trajectory) == prompt_ids(history) + sampled_ids(last)
    assert all(node.tokens and len(node.tokens.logprobs) == len(node.tokens.sampled_ids) for node in [first, *others])
    sampling = first.sampling
    assert sampling and (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.7, 9, 4)
    assert first.policy == PolicyRef(base_model="policy")
    task = trajectory.task
    assert (task.id, task.environment, task.instruction, trajectory.tools) == ("s", "gateway", "one", (TOOL,))
    assert trajectory.usage.calls == 4 and trajectory.usage.completion_tokens == 20
    assert trajectory.stop is StopReason.TERMINATED and trajectory.evidence == {"ended_by": "client"}


async def test_a_recorded_session_can_be_trained_on(tmp_path: Path):
    async with world(tmp_path) as gateway:
        history = [user("one")]
        for text in ("two", "three"):
            history = [*history, await gateway.say(*history), user(text)]
        last = await gateway.say(*history)
    (sample,) = samples_of(await gateway.only())
    assert list(sample.input_ids) == prompt_ids(history) + sampled_ids(last)
    assert sum(sample.mask) == sum(len(sampled_ids(each)) for each in [*history, last] if each["role"] == "assistant")


async def test_several_answers_are_siblings_and_the_conversation_goes_on_below_the_chosen_one(tmp_path: Path):
    async with world(tmp_path) as gateway:
        answers = (await gateway.ask(user("one"), n=3)).json()["choices"]
        history = [user("one"), answers[1]["message"], user("two")]
        await gateway.say(*history)
    trajectory = await gateway.only()
    siblings = [index for index, node in enumerate(trajectory.nodes) if node.sampled and node.parent == 0]
    assert [trajectory.nodes[index].message.content for index in siblings] == ["answer 1", "answer 2", "answer 3"]
    assert [message.content for message in trajectory.messages()] == ["one", "answer 2", "two", "answer 4"]
    assert ids_along(trajectory)[: len(prompt_ids(history))] == prompt_ids(history)
    assert [trajectory.nodes[index].reward for index in siblings] != [0.0, 0.0, 0.0]
    assert trajectory.usage.calls == 2


async def test_branches_side_by_side_keep_their_token_ids(tmp_path: Path):
    async def branch(number: int) -> None:
        history = [user(f"hello {number}")]
        for _ in range(5):
            history += [await gateway.say(*history), user("go on")]

    async with world(tmp_path) as gateway:
        await asyncio.gather(*map(branch, range(20)))
    assert [node.sampled for node in (await gateway.only()).nodes if node.tokens] == [True] * 100


async def test_a_condensed_history_is_a_branch_with_a_segment_of_its_own(tmp_path: Path):
    async with world(tmp_path) as gateway:
        answer = await gateway.say(SYSTEM, user("one"))
        summary = await gateway.say(user("sum up: one"))
        await gateway.say(SYSTEM, user(f"so far: {summary['content']}"))
        await gateway.say(SYSTEM, user("one"), answer, user("two"))
    trajectory = await gateway.only()
    texts = [[message.content for message in trajectory.messages(leaf)] for leaf in trajectory.leaves()]
    assert texts == [
        ["sum up: one", "answer 2"],
        ["be brief", "so far: answer 2", "answer 3"],
        ["be brief", "one", "answer 1", "two", "answer 4"],
    ]
    for leaf in trajectory.leaves():
        assert ids_along(trajectory, leaf)
    rewritten = [node.metadata.get("history_rewritten", False) for node in trajectory.nodes if node.sampled]
    assert rewritten == [False, True, True, True]


async def test_an_answer_repeated_in_another_form_is_still_the_sampled_one(tmp_path: Path):
    async with world(tmp_path) as gateway:
        answer = await gateway.say(user("one"), tools=[TOOL])
        call = answer["tool_calls"][0]
        respelled = {**call, "function": {**call["function"], "arguments": '{"command":"echo 1"}'}}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
        await gateway.say(user("one"), {**answer, "tool_calls": [respelled]}, result, tools=[TOOL])
        assert (await gateway.end()).status_code == 200
    trajectory = await gateway.only()
    assert len(trajectory.nodes) == 4
    noted = trajectory.nodes[1].metadata["replayed_as"]
    assert isinstance(noted, dict) and '{\\"command\\":\\"echo 1\\"}' in json.dumps(noted)
    second = trajectory.nodes[3].tokens
    assert second is not None and not second.extends
    assert trajectory.nodes[1].tokens is not None


async def test_a_message_that_the_model_never_said_is_not_taken_for_its_answer(tmp_path: Path):
    async with world(tmp_path) as gateway:
        await gateway.say(user("one"))
        await gateway.say(user("one"), {"role": "assistant", "content": "my own words"}, user("two"))
    trajectory = await gateway.only()
    assert [node.sampled for node in trajectory.nodes] == [False, True, False, False, True]
    assert [message.content for message in trajectory.messages()] == ["one", "my own words", "two", "answer 2"]


async def test_what_the_server_says_beside_the_message_is_kept(tmp_path: Path):
    async def think(request: web.Request, body: dict[str, Any]) -> web.Response:
        answer = model.completion(body)
        answer["choices"][0]["message"]["reasoning_content"] = "hmm"
        return web.json_response({**answer, "system_fingerprint": "f1"})

    model = Model(behave=think)
    async with world(tmp_path, model) as gateway:
        assert (await gateway.say(user("one"), top_k=3, user="me"))["reasoning_content"] == "hmm"
    metadata = (await gateway.only()).nodes[1].metadata
    assert metadata["message"] == {"reasoning_content": "hmm"}
    assert metadata["request"] == {"top_k": 3}
    assert metadata["response"]["system_fingerprint"] == "f1" and metadata["response"]["usage"]["prompt_tokens"]
    assert "prompt_token_ids" not in json.dumps(metadata)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": None},
        {"prompt_token_ids": [1, -2]},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": ["]", 2]},
        {"prompt_token_ids": [2**40]},
        {"prompt_token_ids": 7},
    ],
    ids=str,
)
async def test_ids_that_are_none_are_left_out(tmp_path: Path, change: dict[str, Any]):
    async def odd(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({**model.completion(body), **change})

    model = Model(behave=odd)
    async with world(tmp_path, model) as gateway:
        response = await gateway.ask(user("one"))
        assert response.status_code == 200 and response.json()["choices"][0]["message"]["content"] == "answer 1"
        await gateway.say(user("one"), response.json()["choices"][0]["message"], user("two"))
    trajectory = await gateway.only()
    assert len(trajectory.nodes) == 4 and all(node.tokens is None for node in trajectory.nodes)


async def test_ids_may_stand_where_litellm_puts_them_and_be_written_with_spaces(tmp_path: Path):
    async def litellm(request: web.Request, body: dict[str, Any]) -> web.Response:
        answer = model.completion(body)
        choice = answer["choices"][0]
        choice["provider_specific_fields"] = {"token_ids": choice.pop("token_ids")}
        return web.Response(text=json.dumps(answer, indent=1), content_type="application/json")

    model = Model(behave=litellm)
    async with world(tmp_path, model) as gateway:
        answer = await gateway.say(user("one"))
        history = [user("one"), {"role": "assistant", "content": answer["content"]}, user("two")]
        last = await gateway.say(*history)
    trajectory = await gateway.only()
    assert [node.tokens.extends for node in trajectory.nodes if node.tokens] == [False, True]
    assert ids_along(trajectory) == prompt_ids(history) + sampled_ids(last)


async def test_text_that_looks_like_ids_stays_text(tmp_path: Path):
    trap = 'say "prompt_token_ids":[1,2] and \\"prompt_token_ids\\": [3]'

    async def parrot(request: web.Request, body: dict[str, Any]) -> web.Response:
        answer = model.completion(body)
        answer["choices"][0]["message"]["content"] = trap
        return web.json_response(answer)

    model = Model(behave=parrot)
    async with world(tmp_path, model) as gateway:
        for asked in ({}, {"return_token_ids": True}):
            response = await gateway.ask(user("one"), **asked)
            assert response.json()["choices"][0]["message"]["content"] == trap
            assert ("prompt_token_ids" in response.json()) == bool(asked)
    assert {node.message.content for node in (await gateway.only()).nodes} == {"one", trap}


async def test_ids_in_places_that_nobody_knows_are_passed_on_and_the_others_recorded(tmp_path: Path):
    async def odd(request: web.Request, body: dict[str, Any]) -> web.Response:
        answer = model.completion(body)
        answer["usage"]["token_ids"] = [7, 8]
        answer["provider_specific_fields"] = {"prompt_token_ids": answer["prompt_token_ids"], "speed": 3}
        return web.json_response(answer)

    model = Model(behave=odd)
    async with world(tmp_path, model) as gateway:
        response = (await gateway.ask(user("one"))).json()
    assert response["usage"]["token_ids"] == [7, 8]
    trajectory = await gateway.only()
    assert ids_along(trajectory) == prompt_ids([user("one")]) + sampled_ids(response["choices"][0]["message"])
    told = trajectory.nodes[1].metadata["response"]
    assert isinstance(told, dict) and told["provider_specific_fields"] == {"speed": 3}
    assert isinstance(told["usage"], dict) and told["usage"]["token_ids"] == [7, 8]


async def test_session_ends_with_a_reward(tmp_path: Path):
    async with world(tmp_path) as gateway:
        await gateway.say(user("one"), session="a")
        await gateway.say(user("one"), session="b")
        ended = (await gateway.end("a", success=True, evidence={"tests": 3})).json()
        assert ended["ended"] and ended["scored"]
        assert (await gateway.end("b", reward=0.25)).json()["scored"]
        assert (await gateway.end("nobody")).status_code == 404
        assert (await gateway.end("a", rewrad=1)).status_code == 400
        later = (await gateway.end("a", reward=0.5)).json()
        assert later["trajectory_id"] == ended["trajectory_id"] and not later["ended"]
    found = {trajectory.task.id: (trajectory, scores) for trajectory, scores in await stored(tmp_path)}
    trajectory, scores = found["a"]
    assert [score.reward for score in scores] == [1.0, 0.5] and scores[0].detail == {"success": True}
    assert trajectory.evidence == {"tests": 3, "success": True, "ended_by": "client"}
    assert [score.reward for score in found["b"][1]] == [0.25]


async def test_a_session_that_comes_back_after_its_end_is_a_new_episode(tmp_path: Path):
    async with world(tmp_path) as gateway:
        for _ in range(3):
            await gateway.say(user("one"))
            await gateway.end()
    trajectories = await gateway.stored()
    assert len({trajectory.id for trajectory in trajectories}) == 3
    assert {trajectory.task.id for trajectory in trajectories} == {"s"}


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, **NEUTRAL_PARAMETERS}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own", [{}, {"temperature": None, "top_k": None}, {"temperature": 0.4, "min_p": 0.1}])
async def test_what_a_request_leaves_open_is_sampled_neutrally_and_its_own_values_stand(
    tmp_path: Path, own: dict[str, Any], stream: bool
):
    async with world(tmp_path) as gateway:
        assert (await gateway.ask(user("one"), stream=stream, **own)).status_code == 200
        assert (await gateway.end()).json()["ended"] is True
    given = {name: value for name, value in own.items() if value is not None}
    (body,) = gateway.model.bodies
    assert {name: body[name] for name in NEUTRAL} == {**NEUTRAL, **given}
    node = (await gateway.only()).nodes[1]
    assert node.sampling == SamplingParams.model_validate({**NEUTRAL, **given})
    assert node.metadata["request"] == given, "what the client asked for"
    assert is_sampled_off_policy(node.sampling) == ("min_p" in given)


async def test_the_servers_own_defaults_are_left_to_it_where_the_user_says_so(tmp_path: Path):
    async with world(tmp_path, sampling_defaults="model") as gateway:
        await gateway.say(user("one"), top_p=0.5)
    (body,) = gateway.model.bodies
    assert not {"temperature", *NEUTRAL_PARAMETERS} & {*body}
    assert (await gateway.only()).nodes[1].sampling == SamplingParams(top_p=0.5)


async def test_a_server_that_knows_no_top_k_is_asked_again_without(tmp_path: Path):
    async def plain(request: web.Request, body: dict[str, Any]) -> web.Response | None:
        said = {"error": {"message": "Unrecognized request argument supplied: top_k"}}
        return web.json_response(said, status=400) if "top_k" in body else None

    async with world(tmp_path, Model(behave=plain)) as gateway:
        await gateway.say(user("one"))
        await gateway.say(user("one"), {"role": "assistant", "content": "answer 1"}, user("two"))
        refused = await gateway.ask(user("three"), top_k=4)
    assert ["top_k" in body for body in gateway.model.bodies] == [True, False, False, True, True]
    assert refused.status_code == 400, "what a client asks for is its own to be refused"
    first = next((await gateway.only()).sampled())
    assert first.sampling == SamplingParams() and first.tokens is not None

"""NeMo Gym's protocol, against servers on real sockets that know an episode by its cookie."""

from __future__ import annotations

from typing import Any

import pytest
from nemo_gym_wire import counter
from raw_server import raw_server, respond

from openhands_rl_plugin.contrib.environments.nemo_gym import NeMoGymClient, NeMoGymOptions
from openhands_rl_plugin.core.errors import BadEnvironmentError, EpisodeError, InfrastructureError
from openhands_rl_plugin.core.types import Message, Task
from openhands_rl_plugin.testing import check_environment

GOOD = {"observation": "What is 2 + 2?", "info": {}}
COOKIE = "set-cookie: Env___game=abc.def; path=/; Max-Age=1209600; httponly; samesite=lax\r\n"


def task(**data: Any) -> Task:
    return Task(id="t", environment="nemo-gym/counter", instruction="Count.", data={"idx": 4, **data})


def client(url: str, **options: Any) -> NeMoGymClient:
    given = {"base_url": url, "timeout": 5, "retries": 1, "backoff": 0.01, **options}
    return NeMoGymClient(NeMoGymOptions.model_validate(given))


def said(action: str) -> Message:
    return Message(role="assistant", content=f"Action: {action}")


async def test_an_episode_keeps_its_cookie_and_its_row():
    row = {"responses_create_params": {"input": [{"role": "user", "content": "Deal me in."}]}, "seed": 9, "level": 2}
    async with counter() as server:
        player = client(server.url)
        opening = await player.reset(task(row=row))
        assert opening.messages[1].content == "Deal me in.\n\nstart of 9"
        steps = [await player.step(said(f"go {at}")) for at in range(3)]
        evidence = await player.evidence()
        await player.close()
    assert [each.messages[0].content for each in steps] == ["go 0 is number 1", "go 1 is number 2", "(no observation)"]
    assert [each.terminated for each in steps] == [False, False, True] and evidence["return"] == 1.0
    assert len(server.counts) == 1
    assert all({name: body[name] for name in row} == row for _, body in server.bodies)
    response = server.bodies[1][1]["response"]
    assert response["object"] == "response" and response["output"][0]["role"] == "assistant"


async def test_it_conforms_and_its_forks_have_sessions_of_their_own():
    async with counter() as server:
        await check_environment(lambda: client(server.url), task(), actions=["Action: a", "Action: b"])
        player = client(server.url)
        await player.reset(task())
        await player.step(said("one"))
        twin = await player.fork()
        for each in (twin, player):
            assert (await each.step(said("two"))).messages[0].content == "two is number 2"
            await each.close()


async def test_a_server_that_verifies_plays_one_turn():
    row = {"responses_create_params": {"input": "What is 6 x 7?"}, "expected_answer": "42"}
    async with counter(verifies=True) as server:
        for answer, reward in [("42", 1.0), ("41", 0.0)]:
            player = client(server.url, react_format=False)
            assert (await player.reset(task(row=row))).messages[1].content == "What is 6 x 7?"
            last = await player.step(Message(role="assistant", content=answer))
            assert (last.reward, last.terminated) == (reward, True)
            await player.close()
    assert [path for path, _ in server.bodies] == ["/seed_session", "/verify"] * 2


STEP = {"observation": "o", "reward": 0.0, "terminated": False, "truncated": False, "info": {}}


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        pytest.param(None, InfrastructureError, "broke during /step", id="dies"),
        pytest.param(respond("KeyError('x')", status="500 Oops"), InfrastructureError, "KeyError", id="500"),
        pytest.param(respond({"detail": []}, status="422 No"), BadEnvironmentError, "422", id="422"),
        pytest.param(respond({"error": "lost"}), BadEnvironmentError, "no 'reward'", id="error in 200"),
        pytest.param(respond({**STEP, "reward": None}), BadEnvironmentError, "'reward'", id="no reward"),
        pytest.param(respond({**STEP, "observation": 5}), BadEnvironmentError, "'observation'", id="number"),
    ],
)
async def test_misbehaves(answer: bytes | None, kind: type[EpisodeError], words: str):
    known = {"/openapi.json": respond({"paths": {"/reset": {}}}), "/reset": respond(GOOD, extra=COOKIE)}
    async with raw_server(lambda path, body: known.get(path, answer)) as server:
        player = client(server.url)
        await player.reset(task())
        with pytest.raises(kind, match=words):
            await player.step(said("4"))
        assert (await player.evidence())["steps"] == 0
        await player.close()
    assert server.paths() == ["/openapi.json", "/reset", "/step"], "a step is never repeated"

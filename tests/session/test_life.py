"""How sessions begin, come back and end; keys, adapters, bounds, and a gateway that is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from gateway_world import SYSTEM, TOOL, Body, Model, prompt_ids, sampled_ids, serving, stored, user, world
from tiny_model import write_adapter, write_model

from openhands_rl_plugin.core.types import SIDE, TURN, StopReason, Trajectory, kind_of
from openhands_rl_plugin.models.adapters.store import AdapterStore

SECRET = "sk-proj-" + "Ab3" * 14


def contents(trajectory: Trajectory) -> list[str | None]:
    return [message.content for message in trajectory.messages()]


@asynccontextmanager
async def gateway_process(*options: str, **environment: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """``openhands-rl gateway`` as a user starts it, and its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "openhands_rl_plugin.cli", "gateway", "--port", "0", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        printed = ""
        async with asyncio.timeout(30):
            while (found := re.search(r"base_url: (\S+)/v1 ", printed)) is None:
                line = await process.stdout.readline()
                assert line, printed
                printed += line.decode()
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def post(url: str, *messages: Body, session: str = "s", **body: Any) -> Body:
    sent = {"model": "policy", "messages": list(messages), **body}
    async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
        response = await http.post(f"{url}/session/{session}/v1/chat/completions", json=sent)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


async def test_a_killed_gateway_loses_no_answer_and_a_new_one_goes_on(tmp_path: Path):
    model = Model()
    async with serving(model) as upstream:
        options = ("--upstream", upstream, "--store", str(tmp_path))
        async with gateway_process(*options) as (process, url):
            history: list[Body] = [SYSTEM, user("one")]
            for text in ("two", "three"):
                history += [await post(url, *history), user(text)]
            await asyncio.gather(*(post(url, user(f"hello {number}"), session=f"p{number}") for number in range(7)))
            async with httpx.AsyncClient(trust_env=False) as http:
                assert (await http.post(f"{url}/session", json={"session": "p7"})).status_code == 201
            await post(url, user("one"), session="p7", tools=[TOOL])
            await post(url, user("A title?"), session="p7")
            title = await post(url, user("A title?"), session="late")
            first = await post(url, SYSTEM, user("one"), session="late", tools=[TOOL])
            process.kill()
            await process.wait()
        found = {trajectory.task.id: trajectory for trajectory, _ in await stored(tmp_path)}
        assert set(found) == {"s", "late", *(f"p{number}" for number in range(8))}
        assert all(trajectory.stop is StopReason.UNFINISHED for trajectory in found.values())
        assert contents(found["s"]) == [each["content"] for each in history[:-1]]
        assert sum(node.sampled for node in found["p7"].nodes) == 2
        async with gateway_process(*options) as (process, url):
            last = await post(url, *history)
            result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "1"}
            await post(url, SYSTEM, user("one"), first, result, session="late", tools=[TOOL])
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    after = {trajectory.task.id: trajectory for trajectory, _ in await stored(tmp_path)}
    assert after["s"].id == found["s"].id and len(after) == 10
    late = {node.message.content: kind_of(node) for node in after["late"].nodes if node.sampled}
    assert late.pop(title["content"]) == SIDE and set(late.values()) == {TURN} and len(late) == 2
    tokens = [node.tokens for node in after["s"].sampled() if node.tokens]
    ids = [id for each in tokens for id in (*each.prompt_ids, *each.sampled_ids)]
    assert ids == prompt_ids(history) + sampled_ids(last)
    assert contents(after["s"]) == [each["content"] for each in [*history, last]]
    assert [node.tokens.extends for node in after["s"].sampled() if node.tokens] == [False, True, True]
    assert all(trajectory.stop is StopReason.NO_ACTION for trajectory in after.values())


async def test_secrets_are_passed_on_but_never_stored(tmp_path: Path):
    tool = {"role": "tool", "tool_call_id": "c", "content": f"OPENAI_API_KEY={SECRET}\nHOME=/root"}
    async with world(tmp_path / "store") as gateway:
        headers = {"authorization": f"Bearer {SECRET}", "x-api-key": SECRET}
        response = await gateway.ask(user("one"), headers=headers, extra_body={"api_key": SECRET}, user=SECRET)
        assert response.status_code == 200 and SECRET not in response.text
        answer = response.json()["choices"][0]["message"]
        await gateway.chat(user("one"), answer, tool)
        assert (await gateway.end(evidence={"log": f"key {SECRET}"})).status_code == 200
    assert gateway.model.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert gateway.model.bodies[0]["user"] == SECRET and gateway.model.bodies[1]["messages"][-1] == tool
    ((trajectory, scores),) = await stored(tmp_path / "store")
    everything = trajectory.model_dump_json() + "".join(score.model_dump_json() for score in scores)
    assert SECRET not in everything and "[redacted]" in everything
    assert ",".join(map(str, SECRET.encode())) not in everything
    for file in (tmp_path / "store").iterdir():
        assert SECRET.encode() not in file.read_bytes()
        assert file.stat().st_mode & 0o077 == 0
    assert trajectory.nodes[1].tokens is not None and trajectory.nodes[-1].tokens is None


async def test_an_answer_that_cannot_be_stored_is_not_given(tmp_path: Path):
    file, away = tmp_path / "trajectories.sqlite", tmp_path / "away"
    async with world(tmp_path) as gateway:
        answer = await gateway.chat(user("one"))
        file.rename(away)
        refused = await gateway.ask(user("one"), answer, user("two"))
        away.rename(file)
        assert refused.status_code == 503 and "was deleted" in refused.json()["error"]["message"]
        last = await gateway.chat(user("one"), answer, user("two"))
        file.rename(away)
        assert (await gateway.end()).status_code == 503
        away.rename(file)
    trajectory = await gateway.only()
    assert trajectory.stop is StopReason.NO_ACTION, "the end is tried again"
    assert contents(trajectory) == ["one", "answer 1", "two", last["content"]]
    assert sum(node.sampled for node in trajectory.nodes) == 3


async def test_names_of_an_adapter_stand_for_its_current_version(tmp_path: Path) -> None:
    model, store = write_model(tmp_path / "tiny"), AdapterStore(tmp_path / "adapters")
    first, second = (
        store.create("shop", lambda path, seed=seed: write_adapter(path, model, seed=seed), base_model="tiny")
        for seed in (1, 2)
    )
    serving = {"model": "tiny", "adapters_path": str(store.root)}
    async with world(tmp_path / "store", served=serving, adapter="shop") as gateway:
        await gateway.chat(user("one"), model="latest", session="base")
        store.point(first)
        answer = await gateway.chat(user("one"), model="shop")
        store.point(second)
        await gateway.chat(user("one"), answer, user("two"), model="latest")
        streamed = await gateway.ask(user("one"), session="new", model="latest", stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
    assert [body["model"] for body in gateway.model.bodies] == ["tiny", first.name, second.name, second.name]
    found = {trajectory.task.id: trajectory for trajectory in await gateway.stored()}
    assert [node.policy.version for node in found["s"].sampled() if node.policy] == [1, 2]
    assert found["new"].policy.served_name == second.name and found["new"].policy.base_model == "tiny"
    assert found["base"].policy.served_name == "tiny"

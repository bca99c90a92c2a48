"""A gateway that divides new sessions between two versions, with scripted and embedded model servers."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import write_adapter
from worlds import Body, Model, user, world

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.models.gateway.traffic import Routing, TrafficSplit, read_routing, write_routing

STABLE, CANDIDATE = "shop-v000003", "shop-v000004"
NAMES = st.text(max_size=40)
SHARES = st.floats(0, 1)


def split(share: float) -> Routing:
    return Routing(stable=STABLE, candidate=CANDIDATE, share=share)


def lacks(*names: str) -> Model:
    async def refuse(request: web.Request, body: Body) -> web.Response | None:
        if body["model"] not in names:
            return None
        error = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "code": 404}
        return web.json_response({"error": error}, status=404)

    return Model(behave=refuse)


@given(NAMES, SHARES, SHARES)
def test_a_larger_share_takes_no_session_from_the_candidate(session: str, one: float, other: float):
    low, high = sorted((one, other))
    assert split(low).version_for(session) == split(low).version_for(session)
    if split(low).version_for(session) == CANDIDATE:
        assert split(high).version_for(session) == CANDIDATE


@given(NAMES)
def test_nobody_and_everybody_are_exact(session: str):
    assert split(0).version_for(session) == STABLE and split(1).version_for(session) == CANDIDATE
    assert Routing(stable=STABLE, share=1).version_for(session) == STABLE
    assert Routing().version_for(session) is None


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_shares_are_those_asked_for_whatever_the_names_look_like(share: float):
    n = 20_000
    bound = 5 * math.sqrt(share * (1 - share) / n)  # five standard deviations of a binomial share
    for form in ("{}", "session-{:08d}", "opening-{:x}"):
        found = sum(split(share).version_for(form.format(at)) == CANDIDATE for at in range(n)) / n
        assert abs(found - share) < bound
    # The sessions that try one candidate are not those that try the next.
    later = Routing(stable=STABLE, candidate="shop-v000005", share=share)
    both = sum(
        split(share).version_for(str(at)) == CANDIDATE and later.version_for(str(at)) != STABLE for at in range(n)
    )
    assert abs(both / n - share**2) < 5 * math.sqrt(share**2 / n)


async def test_new_sessions_follow_the_file_and_others_stay_through_changes_and_restarts(tmp_path: Path):
    file, store = tmp_path / "routing.json", tmp_path / "store"
    names = [f"s{at}" for at in range(24)]
    write_routing(file, split(0.5))
    expected = {name: split(0.5).version_for(name) for name in names}
    assert set(expected.values()) == {STABLE, CANDIDATE}
    async with world(store, routing=file, max_sessions=4) as gateway:
        for name in names:
            await gateway.say(user("one"), session=name)
        write_routing(file, Routing(stable="shop-v000009", candidate=CANDIDATE, share=0))
        for name in names:
            await gateway.say(user("one"), user("two"), session=name)
        await gateway.say(user("one"), session="new")
        assert [body["model"] for body in gateway.model.bodies] == [
            *expected.values(),
            *expected.values(),
            "shop-v000009",
        ]
    async with world(store, routing=file) as gateway:
        for name in names:
            await gateway.say(user("one"), user("three"), session=name)
        # Ended by its client, a name is that of a new session.
        await gateway.end("s0", success=True)
        await gateway.say(user("one"), session="s0")
        assert [body["model"] for body in gateway.model.bodies] == [*expected.values(), "shop-v000009"]
    for trajectory in await gateway.stored():
        expected.setdefault("new", "shop-v000009")
        served = {node.policy.served_name for node in trajectory.sampled() if node.policy}
        assert served in ({expected[trajectory.task.id]}, {"shop-v000009"})


async def test_a_version_that_the_server_lost_is_left_for_the_stable_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "routing.json"
    write_routing(file, split(1))
    with caplog.at_level(logging.WARNING):
        async with world(tmp_path / "a", lacks(CANDIDATE), routing=file) as gateway:
            for name in ("a", "b"):
                await gateway.say(user("one"), session=name)
                await gateway.say(user("one"), user("two"), session=name)
            streamed = await gateway.ask(user("one"), session="c", stream=True)
            assert streamed.text.endswith("data: [DONE]\n\n")
            served = {
                node.policy.served_name for each in await gateway.stored() for node in each.sampled() if node.policy
            }
            assert served == {STABLE}
        lines = [line for line in caplog.messages if "the model server has no" in line]
        assert lines == [f"the model server has no {CANDIDATE}: its sessions go on with {STABLE}"]
        async with world(tmp_path / "b", lacks(CANDIDATE, STABLE), routing=file) as gateway:
            await gateway.say(user("one"), model="tiny")
            assert gateway.model.bodies[-1]["model"] == "tiny"
        async with world(tmp_path / "c", lacks(CANDIDATE, STABLE, "tiny"), routing=file) as gateway:
            assert (await gateway.ask(user("one"), model="tiny")).status_code == 404


@pytest.mark.parametrize("content", ["", "{", "[]", '{"share": 2}', '{"stable": "tiny"}', '{"other": 1}', " " * 70_000])
async def test_a_file_that_cannot_be_used_changes_nothing(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "routing.json"
    write_routing(file, split(1))
    async with world(tmp_path / "store", routing=file) as gateway:
        file.write_text(content)
        for name in ("a", "b"):
            await gateway.say(user("one"), session=name)
        file.unlink()
        await gateway.say(user("one"), session="c")
        assert {body["model"] for body in gateway.model.bodies} == {CANDIDATE}
        write_routing(file, split(0))
        await gateway.say(user("one"), session="d")
        assert gateway.model.bodies[-1]["model"] == STABLE
    lines = [line for line in caplog.messages if "sessions are routed as before" in line]
    assert len(lines) == 2 and all("\n" not in line for line in lines)


def test_a_file_is_awaited_and_refused_when_it_is_wrong_from_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "routing.json"
    traffic = TrafficSplit(file)
    assert traffic.begin("a") is None
    write_routing(file, split(1))
    assert traffic.begin("a") == CANDIDATE and read_routing(file) == split(1)
    assert json.loads(file.read_text()) == {"stable": STABLE, "candidate": CANDIDATE, "share": 1.0}
    file.write_text('{"share": "much"}')
    with pytest.raises(ConfigError, match="share"):
        TrafficSplit(file)
    words = ["gateway", "--upstream", "http://127.0.0.1:9/v1", "--port", "0", "--store", str(tmp_path / "store")]
    assert cli.main([*words, "--routing", str(file)]) == 1
    assert "routing.json: share: " in capsys.readouterr().err


async def test_versions_of_the_embedded_server(tmp_path: Path, server: str, tiny_model: Path):
    file = tmp_path / "routing.json"
    options: dict[str, Any] = {"upstream": f"{server}/v1", "base_model": "tiny", "routing": file}
    async with httpx.AsyncClient(base_url=server) as admin:
        for name, seed in ((STABLE, 1), (CANDIDATE, 2)):
            path = write_adapter(tmp_path / name, tiny_model, seed=seed)
            await admin.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
        write_routing(file, split(1))
        async with world(tmp_path / "store", **options) as gateway:
            await gateway.say(user("one two"), session="a", model="tiny", max_tokens=4)
            await admin.post("/v1/unload_lora_adapter", json={"lora_name": CANDIDATE})
            await gateway.say(user("three"), session="a", model="tiny", max_tokens=4)
            write_routing(file, Routing())
            await gateway.say(user("one two"), session="b", model="tiny", max_tokens=4)
    found = {
        each.task.id: [node.policy.served_name for node in each.sampled() if node.policy]
        for each in await gateway.stored()
    }
    assert found == {"a": [CANDIDATE, STABLE], "b": ["tiny"]}

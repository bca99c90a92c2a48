"""Servers that misbehave, each on a real socket: the trajectory gets a typed failure, never a zero reward."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from one_episode import assert_failed, one_episode
from raw_server import raw_server, respond

from openhands_rl_plugin.core.types import FailureKind, Limits, Message, Task, Trajectory
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient

INFRASTRUCTURE, ENVIRONMENT = FailureKind.INFRASTRUCTURE, FailureKind.ENVIRONMENT
GOOD = {"state": "s", "reward": 0.25, "done": False}


async def play(url: str, *, timeout: float = 5, limits: Limits | None = None, **changes: Any) -> Trajectory:
    """One episode by AgentSession, of at most four turns."""
    options = HttpEnvironmentOptions(base_url=url, timeout=timeout, **changes)
    task = Task(id="t", environment="webshop", instruction="go", data={"idx": 0})
    return await one_episode(WebEnvClient(options), ["Action: go"] * 4, task, limits=limits or Limits(max_turns=4))


def on_step(answer: bytes | None, after: int = 0) -> Callable[[str, Any], bytes | None]:
    """Good answers to the reset and the first ``after`` steps, then ``answer``."""
    left = [after]

    def handler(path: str, body: Any) -> bytes | None:
        if path == "/reset" or left[0] > 0:
            left[0] -= path == "/step"
            return respond(GOOD)
        return answer

    return handler


async def test_absent():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        trajectory = await play(url)
    await assert_failed(trajectory, INFRASTRUCTURE, f"nothing answers at {url}", "openhands-rl env webshop", "env_port")
    assert trajectory.failure is not None and trajectory.failure.boundary == "environment.reset"
    assert trajectory.nodes == ()


@pytest.mark.parametrize("after", [0, 2])
async def test_dies_in_mid_episode(after: int):
    async with raw_server(on_step(None, after)) as server:
        trajectory = await play(server.url)
        await assert_failed(trajectory, INFRASTRUCTURE, "broke during /step", "still running")
    assert trajectory.episode_return == 0.25 * after, "what was earned before stays on the nodes"
    assert trajectory.evidence["steps"] == after
    assert server.paths().count("/step") == after + 1, "a step is never repeated"


HUGE = respond({"state": "x" * 5_000_000})
MOVED = respond("", status="302 Found", extra="location: http://10.0.0.1/\r\n")
BAD = "422 Unprocessable Entity"


@pytest.mark.parametrize("where", ["/reset", "/step"])
@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        pytest.param(respond("Traceback: boom", status="500 Oops"), INFRASTRUCTURE, ["500", "boom"], id="500"),
        pytest.param(respond({"detail": "field required"}, status=BAD), ENVIRONMENT, ["422", "required"], id="422"),
        pytest.param(respond("no such page", status="404 Not Found"), ENVIRONMENT, ["404", "address"], id="404"),
        pytest.param(MOVED, ENVIRONMENT, ["answered 302"], id="redirect"),
        pytest.param(respond("[" * 100_000), ENVIRONMENT, ["JSON"], id="deep JSON"),
        pytest.param(respond({"error": "no such id"}), ENVIRONMENT, ["no such id"], id="error in 200"),
        pytest.param(respond('{"state": "s", "reward": NaN}'), ENVIRONMENT, ["JSON"], id="NaN"),
        pytest.param(respond('{"state": "s", "reward": 1e999}'), ENVIRONMENT, ["'reward'", "finite"], id="1e999"),
        pytest.param(HUGE, ENVIRONMENT, ["4194304 bytes"], id="huge"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n\r\n", INFRASTRUCTURE, ["broke"], id="not HTTP"),
    ],
)
async def test_answers_nonsense(where: str, answer: bytes, kind: FailureKind, words: list[str]):
    handler = on_step(answer) if where == "/step" else (lambda path, body: answer)
    async with raw_server(handler) as server:
        trajectory = await play(server.url)
        await assert_failed(trajectory, kind, *words)
    assert trajectory.failure is not None and trajectory.failure.boundary == f"environment.{where[1:]}"
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


@pytest.mark.parametrize("missing", ["reward", "done"])
async def test_a_step_has_its_reward_and_whether_it_was_the_last(missing: str):
    answer = {name: value for name, value in GOOD.items() if name != missing}
    async with raw_server(on_step(respond(answer))) as server:
        await assert_failed(await play(server.url), ENVIRONMENT, f"no '{missing}'")


async def test_half_a_character_in_an_answer_is_replaced():
    async with raw_server(on_step(respond('{"state": "a \\ud800", "reward": 1, "done": true}'))) as server:
        assert (await play(server.url)).evidence["final_state"] == "a \ufffd"


async def test_what_arrives_while_a_connection_is_idle_answers_no_request():
    late = respond("too late", status="408 Request Timeout")
    async with raw_server(lambda path, body: respond(GOOD), late=late) as server:
        client = WebEnvClient(HttpEnvironmentOptions(base_url=server.url))
        await client.reset(Task(id="t", environment="webshop", data={"idx": 0}))
        await asyncio.sleep(0.2)
        assert (await client.step(Message(role="assistant", content="Action: go"))).reward == GOOD["reward"]
        await client.close()

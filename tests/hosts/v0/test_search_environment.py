"""Search inside OpenHands' controller, in forks of an environment behind a real server that counts what is asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openhands.core.config.extended_config import ExtendedConfig
from openhands.core.main import auto_continue_response, run_controller
from openhands.events.action import MessageAction
from scripted_model import ScriptedModel, says, serve
from small_shop import create_shop
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from openhands_rl_plugin import FileTrajectoryStorage
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.servers import listening, serving
from openhands_rl_plugin.core.types import JsonObject, StopReason, Trajectory
from openhands_rl_plugin.hosts.shared.sessions import TASK_INDEX_VARIABLE, HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import controller_config

LONGEST = 60
ENVIRONMENT_RUNTIME = "openhands_rl_plugin.hosts.v0.runtime.EnvironmentRuntime"


@dataclass
class CountedShop:
    """The embedded shop behind an application that notes every request: its path, its session, and what was sent."""

    port: int = 0
    requests: list[tuple[str, JsonObject]] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)

    def steps(self) -> Counter[str]:
        """Steps by session."""
        return Counter(str(body["session"]) for path, body in self.requests if path == "/step")

    def forks(self) -> int:
        """How often an episode was forked."""
        return sum(path == "/fork" for path, _ in self.requests)

    def closed(self) -> int:
        """How many episodes were closed."""
        return sum(path == "/close" for path, _ in self.requests)


@contextmanager
def counted_shop() -> Iterator[CountedShop]:
    shop, app = CountedShop(), create_shop()

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []

        async def heard() -> AsgiMessage:
            message = await receive()
            parts.append(message.get("body", b""))
            return message

        async def said(message: AsgiMessage) -> None:
            if scope["path"] == "/reset" and message.get("body"):
                shop.opened.append(str(json.loads(message["body"])["session"]))
            await send(message)

        await app(scope, heard, said)
        shop.requests.append((scope["path"], json.loads(b"".join(parts) or b"{}")))

    with listening("127.0.0.1", 0) as listener, serving(counting, listener, lifespan="off"):
        shop.port = listener.getsockname()[1]
        yield shop


@pytest.fixture
def shop() -> Iterator[CountedShop]:
    with counted_shop() as shop:
        yield shop


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


def shopper(body: dict[str, Any]) -> dict[str, Any]:
    """Searches for one thing or another, and clicks around."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    words = (
        ["search[soft cotton socks]", "search[red lamp]"] if turn == 0 else ["click[Next >]", "click[Back to Search]"]
    )
    return says(f"Thought: let me see.\nAction: {words[body['seed'] % 2]}")


def settings_for(server: ScriptedModel, shop: CountedShop, model: str, **more: Any) -> RLSettings:
    server.policies[model] = shopper
    serving = ServingSettings(base_url=server.url, model=model, request_timeout=20.0)
    own = {"max_turns": 3, "max_obs_length": LONGEST, "rollout_strategy": "MCTS", "env_port": shop.port}
    strategy = {"num_simulations": 10, "num_branches": 2, "depth": 3, "value": "none"}
    return RLSettings(serving=serving, **{**own, "strategy": strategy, **more})


def test_openhands_main_searches_in_forks_of_an_environment(
    server: ScriptedModel, shop: CountedShop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The way of ``python -m openhands.core.main``: nobody drives the episode, and it is stored by itself."""
    monkeypatch.setenv(TASK_INDEX_VARIABLE, "3")
    tree_of_thoughts = {"num_branches": 2, "depth": 2, "beam": 1, "value": "none", "temperature": 0.6}
    settings = settings_for(server, shop, "main", rollout_strategy="ToT", strategy=tree_of_thoughts)
    given = settings.model_dump(exclude={"serving"}, exclude_unset=True)
    config = controller_config(settings, HostOptions())
    config.runtime = ENVIRONMENT_RUNTIME
    config.extended = ExtendedConfig({"rl": {**given, "storage": {"path": str(tmp_path)}}})

    async def read() -> list[Trajectory]:
        async with FileTrajectoryStorage(tmp_path) as storage:
            return [trajectory async for trajectory, _ in storage.find()]

    said = MessageAction(content="Buy it.")
    asyncio.run(run_controller(config=config, initial_user_action=said, fake_user_response_fn=auto_continue_response))
    (trajectory,) = asyncio.run(read())
    assert (trajectory.task.id, trajectory.strategy.name) == ("webshop-3", "ToT")
    assert trajectory.failure is None and trajectory.stop is StopReason.MAX_TURNS
    (live,) = shop.opened
    assert shop.steps()[live] == trajectory.usage.steps == trajectory.evidence["steps"] == 3
    assert shop.closed() == shop.forks() + 1 > 3
    siblings = Counter(node.parent for node in trajectory.nodes if node.sampled)
    assert max(siblings.values()) == 2 and any(node.simulated for node in trajectory.nodes)
    assert {body["temperature"] for body in server.requests["main"]} == {0.6}

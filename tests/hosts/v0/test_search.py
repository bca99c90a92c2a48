"""Search in OpenHands' controller, in forks of workspaces and environments: what is executed, sent, recorded, left."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from controller_play import bash, play, settings_for, stored
from needs import needs_bubblewrap
from openhands.core.config.extended_config import ExtendedConfig
from openhands.core.main import auto_continue_response, run_controller
from openhands.core.schema import AgentState
from openhands.core.setup import create_runtime
from openhands.events import EventSource
from openhands.events.action import ChangeAgentStateAction, MessageAction
from openhands.runtime.base import Runtime
from openhands.utils.async_utils import call_async_from_sync
from scripted_model import ScriptedModel, call, prompt_ids, reply
from small_shop import create_shop
from starlette.types import Receive, Scope, Send

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.servers import listening, serving
from openhands_rl_plugin.core.types import FailureKind, Limits, Score, StopReason, Trajectory
from openhands_rl_plugin.hosts.shared.sessions import TASK_INDEX_VARIABLE, HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import controller_config

pytestmark = [pytest.mark.contract, needs_bubblewrap]

BY_PATCH = {"value": "reward", "value_options": {"reward": "test_search:PatchReward"}}
SLEEP = f"sleep 7{os.getpid()}"


class PatchReward:
    """1 when the workspace holds the right line, by the evidence of where the episode stands."""

    version = "patch-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        patch = str(trajectory.evidence.get("git_patch"))
        return Score(trajectory_id=trajectory.id, reward=float("+right" in patch), reward_version=self.version)


def running(command: str) -> bool:
    return bool(subprocess.run(["pgrep", "-f", f"^{command}"], capture_output=True).stdout)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No files of forks, but for what a process makes once and keeps while it lives, and no processes."""

    def left() -> set[str]:
        found = (path.name for path in Path(tempfile.gettempdir()).glob("openhands-rl-of-*/*"))
        return {name for name in found if not re.search("-etc-", name)}

    before = left()
    yield
    assert left() == before and not running(SLEEP)


def finish(id: str) -> dict[str, Any]:
    return reply(None, call("finish", {"message": "done"}, id))


def depth(body: dict[str, Any]) -> int:
    return sum(message["role"] == "assistant" for message in body["messages"])


def writer(body: dict[str, Any]) -> dict[str, Any]:
    """Looks, then writes the right line or a wrong one, then finishes; which one, and with what id, is the seed's."""
    seed, turn = body["seed"], depth(body)
    if turn == 0:
        return bash("pwd; cat answer.txt 2>&1; echo note >> /tmp/notes; wc -l < /tmp/notes", f"look{seed % 2}")
    if turn == 1:
        word = "right" if seed % 3 == 0 else f"wrong{seed % 3}"
        return bash(f"echo {word} > answer.txt", f"write{seed}")
    return finish(f"end{seed}")


def tree_of_thoughts(**options: Any) -> dict[str, Any]:
    return {"rollout_strategy": "ToT", "strategy": {**options, **BY_PATCH}}


@pytest.mark.shows("search in forks: MCTS, ToT")
async def test_mcts_executes_what_it_found_to_be_right(server: ScriptedModel):
    server.policies["writer"] = writer
    options = {"num_simulations": 8, "first_branches": 2, "num_branches": 3, "depth": 4, "parallel": 4, **BY_PATCH}
    trajectory = await play(server, "writer", rollout_strategy="MCTS", strategy=options, max_turns=6)
    assert trajectory.failure is None and trajectory.stop is StopReason.TERMINATED
    assert trajectory.strategy.options["num_simulations"] == 8
    assert "+right" in str(trajectory.evidence["git_patch"])
    assert trajectory.evidence["changed_files"] == {"answer.txt": "added"}
    acted = [trajectory.nodes[at] for at in trajectory.path() if trajectory.nodes[at].sampled]
    commands = [json.loads(node.message.tool_calls[0].arguments).get("command", "")[:4] for node in acted]
    assert commands[-2:] == ["echo", ""]
    tried = str([node.message.tool_calls for node in trajectory.nodes if node.sampled and node.simulated])
    assert "wrong1" in tried or "wrong2" in tried
    requests = server.requests["writer"]
    assert trajectory.usage.calls == len(requests), "everything that was sampled is counted"
    assert trajectory.usage.prompt_tokens == sum(len(prompt_ids(body["messages"])) for body in requests)


@pytest.mark.parametrize(
    ("native", "prompt"),
    [(True, "standard"), (False, "standard"), (False, "compact")],
    ids=["native tool calls", "calls in the text", "compact"],
)
async def test_a_branchs_prompt_is_the_one_that_comes_later(server: ScriptedModel, native: bool, prompt: str):
    """The same conversations are sent from branches and from the live session, to the letter and the token."""

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        answer = writer(body) if depth(body) != 1 else reply(f"I wonder {body['seed']}.")
        if native or not answer.get("tool_calls"):
            return answer
        one = answer["tool_calls"][0]["function"]
        risk = {"security_risk": "LOW"} if one["name"] == "execute_bash" else {}
        arguments = {**json.loads(one["arguments"]), **risk}
        lines = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
        return reply(f"Now.\n<function={one['name']}>\n{lines}</function>")

    name = f"same-{native}-{prompt}"
    server.policies[name] = policy
    own = {**tree_of_thoughts(num_branches=2, depth=2, beam=1), "workspace": {"prompt": prompt}, "max_turns": 3}
    trajectory = await play(server, name, options={"native_tool_calling": native}, **own)
    assert trajectory.failure is None
    sent = [body["messages"] for body in server.requests[name]]
    opening = next(messages for messages in sent if depth({"messages": messages}) == 0)
    assert all(messages[: len(opening)] == opening for messages in sent)
    nodes = trajectory.nodes
    first_prompt = next(node.parent for node in nodes if node.sampled)
    later = [at for at in trajectory.path() if nodes[at].sampled and nodes[at].parent != first_prompt]
    beside = [node for node in nodes if node.sampled and node.parent == nodes[later[0]].parent]
    assert len({node.metadata["step"] for node in beside}) == 2, "asked here in a branch, and then in the live session"
    assert len({(node.tokens.extends, node.tokens.prompt_ids) for node in beside if node.tokens}) == 1
    assert len(later) == 2 and (not native or all(nodes[at].tokens.extends for at in later if nodes[at].tokens))
    shown = [(node.parent, node.message) for node in nodes if not node.sampled]
    assert len(set(shown)) == len(shown), "what a branch is shown is what the live session is shown"


def judging(body: dict[str, Any]) -> dict[str, Any]:
    """Answers the question of ``value = "model"``, and acts otherwise."""
    return reply("Yes") if "Yes or No" in str(body["messages"][-1]["content"]) else writer(body)


@pytest.mark.parametrize("strategy", ["ToT", "BestOfN"])
async def test_the_others_do_without_forks(server: ScriptedModel, strategy: str):
    server.policies[f"plain-{strategy}"] = judging
    own = {"workspace": {"isolation": "none"}, "rollout_strategy": strategy}
    trajectory = await play(server, f"plain-{strategy}", max_turns=6, **own)
    assert trajectory.failure is None and trajectory.stop is StopReason.TERMINATED
    assert not any(node.simulated for node in trajectory.nodes)
    values = [node.value for node in trajectory.nodes if node.sampled]
    assert all(value is not None for value in values) and len(values) > trajectory.usage.steps
    with pytest.raises(ConfigError, match="needs an environment that can fork"):
        await play(server, "r", **own, strategy={"value": "rollout"})


async def test_while_background_processes_run_a_value_that_needs_no_forks_judges_without(server: ScriptedModel):
    def policy(body: dict[str, Any]) -> dict[str, Any]:
        if depth(body) or "Yes or No" in str(body["messages"][-1]["content"]):
            return judging(body)
        return bash("sleep 300 & until pgrep -x sleep; do :; done", "go")

    server.policies["background"] = policy
    trajectory = await play(server, "background", rollout_strategy="BestOfN", max_turns=6)
    assert trajectory.failure is None and trajectory.stop is StopReason.TERMINATED
    acted = [trajectory.nodes[at] for at in trajectory.path() if trajectory.nodes[at].sampled]
    reports = [str(node.metadata["search"]) for node in acted]
    assert ["without_forks" in report for report in reports] == [False, True, True]
    assert "cannot be forked while processes run in it (sleep)" in reports[1]


def standalone(server: ScriptedModel, folder: Path, model: str, runtime: str = "", **settings: Any) -> Any:
    """OpenHands' configuration for ``run_controller``: nobody drives the episode, and it is stored by itself."""
    made = settings_for(server, model, **settings)
    config = controller_config(made, HostOptions(environment_mode=bool(runtime)))
    config.runtime = runtime or config.runtime
    given = made.model_dump(exclude={"serving"}, exclude_unset=True)
    config.extended = ExtendedConfig({"rl": {**given, "storage": {"path": str(folder)}}})
    return config


def test_openhands_main_searches_in_forks_of_an_environment(
    server: ScriptedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(TASK_INDEX_VARIABLE, "3")
    app, asked = create_shop(), Counter[str]()

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        asked[scope["path"]] += 1
        await app(scope, receive, send)

    def shopper(body: dict[str, Any]) -> dict[str, Any]:
        """Searches for one thing or another, and clicks around."""
        words = ["click[Next >]", "click[Back to Search]"] if depth(body) else ["search[socks]", "search[red lamp]"]
        return reply(f"Thought: let me see.\nAction: {words[body['seed'] % 2]}")

    server.policies["shopper"] = shopper
    strategy = {"num_branches": 2, "depth": 2, "beam": 1, "value": "none", "temperature": 0.6}
    own = {"max_turns": 3, "max_obs_length": 60, "rollout_strategy": "ToT", "strategy": strategy}
    with listening("127.0.0.1", 0) as listener, serving(counting, listener, lifespan="off"):
        own["env_port"] = listener.getsockname()[1]
        config = standalone(
            server, tmp_path, "shopper", "openhands_rl_plugin.hosts.v0.runtime.EnvironmentRuntime", **own
        )
        task = MessageAction(content="Buy it.")
        asyncio.run(
            run_controller(config=config, initial_user_action=task, fake_user_response_fn=auto_continue_response)
        )
    (trajectory,) = asyncio.run(stored(tmp_path))
    assert (trajectory.task.id, trajectory.strategy.name) == ("webshop-3", "ToT")
    assert trajectory.failure is None and trajectory.stop is StopReason.MAX_TURNS
    assert trajectory.usage.steps == trajectory.evidence["steps"] == 3 < asked["/step"]
    assert asked["/close"] == asked["/reset"] > 3
    siblings = Counter(node.parent for node in trajectory.nodes if node.sampled)
    assert max(siblings.values()) == 2 and any(node.simulated for node in trajectory.nodes)
    assert {body["temperature"] for body in server.requests["shopper"]} == {0.6}


ENDLESS = {"rollout_strategy": "MCTS", "strategy": {"num_simulations": 10_000, "value": "model", "parallel": 4}}


def hangs(body: dict[str, Any]) -> dict[str, Any]:
    """Every action hangs, in whichever branch it is tried."""
    return reply(None, call("execute_bash", {"command": SLEEP, "timeout": 600}, f"id{body['seed']}"))


async def test_the_time_limit_of_an_episode_ends_its_search(server: ScriptedModel):
    server.policies["limited"] = hangs
    started = time.monotonic()
    trajectory = await play(server, "limited", limits=Limits(timeout=2.0), **ENDLESS)
    assert trajectory.stop is StopReason.TIMEOUT and trajectory.failure is None
    assert [node for node in trajectory.nodes if node.sampled] and trajectory.usage.steps == 0
    assert time.monotonic() - started < 10


def stop_by_event(runtime: Runtime) -> None:
    runtime.event_stream.add_event(ChangeAgentStateAction(AgentState.STOPPED), EventSource.USER)


def stop_by_signal(runtime: Runtime) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("stop", [stop_by_event, stop_by_signal])
def test_the_user_stops_the_agent_in_mid_search(server: ScriptedModel, tmp_path: Path, stop: Callable[[Runtime], None]):
    server.policies[stop.__name__] = hangs
    config = standalone(server, tmp_path, stop.__name__, **ENDLESS)
    stopped: list[float] = []

    def meddle(runtime: Runtime) -> None:
        deadline = time.monotonic() + 60
        while not running(SLEEP):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        stopped.append(time.monotonic())
        stop(runtime)

    async def converse() -> None:
        runtime = create_runtime(config)
        call_async_from_sync(runtime.connect)
        meddler = threading.Thread(target=meddle, args=(runtime,))
        meddler.start()
        task = MessageAction(content="Wait.")
        await run_controller(
            config=config, initial_user_action=task, runtime=runtime, fake_user_response_fn=auto_continue_response
        )
        meddler.join()
        runtime.event_stream.close()
        runtime.close()

    asyncio.run(converse())
    (trajectory,) = asyncio.run(stored(tmp_path))
    # OpenHands itself looks for the end once a second, and sleeps while it cleans up.
    assert time.monotonic() - stopped[0] < 6
    assert trajectory.stop is StopReason.ERROR and trajectory.failure is not None
    assert trajectory.failure.kind is FailureKind.INFRASTRUCTURE and "stopped" in trajectory.failure.message
    assert [node for node in trajectory.nodes if node.sampled] and trajectory.usage.steps == 0
    assert trajectory.strategy.name == "MCTS" and trajectory.strategy.options["parallel"] == 4
    assert trajectory.evidence["changed_files"] == {}

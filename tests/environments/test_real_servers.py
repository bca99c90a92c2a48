"""The clients against the published servers themselves, each in a Python of its own that a variable names.

OPENHANDS_RL_OPENENV_PYTHON     has openenv; OPENHANDS_RL_OPENENV_ENVS may name the folder envs/ of OpenEnv's repository
OPENHANDS_RL_AGENTENV_PYTHON    has what .ci/peers installs for AgentGym (with Java), and
OPENHANDS_RL_AGENTENV_HOME      names AgentGym's repository
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_servers import named, play, said, serving, task, text

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.types import Message, Task, ToolCall
from openhands_rl_plugin.environments.http.client import AgentGymClient, HttpEnvironmentOptions
from openhands_rl_plugin.environments.openenv import OpenEnvClient
from openhands_rl_plugin.testing import check_environment

pytestmark = [pytest.mark.contract, pytest.mark.slow]

HERE = Path(__file__).parent


# OpenEnv


@pytest.fixture(scope="module")
def corridor() -> Iterator[str]:
    python = named("OPENHANDS_RL_OPENENV_PYTHON")
    with serving(python, "serve_openenv.py", "PORT", "32", path="/health", cwd=HERE) as (url, _):
        yield url


def openenv(url: str) -> OpenEnvClient:
    return OpenEnvClient(HttpEnvironmentOptions(base_url=url, timeout=20))


async def test_openenv_conforms_and_tells_its_schema(corridor: str):
    actions = ["Action: RIGHT", 'Action: {"move": "RIGHT", "by": 2}', "Action: up", "Action: LEFT"]
    await check_environment(lambda: openenv(corridor), task(1), actions=actions)
    player = openenv(corridor)
    opening, first, refused, last = await play(player, task(2), ["RIGHT", "up", '{"move": "RIGHT", "by": 2}'])
    assert json.loads(text(opening)) == {"at": 2, "message": "You are in a corridor."}
    system = opening.messages[0].content or ""
    assert "move (required) - one of LEFT, RIGHT" in system and "by (optional) - integer" in system
    assert json.loads(text(first))["at"] == 3
    assert text(refused) == "Invalid action: move: Input should be 'LEFT' or 'RIGHT'"
    assert (last.terminated, last.reward) == (True, 1.0)
    await player.close()


async def test_openenv_is_full_or_dies():
    python = named("OPENHANDS_RL_OPENENV_PYTHON")
    with serving(python, "serve_openenv.py", "PORT", "1", path="/health", cwd=HERE) as (url, process):
        for _ in range(3):
            player = openenv(url)
            await player.reset(task())
            await player.close()
        first, second = openenv(url), openenv(url)
        await first.reset(task())
        with pytest.raises(InfrastructureError, match=r"CAPACITY_REACHED.*max_concurrent_envs"):
            await second.reset(task())
        await second.close()
        process.kill()
        with pytest.raises(InfrastructureError, match="check whether the server is still running"):
            await first.step(said("RIGHT"))
        await first.close()
        process.wait()
        third = openenv(url)
        with pytest.raises(InfrastructureError, match="nothing answers"):
            await third.reset(task())
        await third.close()


async def test_openenv_s_own_echo_offers_its_tools_by_mcp():
    python, envs = named("OPENHANDS_RL_OPENENV_PYTHON"), Path(named("OPENHANDS_RL_OPENENV_ENVS"))
    command = [python, "-m", "uvicorn", "--port", "PORT", "--log-level", "warning", "echo_env.server.app:app"]
    with serving(*command, path="/health", cwd=envs) as (url, _):
        player = openenv(url)
        await player.reset(task(environment="openenv/echo"))
        assert len(player.info.tools) == 2
        spoken = (ToolCall(id="n1", name="echo_message", arguments=json.dumps({"message": "two\nlines"})),)
        shown = await player.step(Message(role="assistant", tool_calls=spoken))
        assert text(shown) == "two\nlines" and shown.messages[-1].role == "tool"
        unknown = Message(role="assistant", tool_calls=(ToolCall(id="n2", name="shout", arguments="{}"),))
        assert "echo_message, echo_with_length" in text(await player.step(unknown))
        assert (await player.evidence())["unrewarded"] is True, "it gives no reward, and that is no zero"
        await player.close()


# AgentGym


def agentgym(url: str) -> AgentGymClient:
    return AgentGymClient(HttpEnvironmentOptions(base_url=url, timeout=60))


@contextmanager
def agentenv(name: str) -> Iterator[str]:
    python, home = named("OPENHANDS_RL_AGENTENV_PYTHON"), Path(named("OPENHANDS_RL_AGENTENV_HOME"))
    command = [python, "-m", "uvicorn", "--port", "PORT", "--log-level", "warning", f"agentenv_{name}.server:app"]
    with serving(*command, path="/", cwd=home / f"agentenv-{name}") as (url, _):
        yield url


async def test_agentgym_s_textcraft():
    with agentenv("textcraft") as url:
        of = task(3, environment="agentgym/textcraft")
        await check_environment(lambda: agentgym(url), of, actions=["Action: inventory", "Action: get 1 rock"])
        player = agentgym(url)
        opening = text(await player.reset(of))
        goal = re.findall(r"Goal: craft (.+)\.", opening)[0]
        recipe = next(line for line in opening.splitlines() if re.match(rf"craft \d+ {goal} using ", line))
        needed = recipe.partition(" using ")[2].split(", ")
        actions = [*(f"get {each}" for each in needed), recipe]
        steps = [await player.step(said(action)) for action in actions]
        assert [text(step) for step in steps[:-1]] == [f"Got {each}" for each in needed]
        assert (steps[-1].reward, steps[-1].terminated) == (1.0, True)
        await player.close()
        with pytest.raises(BadEnvironmentError, match="/step answered an error: The id 0 is not valid"):
            await _after_somebody_closed_it(agentgym(url), of)


async def _after_somebody_closed_it(player: AgentGymClient, of: Task) -> None:
    await player.reset(of)
    player._episode = 0  # Of an episode that is long over.
    await player.step(said("inventory"))


async def test_agentgym_s_sciworld():
    with agentenv("sciworld") as url:
        of = task(0, environment="agentgym/sciworld")
        await check_environment(lambda: agentgym(url), of, actions=["Action: look around", "Action: inventory"])
        player = agentgym(url)
        opening, nonsense, focused = await play(player, of, ["dance", "focus on air"])
        assert text(opening).startswith("Your task is to boil water.") and "This room is called" in text(opening)
        assert text(nonsense).startswith("No known action") and nonsense.reward == 0.0
        assert (focused.reward, focused.terminated, focused.truncated) == (-1.0, True, False), "the task is lost"
        await player.close()
        idler = agentgym(url)
        last = await idler.reset(of)
        while not last.terminated and not last.truncated:
            last = await idler.step(said("wait1"))
        assert (last.reward, last.terminated, last.truncated) == (0.0, False, True), "the server's limit of moves"
        await idler.close()
        lost = agentgym(url)
        with pytest.raises(BadEnvironmentError, match="/reset answered an error: list index out of range"):
            await lost.reset(task(10**6, environment="agentgym/sciworld"))
        await lost.close()

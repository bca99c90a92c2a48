"""The clients against the published servers themselves, each in a Python of its own that a variable names.

OPENHANDS_RL_OPENENV_PYTHON     has openenv
OPENHANDS_RL_AGENTENV_PYTHON    has what .ci/peers installs for AgentGym (with Java), and
OPENHANDS_RL_AGENTENV_HOME      names AgentGym's repository
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from launchers import free_port

from openhands_rl_plugin.core.types import Message, Observation, Task
from openhands_rl_plugin.environments.http.client import AgentGymClient, HttpEnvironmentOptions
from openhands_rl_plugin.environments.openenv import OpenEnvClient
from openhands_rl_plugin.testing import check_environment

pytestmark = [pytest.mark.contract, pytest.mark.slow]

HERE = Path(__file__).parent
START_S = 300.0


def named(variable: str) -> str:
    """The variable's value; without it the test is skipped."""
    if not (value := os.environ.get(variable)):
        pytest.skip(f"set {variable} to test against the real server")
    return value


@contextmanager
def serving(*command: str, path: str, cwd: Path) -> Iterator[str]:
    """The URL of the command, with ``PORT`` in its arguments replaced, once it answers ``path``."""
    port = str(free_port())
    arguments = [each.replace("PORT", port) for each in command]
    # A group of its own: some servers start further processes, which outlive them.
    with subprocess.Popen(arguments, cwd=cwd, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + START_S
            while True:
                with suppress(httpx.HTTPError):
                    httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5).raise_for_status()
                    break
                assert process.poll() is None and time.monotonic() < deadline, f"{command} did not start"
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def task(idx: int, environment: str = "real") -> Task:
    return Task(id="t", environment=environment, data={"idx": idx})


def reply(action: str) -> Message:
    return Message(role="assistant", content=f"Action: {action}")


def text(found: Observation) -> str:
    return found.messages[-1].content or ""


# OpenEnv


@pytest.fixture(scope="module")
def corridor() -> Iterator[str]:
    python = named("OPENHANDS_RL_OPENENV_PYTHON")
    with serving(python, "serve_openenv.py", "PORT", "32", path="/health", cwd=HERE) as url:
        yield url


def openenv(url: str) -> OpenEnvClient:
    return OpenEnvClient(HttpEnvironmentOptions(base_url=url, timeout=20))


async def test_openenv_conforms_and_returns_its_schema(corridor: str):
    actions = ["Action: RIGHT", 'Action: {"move": "RIGHT", "by": 2}', "Action: up", "Action: LEFT"]
    await check_environment(lambda: openenv(corridor), task(1), actions=actions)
    player = openenv(corridor)
    opening = await player.reset(task(2))
    first, refused, last = [await player.step(reply(each)) for each in ("RIGHT", "up", '{"move": "RIGHT", "by": 2}')]
    assert json.loads(text(opening)) == {"at": 2, "message": "You are in a corridor."}
    system = opening.messages[0].content or ""
    assert '"enum": ["LEFT", "RIGHT"]' in system and '"by"' in system
    assert json.loads(text(first))["at"] == 3
    assert text(refused) == "Invalid action: move: Input should be 'LEFT' or 'RIGHT'"
    assert (last.terminated, last.reward) == (True, 1.0)
    await player.close()


# AgentGym


def agentgym(url: str) -> AgentGymClient:
    return AgentGymClient(HttpEnvironmentOptions(base_url=url, timeout=60))


@contextmanager
def agentenv(name: str) -> Iterator[str]:
    python, home = named("OPENHANDS_RL_AGENTENV_PYTHON"), Path(named("OPENHANDS_RL_AGENTENV_HOME"))
    command = [python, "-m", "uvicorn", "--port", "PORT", "--log-level", "warning", f"agentenv_{name}.server:app"]
    with serving(*command, path="/", cwd=home / f"agentenv-{name}") as url:
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
        steps = [await player.step(reply(action)) for action in actions]
        assert [text(step) for step in steps[:-1]] == [f"Got {each}" for each in needed]
        assert (steps[-1].reward, steps[-1].terminated) == (1.0, True)
        await player.close()

"""The clients against the published servers themselves, each in a Python of its own that a variable names.

OPENHANDS_RL_OPENENV_PYTHON     has openenv; OPENHANDS_RL_OPENENV_ENVS may name the folder envs/ of OpenEnv's repository
OPENHANDS_RL_NEMO_GYM_PYTHON    has nemo-gym
OPENHANDS_RL_VERIFIERS_PYTHON   has verifiers
OPENHANDS_RL_AGENTENV_PYTHON    has what .ci/peers installs for AgentGym (with Java), and
OPENHANDS_RL_AGENTENV_HOME      names AgentGym's repository
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest

from openhands_rl_plugin.config.success import success_rule
from openhands_rl_plugin.contrib.environments.nemo_gym import PARAMETERS, GymRow, NeMoGymClient, NeMoGymOptions
from openhands_rl_plugin.contrib.environments.verifiers import VerifiersEnvironment, VerifiersOptions
from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.core.types import Message, Observation, StopReason, Task, ToolCall
from openhands_rl_plugin.environments.agentgym import AgentGymClient, AgentGymOptions
from openhands_rl_plugin.environments.http.client import BaseEnvClient, action_language
from openhands_rl_plugin.environments.openenv import OpenEnvClient, OpenEnvOptions
from openhands_rl_plugin.testing import check_environment

pytestmark = [pytest.mark.contract, pytest.mark.slow]

HERE = Path(__file__).parent
START_S = 300.0


def named(variable: str) -> str:
    """What the variable says; without it the test is skipped."""
    if not (value := os.environ.get(variable)):
        pytest.skip(f"set {variable} to test against the real server")
    return value


@contextmanager
def serving(
    *command: str, path: str, cwd: Path = HERE, **environ: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The command with ``PORT`` in its arguments replaced, once it answers ``path``; its address and process."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    arguments = [each.replace("PORT", str(port)) for each in command]
    # A group of its own: some servers start further processes, which outlive them.
    with subprocess.Popen(arguments, cwd=cwd, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + START_S
            while not _answers(url + path):
                assert process.poll() is None, f"{command} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"{command} did not start within {START_S:g} s"
                time.sleep(0.1)
            yield url, process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def task(idx: int = 0, environment: str = "real", **data: Any) -> Task:
    return Task(id="t", environment=environment, data={"idx": idx, **data})


def said(action: str) -> Message:
    return Message(role="assistant", content=f"Action: {action}")


def text(found: Observation) -> str:
    return found.messages[-1].content or ""


async def play(player: BaseEnvClient, of: Task, actions: list[str]) -> list[Observation]:
    seen = [await player.reset(of)]
    for action in actions:
        seen.append(await player.step(said(action)))
    return seen


async def by_its_own_client(python: str, script: str, job: dict[str, Any], **environ: str) -> list[tuple[float, bool]]:
    """The reward and the end of each step, as the environment's own client is told them."""

    def ask() -> str:
        command = [python, str(HERE / script), json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **environ})
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return [(float(reward), done) for reward, done in json.loads(await asyncio.to_thread(ask))]


def ours(steps: list[Observation]) -> list[tuple[float, bool]]:
    """What our client says of the same."""
    return [(step.reward, step.terminated or step.truncated) for step in steps]


# OpenEnv


@pytest.fixture(scope="module")
def corridor() -> Iterator[str]:
    python = named("OPENHANDS_RL_OPENENV_PYTHON")
    with serving(python, "serve_openenv.py", "PORT", "32", path="/health") as (url, _):
        yield url


def openenv(url: str, **options: Any) -> OpenEnvClient:
    return OpenEnvClient(OpenEnvOptions.model_validate({"base_url": url, "timeout": 20, "retries": 1, **options}))


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
    assert (await player.evidence())["state"] == {"episode_id": "corridor", "step_count": 2}
    await player.close()


async def test_openenv_keeps_an_episode_while_a_model_thinks_and_says_what_broke(corridor: str):
    player = openenv(corridor)
    await player.reset(task())
    await asyncio.sleep(3)  # The server pings every second and waits one for the answer.
    assert json.loads(text(await player.step(said("RIGHT"))))["at"] == 1
    with pytest.raises(BadEnvironmentError, match="EXECUTION_ERROR: division by zero"):
        await player.step(said('{"move": "LEFT", "by": 0}'))
    await player.close()


async def test_openenv_plays_twenty_at_once(corridor: str):
    async def walk(start: int) -> int:
        player = openenv(corridor)
        seen = await play(player, task(start), ["RIGHT"] * (5 - start))
        await player.close()
        assert seen[-1].terminated
        return sum(each.terminated for each in seen)

    assert await asyncio.gather(*(walk(at % 5) for at in range(20))) == [1] * 20


async def test_openenv_is_full_or_dies():
    python = named("OPENHANDS_RL_OPENENV_PYTHON")
    with serving(python, "serve_openenv.py", "PORT", "1", path="/health") as (url, process):
        for _ in range(3):
            player = openenv(url, retries=0)
            await player.reset(task())
            await player.close()
        first, second = openenv(url), openenv(url, place_timeout=0.5)
        await first.reset(task())
        with pytest.raises(InfrastructureError, match=r"CAPACITY_REACHED.*max_concurrent_envs"):
            await second.reset(task())
        await second.close()
        process.kill()
        with pytest.raises(InfrastructureError, match="check whether the server is still running"):
            await first.step(said("RIGHT"))
        await first.close()
        process.wait()
        third = openenv(url, retries=0)
        with pytest.raises(InfrastructureError, match="nothing answers"):
            await third.reset(task())
        await third.close()


async def test_openenv_s_own_grid_world():
    python, envs = named("OPENHANDS_RL_OPENENV_PYTHON"), Path(named("OPENHANDS_RL_OPENENV_ENVS"))
    command = [python, "-m", "uvicorn", "--port", "PORT", "--log-level", "warning", "grid_world_env.server.app:app"]
    with serving(*command, path="/health", cwd=envs) as (url, _):
        player, moves = openenv(url), ["RIGHT", "DOWN"] * 4
        _, *steps = await play(player, task(environment="openenv/grid_world"), moves)
        assert (steps[-1].terminated, steps[-1].reward) == (True, 1.0)
        assert (await player.evidence())["return"] == pytest.approx(0.3)
        await player.close()
        job = {"url": url, "actions": [{"action": move} for move in moves]}
        assert ours(steps) == await by_its_own_client(python, "own_openenv.py", job)


async def test_openenv_s_own_echo_offers_its_tools_by_mcp():
    python, envs = named("OPENHANDS_RL_OPENENV_PYTHON"), Path(named("OPENHANDS_RL_OPENENV_ENVS"))
    command = [python, "-m", "uvicorn", "--port", "PORT", "--log-level", "warning", "echo_env.server.app:app"]
    with serving(*command, path="/health", cwd=envs) as (url, _):
        for react in (True, False):
            player = openenv(url, react_format=react, place_timeout=20)
            opening = await player.reset(task(environment="openenv/echo"))
            described = "echo_message - Echo back" in (opening.messages[0].content or "")
            assert (described, len(player.info.tools)) == ((True, 0) if react else (False, 2))
            spoken = json.dumps({"message": "two\nlines"})
            text_call = f'Action:\n```json\n{{"name": "echo_message",\n "arguments": {spoken}}}\n```'
            native = (ToolCall(id="n1", name="echo_message", arguments=spoken),)
            told = await player.step(
                Message(role="assistant", content=text_call if react else None, tool_calls=() if react else native)
            )
            assert text(told) == "two\nlines" and told.messages[-1].role == ("user" if react else "tool")
            refused = await player.step(said('{"name": "shout", "arguments": {}}'))
            assert "echo_message, echo_with_length" in text(refused)
            assert (await player.evidence())["unrewarded"] is True, "it pays nothing, and that is no zero"
            await player.close()


async def test_openenv_s_one_place_is_waited_for_and_a_search_is_refused():
    python = named("OPENHANDS_RL_OPENENV_PYTHON")
    with serving(python, "serve_openenv.py", "PORT", "1", path="/health") as (url, _):

        async def walk(start: int) -> bool:
            player = openenv(url, retries=0, place_timeout=60)
            *_, last = await play(player, task(start), ["RIGHT"] * (5 - start))
            await player.close()
            return last.terminated

        assert await asyncio.gather(*(walk(at) for at in range(5))) == [True] * 5
        searcher = openenv(url)
        searcher.reserve(4)
        with pytest.raises(BadEnvironmentError, match=r"one place, and a search needs two at least.*up to 5"):
            await searcher.reset(task())
        await searcher.close()
    with serving(python, "serve_openenv.py", "PORT", "3", path="/health") as (url, _):
        searcher = openenv(url)
        searcher.reserve(4)
        await searcher.reset(task())
        assert searcher.info.max_forks == 2
        twins = [await searcher.fork() for _ in range(2)]
        assert [json.loads(text(await twin.step(said("RIGHT"))))["at"] for twin in twins] == [1, 1]
        await twins.pop().close()
        twins.append(await searcher.fork())
        for each in (*twins, searcher):
            await each.close()


# NeMo Gym


def nemo_gym(url: str, **options: Any) -> NeMoGymClient:
    return NeMoGymClient(NeMoGymOptions.model_validate({"base_url": url, "timeout": 30, **options}))


@contextmanager
def nemo_server(server: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    python = named("OPENHANDS_RL_NEMO_GYM_PYTHON")
    with serving(python, "serve_nemo_gym.py", "PORT", server, path="/") as found:
        yield found


async def test_nemo_gym_s_blackjack_keeps_hands_apart():
    with nemo_server("resources_servers.blackjack.app:BlackjackEnv") as (url, process):

        async def play_hand() -> float:
            player = nemo_gym(url)
            found = await player.reset(task())
            while not found.terminated:
                hand = text(found)
                value = int(re.findall(r"= (\d+)", hand)[-1])
                assert hand.startswith("Your hand: [") and value < 22
                found = await player.step(said(f"<action>{'hit' if value < 17 else 'stand'}</action>"))
            info = (await player.evidence())["info"]
            assert isinstance(info, dict) and info["result"] in ("win", "loss", "draw", "bust")
            assert info["player"] != "[]", "a hand that the server does not know"
            await player.close()
            return found.reward

        rewards = await asyncio.gather(*(play_hand() for _ in range(24)))
        assert set(rewards) <= {-1.0, 0.0, 1.0} and len(set(rewards)) > 1
        player = nemo_gym(url)
        await player.reset(task())
        process.kill()
        process.wait()
        with pytest.raises(InfrastructureError):
            await player.step(said("<action>stand</action>"))
        await player.close()


async def test_nemo_gym_conforms_with_a_row_of_a_data_set():
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "What is the capital of France?"}]},
        "follow_ups": ["How many live there?", "Name one famous landmark."],
        "expected_answer": "Eiffel",
    }
    of = task(environment="nemo-gym/multi-turn", row=row)
    with nemo_server("resources_servers.example_multi_turn_gymnasium.app:ExampleMultiTurnEnv") as (url, _):
        await check_environment(lambda: nemo_gym(url), of, actions=["Action: Paris", "Action: two million"])
        player = nemo_gym(url)
        opening, one, two, last = await play(player, of, ["Paris", "two million", "the Eiffel Tower"])
        await player.close()
    assert [text(each) for each in (opening, one, two)] == ["What is the capital of France?", *row["follow_ups"]]
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)


async def _as_its_own_agent_would(url: str, row: dict[str, Any], calls: list[tuple[str, str]], answer: str) -> float:
    """The reward of the same calls, sent as NeMo Gym's ``simple_agent`` sends them."""
    output: list[dict[str, Any]] = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        (await http.post("/seed_session", json=row)).raise_for_status()
        for at, (name, arguments) in enumerate(calls):
            call = {"type": "function_call", "call_id": f"c{at}", "name": name, "arguments": arguments}
            output.append(call)
            found = await http.post(f"/{name}", json=json.loads(arguments))
            output.append({"type": "function_call_output", "call_id": f"c{at}", "output": found.text})
        if answer:
            text = {"type": "output_text", "text": answer, "annotations": []}
            message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
            output.append(message)
        response = {"id": "r", "created_at": 0, "model": "m", "object": "response", "output": output}
        response |= {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
        verified = await http.post("/verify", json={**row, "response": response})
        verified.raise_for_status()
        return float(verified.json()["reward"])


def nemo_rows(server: str) -> list[dict[str, Any]]:
    """The example rows of a server of the wheel."""
    return [json.loads(line) for line in _examples()[f"resources_servers/{server}"].read_text().splitlines()]


def _examples() -> dict[str, Path]:
    root = next(Path(named("OPENHANDS_RL_NEMO_GYM_PYTHON")).parent.parent.glob("lib/python*/site-packages"))
    return {str(file.parent.parent.relative_to(root)): file for file in sorted(root.glob("*/*/data/example.jsonl"))}


def _synonyms(row: dict[str, Any]) -> list[tuple[str, str]]:
    asked = [("get_synonym_value", json.dumps({"synonym": each})) for each in row["expected_synonyms"]]
    return [*asked, ("extract_synonym_values", json.dumps({"synonym_values": row["expected_synonym_values"]}))]


def _ground_truth(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["name"], call["arguments"]) for call in row["ground_truth"]]


SIMPLE = "resources_servers.{0}.app:{1}ResourcesServer"
TOOLS = [
    (
        "example_single_tool_call",
        "SimpleWeather",
        lambda row: [("get_weather", '{"city": "Paris"}')],
        "It is cold.",
        1.0,
    ),
    ("example_multi_step", "ExampleMultiStep", _synonyms, "done", 1.0),
    ("example_multi_step", "ExampleMultiStep", lambda row: _synonyms(row)[:1], "done", 0.0),
    (
        "example_session_state_mgmt",
        "StatefulCounter",
        lambda row: [("increment_counter", json.dumps({"count": row["expected_count"] - row["initial_count"]}))],
        "done",
        1.0,
    ),
    ("example_session_state_mgmt", "StatefulCounter", lambda row: [("get_counter_value", "{}")], "done", 0.0),
    (
        "workplace_assistant",
        "WorkbenchR",
        lambda row: [(c["name"], c["arguments"]) for c in row["ground_truth"]],
        "done",
        1.0,
    ),
    ("workplace_assistant", "WorkbenchR", lambda row: [], "done", 0.0),
]


@pytest.mark.parametrize(("server", "name", "calls", "answer", "paid"), TOOLS)
async def test_nemo_gym_s_tools_are_played_and_paid_as_by_its_own_agent(
    server: str, name: str, calls: Any, answer: str, paid: float
):
    [row, *_] = nemo_rows(server)
    path = (
        SIMPLE.format(server, name)
        if name != "WorkbenchR"
        else f"resources_servers.{server}.app:WorkbenchResourcesServer"
    )
    made = calls(row)
    with nemo_server(path) as (url, _):
        own = await _as_its_own_agent_would(url, row, made, answer)
        of = task(environment=f"nemo-gym/{server}", row=row)
        for react in (True, False):
            player = nemo_gym(url, react_format=react)
            await player.reset(of)
            for at, (tool, arguments) in enumerate(made):
                text = f'Action: {{"name": "{tool}", "arguments": {arguments}}}'
                native = (ToolCall(id=f"n{at}", name=tool, arguments=arguments),)
                action = Message(role="assistant", content=text if react else None, tool_calls=() if react else native)
                told = await player.step(action)
                assert told.messages and not told.terminated
            last = await player.step(Message(role="assistant", content=f"Action: {answer}" if react else answer))
            assert (last.reward, last.terminated) == (own, True) and own == paid
            await player.close()


async def test_verifiers_plays_a_server_of_nemo_gym_and_pays_the_same():
    python, server = named("OPENHANDS_RL_VERIFIERS_PYTHON"), "example_multi_step"
    [row, *_] = nemo_rows(server)
    with nemo_server(SIMPLE.format(server, "ExampleMultiStep")) as (url, _):
        data = _examples()[f"resources_servers/{server}"]
        taskset = {"dataset": str(data), "task": {"resources_url": url}}
        for made, paid in ((_synonyms(row), 1.0), (_synonyms(row)[:1], 0.0)):
            own = await _as_its_own_agent_would(url, row, made, "done")
            player = VerifiersEnvironment(VerifiersOptions(python=python, taskset_options=taskset))
            await player.reset(task(environment="verifiers/nemo_gym"))
            for tool, arguments in made:
                called = f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'
                told = await player.step(Message(role="assistant", content=called))
                assert told.messages and not told.terminated
            last = await player.step(Message(role="assistant", content="done"))
            assert (last.reward, last.terminated) == (own, True) and own == paid
            await player.close()


async def test_nemo_gym_s_graders_of_a_call_get_the_call():
    with nemo_server("resources_servers.xlam_fc.app:XlamFcResourcesServer") as (url, _):
        for row in nemo_rows("xlam_fc"):
            [expected, *more] = row["expected_answers"]
            wanted = json.dumps([expected, *more] if more else expected)
            for action, paid in ((wanted, 1.0), ("nothing", 0.0)):
                player = nemo_gym(url)
                await player.reset(task(environment="nemo-gym/xlam_fc", row=row))
                last = await player.step(said(action))
                assert (last.reward, last.terminated) == (paid, True)
                await player.close()


def test_nemo_gym_s_rows_are_played_or_refused_by_name():
    played, refused = set(), {}
    for server, file in _examples().items():
        for line in file.read_text().splitlines():
            row = json.loads(line)
            try:
                found = GymRow.of({PARAMETERS: {"input": []}, **row}, "t", f"nemo-gym/{file.parent.parent.name}")
            except BadEnvironmentError as error:
                refused[server] = str(error)
                continue
            if found.turns or found.system:
                played.add(server)
                assert len(found.tools.names) == len(row["responses_create_params"].get("tools") or []), server
            else:
                refused[server] = "no prompt"
    of_servers = {each for each in (*played, *refused) if each.startswith("resources_servers/")}
    assert len(of_servers) >= 90 and not played & refused.keys()
    assert {each.rpartition("/")[2] for each in refused if each in of_servers} == {
        *("asr_with_pc", "aviary", "circle_click", "circle_count", "cvdp", "gdpval", "scicode", "vlm_eval_kit"),
        "terminal_multi_harness",
    }


# AgentGym


def agentgym(url: str, **options: Any) -> AgentGymClient:
    return AgentGymClient(AgentGymOptions.model_validate({"base_url": url, "timeout": 60, **options}))


@contextmanager
def agentenv(name: str) -> Iterator[str]:
    python, home = named("OPENHANDS_RL_AGENTENV_PYTHON"), Path(named("OPENHANDS_RL_AGENTENV_HOME"))
    command = [python, "-m", "uvicorn", "--port", "PORT", "--log-level", "warning", f"agentenv_{name}.server:app"]
    with serving(*command, path="/", cwd=home / f"agentenv-{name}") as (url, _):
        yield url


async def by_agentgym_s(client: str, url: str, index: int, actions: list[str]) -> list[tuple[float, bool]]:
    """The steps as AgentGym's own client of the environment is told them."""
    job = {"url": url, "client": client, "index": index, "actions": actions}
    home = Path(named("OPENHANDS_RL_AGENTENV_HOME"))
    return await by_its_own_client(sys.executable, "own_agentgym.py", job, PYTHONPATH=str(home / "agentenv"))


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
        assert ours(steps) == await by_agentgym_s("TextCraftEnvClient", url, 3, actions)
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


async def test_agentgym_s_webshop_routes():
    python, home = named("OPENHANDS_RL_AGENTENV_PYTHON"), Path(named("OPENHANDS_RL_AGENTENV_HOME"))
    script = "serve_agentenv_webshop.py"
    with serving(python, script, "PORT", str(home / "agentenv-webshop"), path="/") as (url, _):
        of = task(7, environment="agentgym/webshop")
        await check_environment(lambda: agentgym(url), of, actions=["Action: search[lamp]", "Action: click[B1]"])
        player = agentgym(url)
        opening, last = await play(player, of, ["click[Buy Now]"])
        assert text(opening) == "WebShop [SEP] Instruction: [SEP] Find me lamp 7 [SEP] Search"
        assert (text(last), last.reward, last.terminated) == ("7: click[Buy Now]", 1.0, True)
        await player.close()
        lost = agentgym(url)
        await lost.reset(of)
        lost._episode = -1  # One that the server does not know.
        with pytest.raises(InfrastructureError, match="/step answered 500"):
            await lost.step(said("search[lamp]"))
        with suppress(InfrastructureError):  # It drops the connection after such an answer.
            await lost.close()


async def test_agentgym_s_babyai_and_the_words_that_its_preset_teaches():
    with agentenv("babyai") as url:
        of = task(0, environment="agentgym/babyai")
        player, actions = agentgym(url), ["check available actions", "go to red ball 1"]
        _, *steps = await play(player, of, actions)
        there = steps[-1]
        assert there.terminated and 0.5 < there.reward < 1.0
        assert ours(steps) == await by_agentgym_s("BabyAIEnvClient", url, 0, actions)
        rule = success_rule("agentgym/babyai")
        assert rule.holds(there.reward, StopReason.TERMINATED) and not rule.holds(0.0, StopReason.TRUNCATED)
        await player.close()
        taught = action_language("babyai").replace("\n", ", ").split(", ")
        kinds = {re.sub(r" <.*", "", each) for each in taught}
        seen: set[str] = set()
        for level in (0, 11, 16, 23, 25):
            looker = agentgym(url)
            shown = text(await looker.reset(task(level, environment="agentgym/babyai")))
            seen |= set(re.findall(r'"([^"]+)"', shown.partition("Available actions: ")[2]))
            await looker.close()
        assert len(seen) > 10 and {"pickup"} <= {each.split()[0] for each in seen}
        unknown = [each for each in seen if not any(each == kind or each.startswith(f"{kind} ") for kind in kinds)]
        assert unknown == []


SCIWORLD = """
import json, sys
from scienceworld import ScienceWorldEnv
env = ScienceWorldEnv()
env.load("boil", 0, "", generateGoldPath=True)
print(json.dumps([env.get_gold_action_sequence(), env.get_possible_actions()]))
env.close()
"""


def sciworld_knows() -> tuple[list[str], list[str]]:
    """The package's own solution of the first task, and the forms of the actions that its parser knows."""
    command = [named("OPENHANDS_RL_AGENTENV_PYTHON"), "-c", SCIWORLD]
    solution, forms = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    return solution, forms


async def test_agentgym_s_sciworld_pays_the_package_s_own_solution_in_full():
    solution, _ = sciworld_knows()
    with agentenv("sciworld") as url:
        player, steps = agentgym(url), []
        await player.reset(task(0, environment="agentgym/sciworld"))
        while not steps or not steps[-1].terminated:  # The package's solution goes on after the end.
            steps.append(await player.step(said(solution[len(steps)])))
        await player.close()
        theirs = await by_agentgym_s("SciworldEnvClient", url, 0, solution[: len(steps)])
    scores = accumulate(step.reward * 100 for step in steps)
    assert [(score, done) for score, (_, done) in zip(scores, ours(steps), strict=True)] == [
        (pytest.approx(score), done) for score, done in theirs
    ]
    returned = sum(step.reward for step in steps)
    assert theirs[-1] == (100.0, True) and (steps[-1].terminated, steps[-1].truncated) == (True, False)
    assert success_rule("agentgym/sciworld").holds(returned, StopReason.TERMINATED)


def test_the_words_of_agentgym_s_sciworld_are_its_parser_s():
    _, forms = sciworld_knows()
    taught = action_language("sciworld").replace("\n", ", ").split(", ")
    kinds = {re.sub("<.*?>", "OBJ", each).replace("go to", "go").replace("into", "in") for each in taught}
    assert kinds == {*forms} - {"reset task"}

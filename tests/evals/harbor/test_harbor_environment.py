"""Tasks in Harbor's format, played in a real sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harbor_tasks import DOCKERFILE, SHELL_TESTS, UV_TESTS, write_task

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Limits,
    Message,
    Observation,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.environments.workspace.files import Workspace
from openhands_rl_plugin.evals.harbor.environment import HarborEnvironment, HarborOptions
from openhands_rl_plugin.evals.harbor.gate import check_folders
from openhands_rl_plugin.evals.harbor.tasks import find_tasks, read_task
from openhands_rl_plugin.evals.harbor.verification import read_rewards
from openhands_rl_plugin.hosts.shared.hosted_environment import RESET_TOOL, STEP_TOOL, HostedEnvironment
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout.session import AgentSession
from openhands_rl_plugin.rollout.strategies.react import StandardReActStrategy
from openhands_rl_plugin.testing import ScriptedEngine

SOLVED = ["cd data", "cat state.txt && export DONE=../hello.txt", 'echo "$GREETING" > "$DONE"', "submit"]


def make(tasks: Path, **options: Any) -> HarborEnvironment:
    return HarborEnvironment(HarborOptions.model_validate({"tasks": str(tasks), **options}))


def task(idx: int = 0, environment: str = "harbor", **data: Any) -> Task:
    return Task(id="t", environment=environment, data={"idx": idx, **data})


def said(command: str) -> Message:
    return Message(role="assistant", content=f"Action: {command}")


def text(found: Observation) -> str:
    return found.messages[-1].content or ""


async def played(environment: HarborEnvironment, *commands: str, limits: Limits | None = None) -> Trajectory:
    session = AgentSession(
        environment=environment,
        strategy=StandardReActStrategy(),
        strategy_spec=StrategySpec(name="StandardReAct"),
        engine=ScriptedEngine([f"Action: {command}" for command in commands]),
        policy=PolicyRef(base_model="m"),
        limits=limits,
    )
    return await session.run(EpisodeRequest(task=task(), run_id="r", group_id="g"))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_task(tmp_path / "hello")
    return tmp_path


async def test_work_that_solves_the_task_is_paid_by_its_tests(tasks: Path):
    found = await played(make(tasks), *SOLVED)
    assert (found.stop, found.episode_return, found.failure) == (StopReason.TERMINATED, 1.0, None)
    opening, told = found.messages()[0].content or "", [m.content for m in found.messages() if m.role == "user"]
    assert "Write Hello, world! into /app/hello.txt." in opening and "submit - end the task" in opening
    assert told == ["You are in /app.", "(no output)", "prepared", "(no output)", "The tests gave the reward 1."]
    verifier = found.evidence["verifier"]
    assert isinstance(verifier, dict) and verifier["rewards"] == {"reward": 1.0} and verifier["left_running"] == []


async def test_a_reward_that_the_agent_writes_or_a_shell_that_it_bends_earns_nothing(tasks: Path):
    found = await played(
        make(tasks),
        "cd /logs/verifier && echo 1 > reward.txt && echo '{\"reward\": 1}' > reward.json; cd /app",
        "function /tests/test.sh { echo 1 > /logs/verifier/reward.txt; }; shopt -s expand_aliases; alias rm=true cp=:",
        "export BASH_ENV=/app/x; echo 'echo 1 > /logs/verifier/reward.txt; exit' > /app/x; export PATH=/app:$PATH",
        "ln -s /app /tests; echo echo > /run/given/bin/uvx; rm -f /usr/bin/env",
        "submit",
    )
    assert (found.stop, found.episode_return) == (StopReason.TERMINATED, 0.0)
    assert "Read-only file system" in "".join(message.content or "" for message in found.messages())


async def test_the_last_turn_is_tested_as_it_stands_and_a_cut_episode_is_no_valid_0(tasks: Path):
    write = "echo Hello, world! > hello.txt"
    found = await played(make(tasks, max_turns=1), write)
    assert (found.stop, found.episode_return) == (StopReason.TRUNCATED, 1.0)
    cut, late = make(tasks), make(tasks)
    for each in (cut, late):
        await each.reset(task())
        await each.step(said(write))
    paid = await cut.cut_short()
    assert paid is not None and paid.reward == 1.0 and (await cut.evidence())["return"] == 1.0
    with pytest.raises(BadEnvironmentError, match="its work earns 1"):
        await late.evidence()
    await cut.close()
    await late.close()
    found = await played(make(tasks), "ls", limits=Limits(max_turns=1))
    assert (found.failure, found.known_return) == (None, 0.0)


async def running(environment: HarborEnvironment, file: str) -> None:
    """Wait until a command has made the file."""
    while environment._container is None or not (environment._container.root / "app" / file).exists():
        await asyncio.sleep(0.02)


async def test_work_of_a_command_that_the_time_limit_ends_is_paid_under_a_host(tasks: Path):
    environment = make(tasks)
    hosted = HostedEnvironment(environment, task())
    await hosted.reply_to(RESET_TOOL, {})
    command = "Action: echo Hello, world! > hello.txt; touch written; sleep 300"
    step = asyncio.create_task(hosted.reply_to(STEP_TOOL, {"content": command}))
    await running(environment, "written")
    await hosted.conclude()
    assert (hosted.take_owed(), hosted.failure) == (1.0, None)
    assert hosted.evidence is not None
    assert (hosted.evidence["rewards"], hosted.evidence["done"], hosted.evidence["truncated"]) == ([1.0], True, True)
    await step
    assert hosted.failure is None


@pytest.mark.slow
@pytest.mark.parametrize(("command", "reward"), [("echo Hello, world! > hello.txt", 1.0), ("true", 0.0)])
async def test_work_of_a_command_that_the_time_limit_ends_is_paid(tasks: Path, command: str, reward: float):
    """As Harbor does: the tests run after ``AgentTimeoutError``, which is recorded beside their reward."""
    found = await played(make(tasks), f"{command}; sleep 300", limits=Limits(timeout=12))
    assert (found.stop, found.failure) == (StopReason.TIMEOUT, None)
    assert (found.known_return, (await ReturnReward()(found)).reward) == (reward, reward)
    assert found.evidence["verifier"]["rewards"] == {"reward": reward}


async def test_a_fork_has_its_own_files_and_the_same_shell(tasks: Path):
    original = make(tasks)
    await original.reset(task())
    await original.step(said("cd data && X=5"))
    twin = await original.fork()
    assert text(await twin.step(said("echo Hello, world! > ../hello.txt; pwd; echo $X"))) == "/app/data\n5"
    assert (await twin.step(said("submit"))).reward == 1.0
    await twin.close()
    assert text(await original.step(said("ls ..; pwd"))) == "data\n/app/data"
    await original.step(said("sleep 300 &"))
    with pytest.raises(BadEnvironmentError, match="cannot be forked while sleep runs"):
        await original.fork()
    place = original._place
    await original.close()
    assert place is not None and not place.exists()


async def test_a_sandbox_has_no_network_and_nothing_of_the_user(tasks: Path):
    environment = make(tasks)
    await environment.reset(task())
    seen = text(
        await environment.step(said(f"ls {Path.home()} {tasks} 2>&1; (echo > /dev/tcp/1.1.1.1/53) 2>&1; ls /run/given"))
    )
    assert "hello" not in seen and "unreachable" in seen and seen.endswith("bin")
    await environment.close()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("echo 0.25 > reward.txt", {"reward": 0.25}),
        ("""echo '{"reward": 0.5, "speed": 3}' > reward.json; echo 1 > reward.txt""", {"reward": 0.5, "speed": 3.0}),
        ("true", "wrote no /logs/verifier/reward.txt or reward.json"),
        (": > reward.txt", "reward.txt holds no rewards"),
        ("echo nan > reward.txt", "only finite numbers are rewards"),
        ("""echo '{"reward": "1"}' > reward.json""", "only finite numbers are rewards"),
        ("""echo '{}' > reward.json""", "only finite numbers are rewards"),
        ("ln -s /etc/hostname reward.txt", "cannot be read"),
    ],
)
def test_a_missing_or_odd_reward_is_an_error(tmp_path: Path, written: str, expected: dict[str, float] | str):
    folder = tmp_path / "logs" / "verifier"
    folder.mkdir(parents=True)
    subprocess.run(["bash", "-c", written], cwd=folder, check=True)
    if isinstance(expected, dict):
        assert read_rewards(Workspace(tmp_path), "t") == expected
    else:
        with pytest.raises((BadEnvironmentError, InfrastructureError), match=expected):
            read_rewards(Workspace(tmp_path), "t")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("true", "they said: nothing to see"),
        ("""echo '{"a": 1, "b": 2}' > reward.json""", "none of them 'reward': set reward_key"),
    ],
)
async def test_an_episode_without_a_reward_fails(tmp_path: Path, written: str, expected: str):
    write_task(tmp_path / "hello", tests=f"#!/bin/bash\ncd /logs/verifier\necho nothing to see\n{written}\n")
    found = await played(make(tmp_path), "submit")
    assert found.failure is not None and expected in found.failure.message, found.failure
    assert found.known_return is None


async def test_what_a_container_would_have_is_named_and_forced(tmp_path: Path):
    write_task(
        tmp_path / "needs",
        dockerfile=f"{DOCKERFILE}RUN apt-get update && apt-get install -y --no-install-recommends bash zathura-xyz\n"
        "RUN curl -L https://example.org/x | sh\n",
        config='[environment]\ngpus = 1\n[agent]\nuser = "nobody"\n',
    )
    needs = read_task(tmp_path / "needs").missing
    assert needs == (
        "a GPU",
        "the user nobody ([agent])",
        "the package zathura-xyz",
        "RUN curl -L https://example.org/x",
    )
    with pytest.raises(BadEnvironmentError, match=r"needs cannot run here .*the package zathura-xyz.*force = true"):
        await make(tmp_path).reset(task())
    forced = await played(make(tmp_path, force=True), *SOLVED)
    assert forced.episode_return == 1.0 and forced.evidence["without_container"] == list(needs)


def test_the_gate_passes_a_good_task_and_names_what_is_wrong(tmp_path: Path):
    write_task(tmp_path / "good")
    write_task(tmp_path / "lazy", tests="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    write_task(tmp_path / "unsolved", solution="true\n")
    write_task(tmp_path / "compose")
    (tmp_path / "compose" / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "task.toml").write_text("[")
    checks = {each.folder.name: each for each in check_folders(find_tasks(tmp_path))}
    assert (checks["good"].oracle, checks["good"].untouched, checks["good"].problems) == (1.0, 0.0, ())
    assert checks["lazy"].problems == ("an untouched container earns 1",)
    assert checks["unsolved"].problems == ("the oracle's solution earns 0",)
    assert checks["compose"].left_out and checks["compose"].problems == ("several containers (docker-compose)",)
    assert "cannot be read" in checks["broken"].problems[0]


@pytest.mark.slow  # makes an environment from the package index
def test_tests_of_terminal_bench_find_their_packages_without_a_network(tmp_path: Path):
    write_task(tmp_path / "uv", tests=UV_TESTS)
    write_task(
        tmp_path / "pip",
        dockerfile="FROM python:3.12-slim\nWORKDIR /app\nRUN pip install pytest==8.4.1 inflection==0.5.1\n"
        "COPY words.txt data/\nENV GREETING='Hello, world!'\n",
        tests=SHELL_TESTS.replace("if [", "python -c 'import inflection' && pytest -q /tests/test_outputs.py && if ["),
    )
    checks = check_folders(find_tasks(tmp_path))
    assert [(each.oracle, each.untouched, each.problems) for each in checks if each.folder.name == "uv"] == [
        (1.0, 0.0, ())
    ]
    pip = next(each for each in checks if each.folder.name == "pip")
    assert pip.oracle == 1.0 and "wrote no /logs/verifier/reward.txt" in pip.problems[0]


def test_folders_without_tasks_say_what_to_do(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"there is no task.toml"):
        find_tasks(tmp_path)
    (tmp_path / "task.yaml").write_text("instruction: x\n")
    with pytest.raises(ConfigError, match=r"harbor task migrate -i"):
        find_tasks(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("content", ["1", " 0.5\n", "-2", "", "x", "nan", "inf", "1e400"])
@pytest.mark.parametrize("name", ["reward.txt", "reward.json"])
def test_rewards_are_read_as_harbor_itself_reads_them(tmp_path: Path, name: str, content: str):
    if not (python := os.environ.get("OPENHANDS_RL_HARBOR_PYTHON")):
        pytest.skip("set OPENHANDS_RL_HARBOR_PYTHON to compare with the package harbor")
    content = json.dumps({"reward": content}) if name == "reward.json" and content == "x" else content
    folder = tmp_path / "logs" / "verifier"
    folder.mkdir(parents=True)
    (folder / name).write_text(content)
    task_folder = write_task(tmp_path / "hello")
    script = f"""
import json
from types import SimpleNamespace
from pathlib import Path
from harbor.models.task.task import Task
from harbor.verifier.verifier import Verifier
Task(Path({str(task_folder)!r}))
file = Path({str(folder / name)!r})
trial = SimpleNamespace(trial_paths=SimpleNamespace(reward_text_path=file, reward_json_path=file))
try:
    print(json.dumps(Verifier._parse_reward_{name.rpartition(".")[2].replace("txt", "text")}(trial)))
except Exception as error:
    print(json.dumps(None))
"""
    theirs = json.loads(subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout)
    try:
        ours: Any = read_rewards(Workspace(tmp_path), "t")
    except BadEnvironmentError:
        ours = None
    assert ours == ({"reward": theirs} if isinstance(theirs, int | float) else theirs)

"""Tasksets of verifiers 0.4: what is said where it is not installed, and its own rollouts against ours.

OPENHANDS_RL_VERIFIERS_PYTHON    has verifiers, and uv beside it for verifiers' own harness
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.cli import main
from openhands_rl_plugin.contrib.environments.verifiers import process
from openhands_rl_plugin.contrib.environments.verifiers.environment import VerifiersEnvironment, VerifiersOptions
from openhands_rl_plugin.contrib.environments.verifiers.process import VARIABLE
from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Limits,
    Message,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.rollout.session import AgentSession
from openhands_rl_plugin.rollout.strategies.react import StandardReActStrategy
from openhands_rl_plugin.testing import ScriptedEngine

HERE = Path(__file__).parent


def task(idx: int = 0) -> Task:
    return Task(id="t", environment="verifiers", data={"idx": idx})


def make(taskset: str, **options: Any) -> VerifiersEnvironment:
    given = {"taskset": taskset, "path": (str(HERE),), "timeout": 120, **options}
    return VerifiersEnvironment(VerifiersOptions.model_validate(given))


async def played(environment: VerifiersEnvironment, *answers: str, idx: int = 0, turns: int = 10) -> Trajectory:
    session = AgentSession(
        environment=environment,
        strategy=StandardReActStrategy(),
        strategy_spec=StrategySpec(name="StandardReAct"),
        engine=ScriptedEngine(answers),
        policy=PolicyRef(base_model="m"),
        limits=Limits(max_turns=turns),
    )
    return await session.run(EpisodeRequest(task=task(idx), run_id="r", group_id="g"))


def test_without_verifiers_it_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(
        ConfigError, match=r"in a Python of its own: `uv venv VERIFIERS .*python = \"VERIFIERS/bin/python\""
    ):
        make("sums")
    with pytest.raises(ConfigError, match="/nowhere/python is no Python"):
        make("sums", python="/nowhere/python")


async def test_a_python_without_verifiers_ends_typed():
    environment = make("sums", python=sys.executable)
    with pytest.raises(BadEnvironmentError, match="No module named 'verifiers'"):
        await environment.reset(task())


def pretended(folder: Path, *lines: str) -> str:
    """A program in the place of the Python that has verifiers; it reads the set-up first."""
    program = folder / "python"
    program.write_text("\n".join(("#!/bin/bash", "read -r setup", *lines)))
    program.chmod(0o755)
    return str(program)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("sleep 300",), "did not load the taskset within"),
        (("echo '{\"ready\": true}'", "read -r line", "sleep 300"), "did not answer within"),
        (("echo '{\"ready\": true}'", "read -r line", "echo no JSON", "sleep 300"), "ended: it broke the protocol"),
        (("echo '{\"ready\": true}'", "read -r line", "echo '[1]'", "sleep 300"), "ended: it broke the protocol"),
    ],
)
async def test_a_stuck_process_and_its_children_are_ended_and_another_takes_its_place(
    lines: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process, "_ALIVE_PATIENCE", 0.3)
    child = f"sleep 300 & echo $! $$ >> {tmp_path}/pids"
    options = {"python": pretended(tmp_path, child, *lines), "timeout": 0.3, "start_timeout": 0.3}
    if "sleep 300" not in lines[:1]:
        options["start_timeout"] = 30
    for _ in range(2):
        with pytest.raises(InfrastructureError, match=said):
            await make("stuck", **options).reset(task())
    pids = [int(each) for each in (tmp_path / "pids").read_text().split()]
    assert len(set(pids)) == 4
    async with asyncio.timeout(20):
        while any(map(is_running, pids)):
            await asyncio.sleep(0.01)


async def test_a_slow_turn_is_cut_and_leaves_the_process_to_others(tmp_path: Path):
    answers = (
        "echo '{\"ready\": true}'",
        f'while read -r line; do echo "$line" >> {tmp_path}/heard',
        "number=${line//[!0-9]/}",
        'case "$line" in *alive*) echo "{\\"episode\\": $number, \\"alive\\": true}";; esac; done',
    )
    environment = make("slow", python=pretended(tmp_path, *answers), timeout=0.3)
    with pytest.raises(InfrastructureError, match="did not answer within"):
        await environment.reset(task())
    await environment.close()
    async with asyncio.timeout(20):
        while '"cut": true' not in (tmp_path / "heard").read_text():
            await asyncio.sleep(0.01)
    assert environment._process is not None and environment._process.alive
    environment._process.discard()


async def test_the_process_sees_no_keys_but_those_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_SECRET_KEY", "sk-1")
    monkeypatch.setenv("A_JUDGES_KEY", "sk-2")
    python = pretended(tmp_path, f"env > {tmp_path}/seen", "echo no JSON")
    with pytest.raises(InfrastructureError):
        await make("keys", python=python, pass_env=("A_JUDGES_KEY",)).reset(task())
    seen = (tmp_path / "seen").read_text()
    assert "SOME_SECRET_KEY" not in seen and "A_JUDGES_KEY=sk-2" in seen and "PATH=" in seen
    with pytest.raises(ConfigError, match="pass_env names NOT_SET, which is not set"):
        make("keys", python=python, pass_env=("NOT_SET",))


@pytest.fixture
def python() -> str:
    if not (found := os.environ.get(VARIABLE)):
        pytest.skip(f"set {VARIABLE} to play with the package verifiers")
    return found


def their_own(python: str, taskset: str, index: int, *answers: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What verifiers' own rollout of the same answers is worth."""
    job = json.dumps({"taskset": taskset, "options": options, "index": index, "answers": answers})
    path = os.pathsep.join((str(Path(python).parent), os.environ["PATH"]))
    environ = {**os.environ, "PYTHONPATH": str(HERE), "PATH": path}
    command = [python, str(HERE / "own_rollout.py"), job]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["errors"] == []
    return found


def scores(found: Trajectory) -> dict[str, float]:
    kept = found.evidence["verifiers"]
    assert isinstance(kept, dict) and isinstance(kept["rewards"], dict)
    return {name: each["score"] for name, each in kept["rewards"].items()}  # type: ignore[index]


def spoken(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.slow
@pytest.mark.parametrize(("idx", "answer"), [(1, "It is 2."), (2, "5"), (0, "")])
async def test_an_answer_is_worth_what_verifiers_says(python: str, idx: int, answer: str):
    found = await played(make("tasksets_of_tests"), answer, idx=idx)
    theirs = their_own(python, "tasksets_of_tests", idx, spoken(answer))
    assert found.failure is None and found.stop is StopReason.TERMINATED
    assert (found.episode_return, scores(found)) == (theirs["reward"], theirs["rewards"])
    assert [m.content for m in found.messages()[:2]] == ["Answer with a number.", f"What is {idx} + {idx}?"]


@pytest.mark.slow
@pytest.mark.parametrize("told", ["5", "6"])
async def test_tools_are_offered_called_and_scored(python: str, told: str):
    name = "shelf_tools_count"
    environment = make("tool_taskset_of_tests")
    opening = await environment.reset(task())
    name = environment._tools[0]["function"]["name"]  # type: ignore[index,call-overload]
    assert str(name) in (opening.messages[0].content or "") and "How many there are" in (
        opening.messages[0].content or ""
    )
    await environment.close()
    call = json.dumps({"name": name, "arguments": {"what": "books"}})
    found = await played(make("tool_taskset_of_tests"), f"<tool_call>\n{call}\n</tool_call>", f"There are {told}.")
    asked = {"id": "call_0_0", "type": "function", "function": {"name": name, "arguments": '{"what": "books"}'}}
    first = {"role": "assistant", "content": "", "tool_calls": [asked]}
    theirs = their_own(python, "tool_taskset_of_tests", 0, first, spoken(f"There are {told}."))
    assert (found.failure, found.episode_return) == (None, theirs["reward"]) and scores(found) == theirs["rewards"]
    assert found.episode_return == float(told == "5")
    assert "<tool_response>\n5 books\n</tool_response>" in [m.content for m in found.messages()]


@pytest.mark.slow
async def test_tool_dialogues_at_once_end_as_each_does_alone(python: str):
    call = json.dumps({"name": "shelf_tools_count", "arguments": {"what": "books"}})

    async def dialogue(told: int) -> float | None:
        answers = (f"<tool_call>\n{call}\n</tool_call>", f"There are {told}.")
        found = await played(make("tool_taskset_of_tests"), *answers)
        assert (found.failure, found.stop) == (None, StopReason.TERMINATED)
        return found.episode_return

    assert await asyncio.gather(*(dialogue(told) for told in range(3, 11))) == [0.0, 0.0, 1.0, *[0.0] * 5]


@pytest.mark.slow
@pytest.mark.parametrize("guesses", [("5", "please 2", "3"), ("3",), ("9", "9", "9", "9")])
async def test_an_environment_that_talks_back_is_played_turn_by_turn(python: str, guesses: tuple[str, ...]):
    found = await played(make("dialogue_taskset_of_tests"), *guesses)
    theirs = their_own(python, "dialogue_taskset_of_tests", 0, *map(spoken, guesses))
    assert (found.failure, found.episode_return) == (None, theirs["reward"]) and scores(found) == theirs["rewards"]
    told = [m.content for m in found.messages() if m.role == "user"]
    assert told == ["Guess a number from 1 to 9.", *["lower", "higher", "lower", "lower"][: len(guesses) - 1]] or told[
        1:
    ] == ["lower"] * (len(guesses) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("guesses", "paid"), [(["l", "a", "m", "p"], 1.0), (["l", *"qvwxyz"], 0.25), (["lamp"], 1.0)])
async def test_its_own_taskset_of_textarena_is_played(
    python: str, guesses: list[str], paid: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = tmp_path / "corpora/words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("lamp\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    answers = [f"[{guess}]" for guess in guesses]
    with monkeypatch.context() as offline:  # nltk's own words would take the place of these
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            offline.setenv(name, "http://127.0.0.1:9")
        offline.setenv("NO_PROXY", "127.0.0.1,localhost")
        found = await played(make("textarena", taskset_options={"game": "Hangman-v0"}), *answers)
    theirs = their_own(python, "textarena", 0, *map(spoken, answers), game="Hangman-v0")
    assert (found.failure, found.stop) == (None, StopReason.TERMINATED)
    assert (found.episode_return, scores(found)) == (theirs["reward"], theirs["rewards"])
    assert scores(found) == {"game_reward": paid}


@pytest.mark.slow
async def test_limits_are_verifiers_own_and_a_cut_episode_is_scored(python: str):
    limited = await played(make("dialogue_taskset_of_tests", max_turns=1), "please 5")
    assert (limited.failure, limited.stop, limited.episode_return) == (None, StopReason.TRUNCATED, 0.5)
    environment = make("dialogue_taskset_of_tests")
    await environment.reset(task())
    await environment.step(Message(role="assistant", content="please 5"))
    paid = await environment.cut_short()
    assert paid is not None and paid.reward == 0.5 and (await environment.evidence())["return"] == 0.5
    await environment.close()


async def stuck(folder: Path, idx: int) -> VerifiersEnvironment:
    """One whose step did not answer in time."""
    options = {"taskset_options": {"folder": str(folder)}}
    environment = make("waiting_taskset_of_tests", **options)
    await environment.reset(task(idx))
    environment.options = make("waiting_taskset_of_tests", **options, timeout=1).options
    with pytest.raises(InfrastructureError, match="did not answer within 1 s"):
        await environment.step(Message(role="assistant", content="hello"))
    await environment.close()
    return environment


@pytest.mark.slow
async def test_a_turn_that_takes_too_long_is_cut_and_the_process_goes_on(python: str, tmp_path: Path):
    slow = await stuck(tmp_path, 1)
    other = make("waiting_taskset_of_tests", taskset_options={"folder": str(tmp_path)})
    found = await played(other, "hello")
    assert (found.failure, found.episode_return) == (None, 1.0)
    assert slow._process is other._process and slow._process is not None and slow._process.alive
    (tmp_path / "gate").touch()
    async with asyncio.timeout(60):
        while not (ended := tmp_path / "ended").exists() or not ended.read_text():
            await asyncio.sleep(0.05)
    assert ended.read_text() == "True max_total_tokens", "its next request was answered by its end"


@pytest.mark.slow
async def test_a_process_that_holds_up_all_episodes_is_ended_and_another_takes_its_place(python: str, tmp_path: Path):
    blocked = await stuck(tmp_path, 2)
    assert blocked._process is not None and not blocked._process.alive
    other = make("waiting_taskset_of_tests", taskset_options={"folder": str(tmp_path)})
    found = await played(other, "hello")
    assert (found.failure, found.episode_return) == (None, 1.0) and other._process is not blocked._process


@pytest.mark.slow
async def test_what_is_wrong_is_typed(python: str):
    with pytest.raises(BadEnvironmentError, match=r"No module named 'no_such_taskset'|'no_such_taskset' not found"):
        await make("no_such_taskset").reset(task())
    with pytest.raises(BadEnvironmentError, match="has the tasks 0 to 2, and no 99"):
        await make("tasksets_of_tests").reset(task(99))
    with pytest.raises(BadEnvironmentError, match="verifiers recorded no reward"):
        await played_out(make("unpaid_taskset_of_tests"), "hello")
    environment = make("tasksets_of_tests", start_timeout=170)
    await environment.reset(task())
    assert environment._process is not None
    environment._process._process.kill()
    with pytest.raises(InfrastructureError, match="the process of verifiers ended"):
        await environment.step(Message(role="assistant", content="2"))
    again = await played(make("tasksets_of_tests", start_timeout=170), "2", idx=1)
    assert again.failure is None, "a new process takes the place of one that died"


@pytest.mark.slow
def test_a_taskset_is_evaluated_by_the_command_line(python: str, tmp_path: Path):
    (tmp_path / "prompt.txt").write_text(script([{"text": "It is 2."}]))
    taskset = f'path = ["{HERE}"]\ntaskset_options = {{ system_prompt = "{tmp_path / "prompt.txt"}" }}\n'
    config = tmp_path / "config.toml"
    config.write_text(f'[rl]\nenv_name = "verifiers/tasksets_of_tests"\n[rl.environment]\n{taskset}')
    words = ["--config", str(config), "--tasks", "2", "--agent", "RLAgent", "--model", "m", "--temperature", "1"]
    with instant_model() as url:
        bounds = [
            "--processes",
            "0",
            "--workers",
            "2",
            "--retries",
            "0",
            "--no-completions",
            "--out",
            str(tmp_path / "o"),
        ]
        assert main(["evaluate", "environment", "--base-url", url, *words, *bounds]) == 0
    rows = [json.loads(line) for file in tmp_path.rglob("output.jsonl") for line in file.read_text().splitlines()]
    assert sorted(row["test_result"]["reward"] for row in rows) == [0.25 / 8, 1 + 0.25 / 8]


async def played_out(environment: VerifiersEnvironment, answer: str) -> None:
    await environment.reset(task())
    await environment.step(Message(role="assistant", content=answer))

"""Tasksets of verifiers 0.4: the error without it, and episodes where OPENHANDS_RL_VERIFIERS_PYTHON has it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from one_episode import one_episode

from openhands_rl_plugin.contrib.environments.verifiers import VARIABLE, VerifiersEnvironment, VerifiersOptions
from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import Limits, Message, StopReason, Task, Trajectory

HERE = Path(__file__).parent


def task(taskset: str, idx: int = 0) -> Task:
    return Task(id="t", environment=f"verifiers/{taskset}", data={"idx": idx})


def make(**options: Any) -> VerifiersEnvironment:
    return VerifiersEnvironment(VerifiersOptions.model_validate({"path": (str(HERE),), "timeout": 120, **options}))


async def rolled_out(taskset: str, *answers: str, idx: int = 0, **options: Any) -> Trajectory:
    return await one_episode(make(**options), answers, task(taskset, idx), limits=Limits(max_turns=10))


def test_without_verifiers_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(
        ConfigError, match=r"another Python environment: `uv venv VERIFIERS .*python = \"VERIFIERS/bin/python\""
    ):
        make()
    with pytest.raises(ConfigError, match="/nowhere/python is no Python"):
        make(python="/nowhere/python")


async def test_the_process_sees_no_keys_but_those_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_SECRET_KEY", "sk-1")
    monkeypatch.setenv("A_JUDGES_KEY", "sk-2")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\nread -r setup\nenv > {tmp_path}/seen\necho no JSON\n")
    python.chmod(0o755)
    with pytest.raises(InfrastructureError, match="the process of verifiers ended"):
        await make(python=str(python), pass_env=("A_JUDGES_KEY",)).reset(task("keys"))
    seen = (tmp_path / "seen").read_text()
    assert "SOME_SECRET_KEY" not in seen and "A_JUDGES_KEY=sk-2" in seen and "PATH=" in seen
    with pytest.raises(ConfigError, match="pass_env names NOT_SET, which is not set"):
        make(python=str(python), pass_env=("NOT_SET",))


@pytest.fixture
def python() -> str:
    if not (found := os.environ.get(VARIABLE)):
        pytest.skip(f"set {VARIABLE} to play with the package verifiers")
    return found


def scores(found: Trajectory) -> dict[str, float]:
    kept = found.evidence["verifiers"]
    assert isinstance(kept, dict) and isinstance(kept["rewards"], dict)
    return {name: each["score"] for name, each in kept["rewards"].items()}  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize(("idx", "answer", "correct"), [(1, "It is 2.", 1.0), (2, "5", 0.0)])
async def test_an_answer_is_worth_its_weighted_functions(python: str, idx: int, answer: str, correct: float):
    found = await rolled_out("tasksets_of_tests", answer, idx=idx)
    assert found.failure is None and found.stop is StopReason.TERMINATED
    short = 1 / len(answer)
    assert scores(found) == {"correct": correct, "short": short}
    assert found.episode_return == pytest.approx(correct + 0.25 * short)
    assert [m.content for m in found.messages()[:2]] == ["Answer with a number.", f"What is {idx} + {idx}?"]


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["5", "6"])
async def test_tools_are_offered_called_and_scored(python: str, seen: str):
    environment = make()
    opening = await environment.reset(task("tool_taskset_of_tests"))
    name = environment._tools[0]["function"]["name"]  # type: ignore[index,call-overload]
    assert str(name) in (opening.messages[0].content or "") and "How many there are" in (
        opening.messages[0].content or ""
    )
    await environment.close()
    call = json.dumps({"name": name, "arguments": {"what": "books"}})
    found = await rolled_out("tool_taskset_of_tests", f"<tool_call>\n{call}\n</tool_call>", f"There are {seen}.")
    assert (found.failure, found.episode_return) == (None, float(seen == "5"))
    assert "<tool_response>\n5 books\n</tool_response>" in [m.content for m in found.messages()]


@pytest.mark.slow
@pytest.mark.parametrize(("guesses", "worth"), [(("5", "please 2", "3"), 0.5 + 1 / 3), (("9", "9", "9", "9"), 0.0)])
async def test_an_environment_that_talks_back_goes_turn_by_turn(python: str, guesses: tuple[str, ...], worth: float):
    found = await rolled_out("dialogue_taskset_of_tests", *guesses)
    assert found.failure is None and found.episode_return == pytest.approx(worth)
    seen = [m.content for m in found.messages() if m.role == "user"]
    assert seen == ["Guess a number from 1 to 9.", *["lower", "higher", "lower", "lower"][: len(guesses) - 1]] or seen[
        1:
    ] == ["lower"] * (len(guesses) - 1)


@pytest.mark.slow
async def test_limits_are_verifiers_own_and_a_cut_episode_is_scored(python: str):
    limited = await rolled_out("dialogue_taskset_of_tests", "please 5", max_turns=1)
    assert (limited.failure, limited.stop, limited.episode_return) == (None, StopReason.TRUNCATED, 0.5)
    environment = make()
    await environment.reset(task("dialogue_taskset_of_tests"))
    await environment.step(Message(role="assistant", content="please 5"))
    rewarded = await environment.cut_short()
    assert rewarded is not None and rewarded.reward == 0.5 and (await environment.evidence())["return"] == 0.5
    await environment.close()


@pytest.mark.slow
async def test_what_is_wrong_is_typed(python: str):
    with pytest.raises(BadEnvironmentError, match=r"No module named 'no_such_taskset'|'no_such_taskset' not found"):
        await make().reset(task("no_such_taskset"))
    with pytest.raises(BadEnvironmentError, match="has the tasks 0 to 2, and no 99"):
        await make().reset(task("tasksets_of_tests", 99))
    environment = make()
    await environment.reset(task("unpaid_taskset_of_tests"))
    with pytest.raises(BadEnvironmentError, match="verifiers recorded no reward"):
        await environment.step(Message(role="assistant", content="hello"))
    environment = make(start_timeout=170)
    await environment.reset(task("tasksets_of_tests"))
    assert environment._process is not None
    environment._process.process.kill()
    with pytest.raises(InfrastructureError, match="the process of verifiers ended"):
        await environment.step(Message(role="assistant", content="2"))
    again = await rolled_out("tasksets_of_tests", "2", idx=1, start_timeout=170)
    assert again.failure is None, "a new process takes the place of one that died"

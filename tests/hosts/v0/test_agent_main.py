"""``python -m openhands.core.main -c RLAgent`` with a config.toml: two runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted_model import EMPTY, LOGPROB, ScriptedModel, call, prompt_ids, reply, serve
from small_shop import running_shop

from openhands_rl_plugin import FileTrajectoryStorage, Trajectory
from openhands_rl_plugin.core.types import StopReason

# A run takes about ten seconds of processor time, nearly all of it to import OpenHands.
PATIENCE = 240
pytestmark = [pytest.mark.contract, pytest.mark.timeout(PATIENCE + 60)]

TASK = "Write hello into greeting.txt"
WORKSPACE = "openhands_rl_plugin.hosts.v0.runtime.WorkspaceRuntime"
ENVIRONMENT = "openhands_rl_plugin.hosts.v0.runtime.EnvironmentRuntime"

COMMON = """
[core]
runtime = "{runtime}"
workspace_base = "{folder}/workspace"
file_store = "memory"
cache_dir = "{folder}/cache"
max_iterations = 30
enable_browser = false

[llm]
model = "openai/{model}"
base_url = "{url}"
api_key = "sk-very-secret"
native_tool_calling = true
num_retries = 3
retry_min_wait = 0
retry_max_wait = 0

[agent]
enable_mcp = false
"""

PLAIN = """
[rl]
max_turns = 9
max_response_length = 321
max_obs_length = 50
storage = {{ path = "{folder}/trajectories" }}
sampling = {{ temperature = 0.7, top_p = 0.9 }}
reward = {{ name = "command", options = {{ command = "grep -c hello greeting.txt", result = "last-line" }} }}
"""

LAYERED = """
[agent.RLAgent]
classpath = "openhands_rl_plugin.hosts.v0.agent.RLAgent"
[agent.RLAgent.rl]
max_turns = 2
[agent.RLAgent.condenser]
type = "noop"

[rl]
max_turns = 7
max_response_length = 111
max_obs_length = 50
env_server_base = "{shop}"
rollout_strategy = "StandardReAct"
[rl.storage]
path = "{folder}/wrong"
[extended.rl]
max_turns = 5
max_response_length = 222
[extended.rl.storage]
path = "{folder}/trajectories"
"""


@dataclass
class Run:
    """One finished process, and what it left."""

    folder: Path
    output: str
    requests: list[dict]

    def trajectories(self) -> list[Trajectory]:
        async def read() -> list[Trajectory]:
            async with FileTrajectoryStorage(self.folder / "trajectories") as storage:
                return [trajectory async for trajectory, _ in storage.find()]

        return asyncio.run(read())

    @property
    def trajectory(self) -> Trajectory:
        (only,) = self.trajectories()
        return only


def start(folder: Path, server: ScriptedModel, model: str, sections: str, **values: object) -> subprocess.Popen[str]:
    (folder / "workspace").mkdir(parents=True, exist_ok=True)
    (folder / "home").mkdir()
    log_level = values.pop("log_level", "INFO")
    given = {"runtime": WORKSPACE, "shop": "http://127.0.0.1:1", **values}
    text = (COMMON + sections).format(folder=folder, url=server.url, model=model, **given)
    (folder / "config.toml").write_text(text)
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": f"{folder}/home",
        "TMPDIR": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "LOG_LEVEL": str(log_level),
    }
    command = [sys.executable, "-m", "openhands.core.main", "--config-file", "config.toml", "-c", "RLAgent", "-t", TASK]
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT, text=True)


BASH = "execute_bash"
NATIVE = [
    reply("I look first.", call(BASH, {"command": "seq 1 400", "security_risk": "LOW"})),
    reply(None, call(BASH, '{"command": "broken')),
    EMPTY,
    reply(
        None,
        call(BASH, {"command": "echo hello > greeting.txt"}, "a"),
        call(BASH, {"command": "cat greeting.txt"}, "b"),
    ),
    reply("Done.", call("finish", {"message": "It is written."})),
]
SHOPPING = [reply("Thought: I look for shoes.\nAction: search[shoes]"), reply("Action: search[socks]")]


def finished(folder: Path, server: ScriptedModel, model: str, sections: str, **values: object) -> Run:
    """The run of a process, which is ended where it takes too long."""
    with start(folder, server, model, sections, **values) as process:
        try:
            process.wait(timeout=PATIENCE)
        finally:
            process.kill()
    return Run(folder, (folder / "output.txt").read_text(), server.requests[model])


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Iterator[Run]:
    with serve() as server:
        server.script("policy-v000003", NATIVE)
        yield finished(tmp_path_factory.mktemp("plain"), server, "policy-v000003", PLAIN)


@pytest.fixture(scope="module")
def layered(tmp_path_factory) -> Iterator[Run]:
    with serve() as server, running_shop() as shop:
        server.script("shopper", SHOPPING)
        values = {"runtime": ENVIRONMENT, "shop": shop, "log_level": "ERROR"}
        yield finished(tmp_path_factory.mktemp("layered"), server, "shopper", LAYERED, **values)


def sampled(trajectory: Trajectory) -> list[int]:
    return [index for index, node in enumerate(trajectory.nodes) if node.sampled]


COMPLAINTS = "Unknown section|already registered|Invalid agent configuration|could not register"


@pytest.mark.parametrize("name", ["plain", pytest.param("layered", marks=pytest.mark.slow)])
def test_openhands_neither_warns_nor_complains(name: str, request: pytest.FixtureRequest) -> None:
    output = request.getfixturevalue(name).output
    assert not re.search(COMPLAINTS, output)
    # The empty answer, which OpenHands retries, is the one thing that goes wrong here.
    assert all("choices is less than 1" in line for line in output.splitlines() if "ERROR" in line), output


def test_plain_run_does_the_task_with_its_settings_and_stores_one_trajectory(plain):
    run = plain
    assert (run.folder / "workspace/greeting.txt").read_text() == "hello\n"
    trajectory = run.trajectory
    assert trajectory.stop is StopReason.TERMINATED and trajectory.failure is None
    assert (trajectory.task.instruction, trajectory.task.environment) == (TASK, "workspace")
    assert trajectory.task.id.startswith("write-hello-into-greeting-txt-")
    for request in run.requests:
        assert (request["max_completion_tokens"], request["temperature"], request["top_p"]) == (321, 0.7, 0.9)
        assert request["return_token_ids"] is True and request["logprobs"] is True
    seeds = [request["seed"] for request in run.requests]
    # Request 2 is answered without a choice, and the retry repeats it as it was.
    assert seeds[2] == seeds[3] and len(set(seeds)) == len(seeds) - 1
    observation = next(node.message.content or "" for node in trajectory.nodes if node.message.role == "tool")
    assert "truncated" in observation and len(observation) < 400


@pytest.mark.slow
def test_later_sections_override_earlier_ones_even_where_openhands_is_too_quiet_to_warn(layered):
    run = layered
    assert len(run.requests) == 2, "[agent.RLAgent.rl] max_turns wins"
    assert all(request["max_completion_tokens"] == 222 for request in run.requests), "[extended.rl] over [rl]"
    assert not (run.folder / "wrong").exists()
    assert run.trajectory.stop is StopReason.MAX_TURNS


def test_conversation_on_record_is_the_one_on_the_wire(plain):
    trajectory, requests = plain.trajectory, plain.requests
    last = [
        (message["role"], text(message), [one["function"]["arguments"] for one in message.get("tool_calls") or ()])
        for message in requests[-1]["messages"]
    ]
    recorded = [
        (message.role, message.content or "", [one.arguments for one in message.tool_calls])
        for message in trajectory.messages()[:-1]
    ]
    assert recorded == last
    assert not any("wire_messages" in node.metadata for node in trajectory.nodes)
    assert list(trajectory.tools) == requests[0]["tools"]
    assert "execute_ipython_cell" not in json.dumps(trajectory.tools)


@pytest.mark.shows("each prompt extends the one before")
def test_tokens_are_recorded_as_deltas(plain):
    trajectory, requests = plain.trajectory, plain.requests
    ids: list[int] = []
    for turn, (index, request) in enumerate(
        zip((i for i in trajectory.path() if trajectory.nodes[i].sampled), [requests[0], *requests[3:]], strict=True)
    ):
        tokens = trajectory.nodes[index].tokens
        assert tokens is not None
        assert tokens.extends is (turn > 0)
        ids = [*(ids if tokens.extends else []), *tokens.prompt_ids]
        assert ids == prompt_ids(request["messages"])
        assert set(tokens.logprobs) == {LOGPROB} and len(tokens.logprobs) == len(tokens.sampled_ids)
        ids += tokens.sampled_ids
    assert trajectory.usage.calls == 4 and trajectory.usage.cached_tokens == 28


@pytest.mark.shows("parallel tool calls")
def test_two_tool_calls_are_one_answer_and_a_malformed_one_stays_beside_the_path(plain):
    trajectory = plain.trajectory
    path = set(trajectory.path())
    answers = sampled(trajectory)
    assert [index in path for index in answers] == [True, False, True, True]
    malformed = trajectory.nodes[answers[1]]
    assert malformed.message.tool_calls[0].arguments == '{"command": "broken'
    assert "FunctionCallValidationError" in str(malformed.metadata["malformed"])
    assert malformed.tokens is not None and malformed.tokens.sampled_ids
    seen = trajectory.nodes[answers[1] + 1]
    assert seen.parent == malformed.parent and "Failed to parse tool call arguments" in (seen.message.content or "")
    both = trajectory.nodes[answers[2]]
    assert [one.id for one in both.message.tool_calls] == ["a", "b"]
    assert [message.role for message in trajectory.messages(answers[3])[-4:]] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]


def test_every_attempt_is_on_record_with_its_policy_and_without_secrets(plain):
    trajectory = plain.trajectory
    nodes = [trajectory.nodes[index] for index in sampled(trajectory)]
    assert len({node.metadata["session"] for node in nodes}) == 1
    assert [node.metadata["step"] for node in nodes] == sorted({node.metadata["step"] for node in nodes})
    attempts = nodes[2].metadata["attempts"]
    assert [attempt["error"] for attempt in attempts] == ["the server answered without a choice", None]
    assert all(attempt["parameters"]["temperature"] == 0.7 and attempt["latency"] > 0 for attempt in attempts)
    response = nodes[0].metadata["response"]
    assert response["choices"][0]["message"]["content"] == "I look first."
    assert "prompt_token_ids" not in response and "token_ids" not in json.dumps(response)
    assert "sk-very-secret" not in trajectory.model_dump_json()
    assert {(node.policy.adapter, node.policy.version) for node in nodes if node.policy} == {("policy", 3)}


@pytest.mark.slow
def test_environment_runtime_makes_it_an_episode_of_the_environment(layered):
    trajectory, (first, second) = layered.trajectory, layered.requests
    assert "return_token_ids" in second
    assert trajectory.task.environment == "webshop"
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert "search[keywords]" in text(first["messages"][0]) and "OpenHands" not in text(first["messages"][0])
    assert second["messages"][:2] == first["messages"] and second["messages"][2]["content"] == SHOPPING[0]["content"]
    assert "tools" not in first and trajectory.tools == ()
    assert all(len(text(message)) < 250 for message in second["messages"][1:]), "cut to max_obs_length"
    answer = trajectory.nodes[sampled(trajectory)[0]]
    assert answer.reward == 0.0 and trajectory.failure is None


def test_the_last_line_names_what_was_recorded(plain):
    (line,) = (line for line in plain.output.splitlines() if "recorded in" in line)
    store, known = plain.folder / "trajectories", plain.trajectory
    tail = line[line.index("recorded in") :]
    assert tail.startswith(f"recorded in {store} as {known.id[:8]}: 4 completions; token ids: yes; reward: 1; ")
    assert tail.endswith(f"; openhands-rl show {store} {known.id[:8]}")


def text(message: dict) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


async def test_the_rewards_command_judged_the_workspace_when_the_run_ended(plain):
    async with FileTrajectoryStorage(plain.folder / "trajectories") as storage:
        ((trajectory, scores),) = [found async for found in storage.find()]
    ran = trajectory.evidence["command"]
    assert (ran["command"], ran["exit_code"], ran["output"]) == ("grep -c hello greeting.txt", 0, "1\n")
    assert [score.reward for score in scores] == [1.0] and scores[0].reward_version.startswith("command-2@")

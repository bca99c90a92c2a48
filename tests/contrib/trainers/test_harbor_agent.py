"""OpenHands as an agent of the installed Harbor, in trials of its own: set up, played, verified.

``.ci/peers harbor`` makes Harbor's Python. By default trials run in a folder as root of bubblewrap, by a class of
Harbor's kind (``tests/helpers/harbor/harbor_trials``); with ``OPENHANDS_RL_HARBOR_CONTAINERS=podman`` in Harbor's own
containers, made from the image ``OPENHANDS_RL_HARBOR_IMAGE``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harbor_tasks import DOCKERFILE, write_task
from needs import needs_bubblewrap
from scripted_model import LOGPROB, ScriptedModel, call, prompt_ids, says, serve, with_prompt_ids

ROOT = Path(__file__).parents[3]
AGENT = "openhands_rl_plugin.contrib.trainers.harbor:OpenHandsHarborAgent"
PYTHON = os.environ.get("OPENHANDS_RL_HARBOR_PYTHON", "")
CONTAINERS = os.environ.get("OPENHANDS_RL_HARBOR_CONTAINERS", "")
IMAGE = os.environ.get("OPENHANDS_RL_HARBOR_IMAGE", "debian:12")
LOW = {"security_risk": "LOW"}


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with serve() as server:
        yield server


def turn(body: dict[str, Any]) -> int:
    return sum(each["role"] == "assistant" for each in body["messages"])


def terminal(command: str) -> dict[str, Any]:
    return says(None, call("terminal", {"command": command, **LOW}))


def gives_up(body: dict[str, Any]) -> dict[str, Any]:
    return says(None, call("finish", {"message": "Done.", **LOW}, "call-end"))


def solves(body: dict[str, Any]) -> dict[str, Any]:
    make = {"command": "create", "path": "/app/hello.txt", "file_text": "Hello, wurld!\n", **LOW}
    actions = [terminal("cat data/state.txt"), says(None, call("file_editor", make, "call-2"))]
    actions.append(says(None, call("terminal", {"command": "sed -i s/wurld/world/ hello.txt", **LOW}, "call-3")))
    return actions[turn(body)] if turn(body) < len(actions) else gives_up(body)


def waits(body: dict[str, Any]) -> dict[str, Any]:
    return terminal("sleep 40; echo late > /app/late") if turn(body) == 0 else gives_up(body)


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    return with_prompt_ids(gives_up(body), None)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs Harbor: .ci/peers harbor")
@pytest.mark.timeout(900)
@needs_bubblewrap
async def test_trials_have_rewards_details_and_documents_or_a_reason(model: ScriptedModel, tmp_path: Path):
    write_task(tmp_path / "hello", dockerfile=DOCKERFILE.replace("ubuntu:24.04", IMAGE))
    model.policies |= {"solves": solves, "gives-up": gives_up, "waits": waits, "without-ids": without_ids}

    def trial(name: str, policy: str, agent: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
        own = {"import_path": AGENT, "model_name": f"hosted_vllm/{policy}", "base_url": model.url, **(agent or {})}
        chosen = {"max_turns": 6, "collect_rollout_details": True, **kwargs}
        environment = {"type": CONTAINERS} if CONTAINERS else {"import_path": "harbor_trials:FolderEnvironment"}
        return {
            **{"task": {"path": str(tmp_path / "hello")}, "trials_dir": str(tmp_path / "trials"), "trial_name": name},
            **{"agent": {**own, "kwargs": chosen}, "environment": environment},
        }

    away = {"base_url": "http://127.0.0.1:9/v1"}
    names = {
        "solved": trial("solved", "solves", store=str(tmp_path / "store"), session_id="a"),
        "unsolved": trial("unsolved", "gives-up", {"base_url": None}, api_base=model.url),
        "without-ids": trial("without-ids", "without-ids"),
        "greedy": trial("greedy", "gives-up", temperature=0.0),
        "evaluated": trial("evaluated", "solves", temperature=0.0, collect_rollout_details=False),
        "late": trial("late", "waits", {"override_timeout_sec": 30}),
        "brief": trial("brief", "waits", timeout=10),
        "away": trial("away", "solves", away),
        "typo": trial("typo", "solves", max_turn=6),
        "suite": trial("suite", "solves", suite="swe-local"),
        "endpoint": trial("endpoint", "solves", {"base_url": None}),
    }
    told = await trials([*names.values()])
    found = dict(zip(names, told, strict=True))

    solved = found["solved"]
    assert (solved["rewards"], solved["exception"]) == ({"reward": 1.0}, None), solved["message"]
    assert solved["agent"]["name"] == "openhands-rl" and solved["agent"]["model_info"]["name"] == "solves"
    (detail,) = solved["context"]["rollout_details"]
    sent = [prompt_ids(body["messages"]) for body in model.requests["solves"] if body["temperature"] != 0]
    assert detail["prompt_token_ids"] == sent and len(sent) == 4
    assert {each for turn in detail["logprobs"] for each in turn} == {LOGPROB}
    assert [len(each) for each in detail["logprobs"]] == [len(each) for each in detail["completion_token_ids"]]
    (document,) = solved["documents"]
    metrics = [each["metrics"] for each in document["steps"] if each["source"] == "agent"]
    assert [each["prompt_token_ids"] for each in metrics] == sent and document["schema_version"] == "ATIF-v1.8"
    assert [each["logprobs"] for each in metrics] == detail["logprobs"]
    facts = solved["context"]["metadata"]
    assert (facts["n_episodes"], facts["summarization_count"]) == (4, 0)
    assert facts["openhands_rl"]["stop"] == "terminated" and facts["all_messages"][-1]["role"] == "assistant"
    assert solved["context"]["n_output_tokens"] == sum(map(len, detail["completion_token_ids"]))
    assert (tmp_path / "store").is_dir()

    assert found["unsolved"]["rewards"] == {"reward": 0.0} and found["unsolved"]["context"]["rollout_details"]
    assert found["evaluated"]["rewards"] == {"reward": 1.0}
    assert found["evaluated"]["context"]["rollout_details"] is None, "asked for by nobody"
    for name, kind, why in (
        ("without-ids", "EpisodeFailedError", "model: .*token ids"),
        ("greedy", "EpisodeFailedError", "configuration: this episode is not to be trained on: .*"),
        (
            "brief",
            "EpisodeFailedError",
            r"environment: the episode was not over after 10 s: raise --timeout$",
        ),
        ("away", "EpisodeInfrastructureError", "infrastructure: .*127.0.0.1:9.*"),
        ("late", "AgentTimeoutError", "Agent execution timed out after 30.0 seconds"),
    ):
        assert (found[name]["exception"], found[name]["context"]["rollout_details"]) == (kind, None), found[name]
        assert re.match(why, found[name]["message"]) and "\n" not in found[name]["message"]
        assert (found[name]["rewards"] is None) == (name != "late"), "only Harbor's own limit is verified"
    assert "agent.kwargs.max_turn is none of" in found["typo"]["refused"]
    assert "agent.kwargs.suite is set by Harbor" in found["suite"]["refused"]
    assert "which endpoint?" in found["endpoint"]["refused"]
    assert not [each for each in os.listdir("/proc") if each.isdigit() and "echo late" in arguments(each)]


def arguments(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


async def trials(configured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    helpers = ROOT / "tests/helpers/harbor"
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, str(helpers / "harbor_trials.py")),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(helpers)]),
            "OPENHANDS_RL_PYTHON": os.environ.get("OPENHANDS_RL_PYTHON", sys.executable),
            "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}",
        },
        **{"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE},
    )
    told, said = await process.communicate(json.dumps(configured).encode())
    assert process.returncode == 0, said.decode()[-4000:]
    return json.loads(told.splitlines()[-1])


@pytest.mark.parametrize("file", ["terminal-bench.yaml", "skyrl.yaml"])
def test_the_configurations_name_options_that_are_there(file: str):
    from openhands_rl_plugin.config.rollout import options_from_trainer

    settings = yaml.safe_load((ROOT / "evaluation/configs/harbor" / file).read_text(encoding="utf-8"))
    agents = settings.get("agents") or [settings["agent"]]
    for agent in agents:
        assert agent["import_path"] == AGENT
        own = {"api_base", "collect_rollout_details", "session_id", "store"}
        given = {name: value for name, value in agent["kwargs"].items() if name not in own}
        assert options_from_trainer(given, "agent.kwargs", "Harbor", {"suite"}).max_turns
        assert agent["kwargs"]["collect_rollout_details"] is (file == "skyrl.yaml")

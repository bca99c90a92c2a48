"""The real server and controller of agent-lightning start OpenHands, and record every call with ids and logprobs.

OPENHANDS_RL_AGENT_LIGHTNING_PYTHON    has agent-lightning and this package (``.ci/peers agent-lightning`` makes it)
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from launchers import free_port
from scripted_model import call, reply, serve

from openhands_rl_plugin.apps.rollout.rollout import VARIABLE
from openhands_rl_plugin.cli import rollout
from openhands_rl_plugin.contrib.repair.rows import repair_instances
from openhands_rl_plugin.contrib.trainers.agent_lightning import OPTIONS, TASK, OpenHandsAgent

PYTHON = os.environ.get("OPENHANDS_RL_AGENT_LIGHTNING_PYTHON", "")
SEARCH = "Thought:\nI look.\n\nAction:\nsearch[socks]"
ROOT = Path(__file__).parents[3]
RUNNER = {"AGL_OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "AGL_EVENT_URL": "http://127.0.0.1:1/events"}
AGENT = f"{OpenHandsAgent.__module__}:{OpenHandsAgent.__name__}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "configuration: the environment variable 'AGL_OPENAI_BASE_URL' is not set"),
        ({**RUNNER, TASK: "webshop-99999"}, "configuration: environment has no task webshop-99999"),
        ({**RUNNER, TASK: "webshop-3"}, "infrastructure: no model server answers at http://127.0.0.1:1/v1"),
    ],
)
def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str) -> None:
    for name in ("AGL_OPENAI_BASE_URL", "AGL_EVENT_URL", "AGL_KEY", TASK, OPTIONS, VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        OpenHandsAgent().run()
    assert expected in str(ended.value) and "\n" not in str(ended.value)


def test_the_configurations_name_what_is_there() -> None:
    page = (ROOT / "docs/howto/trainer-recipes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml title=[^\n]*\n(agentlightning:.*?)```", page, re.DOTALL)
    file = (ROOT / "evaluation/configs/agent-lightning/swe-local.yaml").read_text(encoding="utf-8")
    for text in (block, file):
        local = yaml.safe_load(text)["agentlightning"]["local"]
        assert local["agent_class"] == AGENT and set(local["env_map"]) == {TASK, OPTIONS}
        words = ["--task", "x", *shlex.split(local["env_map"][OPTIONS])]
        parser = argparse.ArgumentParser()
        rollout.add_arguments(parser)
        parsed = parser.parse_args(words)
        assert parsed.suite == "swe-local" and parsed.max_turns == "50"


@contextmanager
def started(where: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """In a folder of the test: the server keeps its configuration and log below where it runs."""
    process = subprocess.Popen(words, env={**os.environ, **variables}, cwd=where, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def until(condition: Callable[[], Any]) -> Any:
    for _ in range(1200):
        if found := condition():
            return found
        time.sleep(0.25)
    raise AssertionError("nothing happened")


def play(body: dict[str, Any]) -> dict[str, Any]:
    """A shopper, and one who mends the repair task that is shown."""
    text = "\n".join(_text_of(each["content"]) for each in body["messages"])
    instance = next((each for each in repair_instances(1, "heldout") if each.problem_statement in text), None)
    if instance is None:
        return reply(SEARCH)
    if sum(each["role"] == "assistant" for each in body["messages"]):
        return reply(None, call("finish", {"message": "Done.", "task_completed": "true"}))
    mend = f"git apply <<'EOF'\n{instance.patch}\nEOF"
    return reply(None, call("execute_bash", {"command": mend, "security_risk": "LOW"}))


def _text_of(content: Any) -> str:
    return "".join(each["text"] for each in content) if isinstance(content, list) else str(content)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """agent-lightning's own API, with its server, its controller and a model."""
    folder, port = Path(PYTHON).parent, free_port()
    where = tmp_path_factory.mktemp("agent-lightning")
    url, key = f"http://127.0.0.1:{port}", "of-the-test"
    words = [f"port={port}", "host=127.0.0.1", f"key={key}", "default_proxy.model_name=model"]
    runner = ["runner_type=local", f"agl_server.url={url}", f"agl_server.key={key}", "local_runner.poll_interval=0.5"]
    with (
        serve() as model,
        started(where, str(folder / "agl-server"), *words),
        started(where, str(folder / "agl-controller"), *runner, **{VARIABLE: sys.executable}),
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client,
    ):
        model.policies["model"] = play
        until(lambda: _answers(client))
        client.post("/api/models", json=[{"model": "model", "endpoint": model.url, "version": 3}]).raise_for_status()
        yield client


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").is_success
    except httpx.TransportError:
        return False


def ended(api: httpx.Client, task: Any, *options: str, train: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """How a rollout ended, and the events that a trainer reads."""
    names = {TASK: "input.task", OPTIONS: " ".join(options)}
    asked = {
        "input": {"task": task},
        "is_train": train,
        "config": {"local": {"agent_class": AGENT, "env_map": names}},
    }
    [made] = api.post("/api/rollouts", json=[asked]).json()
    where = f"/api/rollouts/{made['rollout_id']}"

    def state() -> str:
        state = api.get(where).json()["rollout"]["status"]["state"]
        return state if state in ("succeeded", "failed") else ""

    return until(state), api.get(f"{where}/events", params={"format": "triplet"}).json()


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs OPENHANDS_RL_AGENT_LIGHTNING_PYTHON: .ci/peers agent-lightning")
@pytest.mark.timeout(900)
class TestRealServer:
    def test_every_call_of_an_episode_is_recorded_and_its_reward_reported(self, api: httpx.Client) -> None:
        state, events = ended(api, "webshop-3", "--max-turns", "2", "--native-tool-calling", "false")
        assert state == "succeeded"
        assert [each["event_type"] for each in events] == ["model_request", "model_request", "reward"]
        for each in events[:2]:
            data = each["data"]
            assert data["response_token_ids"] == [*SEARCH.encode(), 260] and data["prompt_token_ids"]
            assert data["response_log_probs"] == [-0.5] * len(data["response_token_ids"])
        assert events[2]["data"]["value"] == 0.0

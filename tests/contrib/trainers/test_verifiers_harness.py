"""``vf-eval`` of the real verifiers runs OpenHands: every turn of what it saves has ids, a mask and logprobs.

OPENHANDS_RL_VERIFIERS_PYTHON    has verifiers and this package (``.ci/peers verifiers`` makes it)
OPENHANDS_RL_V1_PYTHON           has OpenHands V1 and this package; by default .venv-v1, which `make test-v1` makes
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.contrib.environments.verifiers import VARIABLE
from openhands_rl_plugin.evals.runs.suites import local_rows
from openhands_rl_plugin.evals.swe.instances import read_instances

pytest.importorskip("transformers")
from generate_server import END, GenerateServer, Policy, logprob_of, serve_generate, write_qwen_tokenizer

ROOT = Path(__file__).parents[3]
VERIFIERS = os.environ.get(VARIABLE, "")
V1 = Path(os.environ.get("OPENHANDS_RL_V1_PYTHON", ROOT / ".venv-v1/bin/python"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not VERIFIERS, reason=f"{VARIABLE} names no Python with verifiers: .ci/peers verifiers"),
]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def mender() -> Policy:
    """Says the patch of the task that the prompt shows, looks at what it did, and is done."""
    instances = [*read_instances(local_rows())]

    def reply(prompt: str, turn: int) -> str:
        (task,) = (each for each in instances if each.problem_statement.strip() in prompt)
        if turn == 0:
            return "I mend it.\n" + call(
                "terminal", command=f"git apply <<'EOF'\n{task.patch}\nEOF", security_risk="LOW"
            )
        if turn == 1:
            return call("terminal", command="git status --short", security_risk="LOW")
        return call("finish", message="Done.")

    return reply


def shopper(prompt: str, turn: int) -> str:
    return "Thought:\nI look.\n\nAction:\nsearch[socks]"


class Evaluation:
    """``vf-eval`` against a server; ``traces`` are those that it saved, by task."""

    def __init__(self, server: GenerateServer, tokenizer: Path, folder: Path) -> None:
        self.server = server
        self._folder = folder
        self._tokenizer = tokenizer

    def run(self, *words: str, python: str = sys.executable) -> dict[str, dict[str, Any]]:
        """Returns the trace of each task."""
        self.server.requests.clear()
        client = {
            **{"type": "train", "base-url": self.server.url, "api-key-var": "NOT_SET"},
            **{"renderer.name": "qwen3", "renderer-model-name": str(self._tokenizer)},
        }
        options = [word for name, value in client.items() for word in (f"--client.{name}", value)]
        out = self._folder / str(len([*self._folder.iterdir()]))
        options += ["-m", "policy", "--no-push", "--no-rich", "--output-dir", str(out)]
        command = [f"{Path(VERIFIERS).parent}/vf-eval", "openhands-rl-verifiers", *options, *words]
        environ = os.environ | {"HF_HUB_OFFLINE": "1", "OPENHANDS_RL_PYTHON": python}
        done = subprocess.run(command, env=environ, cwd=self._folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (file,) = out.glob("*/traces.jsonl")
        traces = [trace for line in file.read_text().splitlines() for trace in json.loads(line)["traces"]]
        return {trace["task"]["data"]["id"]: trace for trace in traces}


@pytest.fixture
def evaluation(tmp_path: Path):
    """Makes one of a policy."""
    tokenizer = write_qwen_tokenizer(tmp_path / "tokenizer")
    runs = tmp_path / "runs"
    runs.mkdir()
    with serve_generate(tokenizer, shopper) as server:

        def of(policy: Policy) -> Evaluation:
            server.policy = policy
            return Evaluation(server, tokenizer, runs)

        yield of


def check_tokens(trace: dict[str, Any], server: GenerateServer) -> list[str]:
    """Every answer has ids, masks and logprobs, and was sampled after exactly the ids before it. Returns the texts."""
    nodes, texts = trace["nodes"], []
    asked = [each["token_ids"] for each in server.requests]
    for number, node in enumerate(nodes):
        ids, mask = node["token_ids"], node["mask"]
        assert len(ids) == len(mask) > 0 and any(mask) == node["sampled"]
        assert node.get("parent") == (number - 1 if number else None), "one branch: no prompt was written anew"
        if node["sampled"]:
            sampled = [token for token, own in zip(ids, mask, strict=True) if own]
            assert node["logprobs"] == [logprob_of(token) for token in sampled]
            before = [token for each in nodes[:number] for token in each["token_ids"]]
            assert [*before, *ids[: mask.index(True)]] in asked
            texts.append(server.tokenizer.decode(sampled))
    return texts


@needs_bubblewrap
@pytest.mark.skipif(not V1.exists(), reason=f"{V1} is not there: make test-v1 makes .venv-v1")
def test_openhands_v1_works_on_ten_tasks_of_swe_local(evaluation: Callable[[Policy], Evaluation]) -> None:
    run = evaluation(mender())
    traces = run.run("-n", "10", "-c", "2", python=str(V1))
    assert len(traces) == 10 and len(run.server.requests) == 30
    for name, trace in traces.items():
        assert trace["errors"] == [] and trace["rewards"] == {"episode": {"score": 1.0, "weight": 1.0}}, trace["errors"]
        facts = trace["info"]["openhands_rl"]
        assert (facts["task_id"], facts["resolved"], facts["turns"]) == (name, True, 3)
        first, second, last = check_tokens(trace, run.server)
        assert "git apply" in first and "git status" in second and last == call("finish", message="Done.") + END
        assert trace["agent"]["config"]["harness"]["id"] == "openhands-rl-verifiers"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--env.agent.max-turns", "1"), "verifiers ended the episode (max_turns) before it was graded"),
        (("--env.agent.harness.python", VERIFIERS), "configuration: "),
        (("--env.agent.harness.episode.strategy", "BestOfN"), "BestOfN chose among what the policy sampled"),
        (("--env.agent.harness.episode.config", "none.toml"), "configuration: "),
    ],
    ids=["cut by verifiers", "no OpenHands", "a search", "no such file"],
)
def test_what_is_no_sample_has_an_error_and_no_reward(
    evaluation: Callable[[Policy], Evaluation], words: tuple[str, ...], expected: str
) -> None:
    shop = ("--env.taskset.suite", "webshop", "-n", "1", "--env.agent.harness.episode.max-turns", "2")
    (trace,) = evaluation(shopper).run(*shop, *words).values()
    assert [each["message"] for each in trace["errors"] if expected in each["message"]], trace["errors"]
    assert trace["rewards"] in ({}, {"episode": None}) and not trace["ok"] and "openhands_rl" not in trace["info"]

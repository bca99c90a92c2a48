"""``run`` where no SDK is needed: options, files, errors, a command; and ``run`` with OpenHands V0."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_model import call, reply, serve

from openhands_rl_plugin.cli import main
from openhands_rl_plugin.config.host import installed_hosts
from openhands_rl_plugin.config.toml import work_of
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

FILE = """
[llm]
model = "openai/policy"
base_url = "http://127.0.0.1:8100/v1"
temperature = 0.5

[llm.other]
model = "openai/other"

[rl]
max_turns = 7
rollout_strategy = "BestOfN"
strategy = { n = 3 }

[rl.serving]
base_url = "http://127.0.0.1:8100/v1"
model = "policy"

[agent.RLAgent.rl]
max_turns = 9
"""

COMMAND = ["run", "--base-url", "http://127.0.0.1:9/v1", "--store", "store"]
AGENT = """
import os, sys
import httpx
messages = [{"role": "user", "content": "Count."}]
for _ in range(2):
    answer = httpx.post(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
        json={"model": "counter", "messages": messages},
    ).json()
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
print("counted to", messages[-2]["content"])
sys.exit(int(sys.argv[1]) + ("TQDM_DISABLE" in os.environ))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    return path


def test_options_count_more_than_the_file_with_the_model_and_the_settings(file: Path) -> None:
    work = work_of(file)
    assert work.llm == {
        "model": "openai/policy",
        "base_url": "http://127.0.0.1:8100/v1",
        "temperature": 0.5,
        "api_key": "none",
    }
    assert work.settings.max_turns == 9 and work.rl["strategy"] == {"n": 3}
    # What the file leaves open stays open: a seed, for example, makes runs equal.
    assert set(work.rl) == {"max_turns", "rollout_strategy", "strategy", "serving"}
    work = work_of(file, ["rollout_strategy=MCTS", "max_turns=3"], model="newer", base_url="http://127.0.0.1:9/v1")
    assert (work.llm["model"], work.llm["base_url"]) == ("openai/newer", "http://127.0.0.1:9/v1")
    assert work.settings.serving.model == "newer" and work.settings.serving.base_url == "http://127.0.0.1:9/v1"
    assert work.settings.max_turns == 3
    assert work.settings.rollout_strategy == "MCTS" and "strategy" not in work.rl


def test_a_key_is_read_from_the_environment_and_never_among_the_settings(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    work = work_of(file, ["serving.api_key_env=MY_KEY"])
    assert work.llm["api_key"] == "sk-secret" and "sk-secret" not in str(work.rl)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "-t", "Think."], "error: which model? give --model NAME --base-url URL"),
        (["run", "-f", "absent.md"], "error: --file: absent.md cannot be read"),
        (["run", "-t", "Think.", "--config", "absent.toml"], "error: absent.toml: there is no such file"),
        (["run", "-t", "Think.", "--", "true"], "error: give either a task (-t TEXT, -f FILE) or a command after --"),
        (["run", "--", "true"], "error: which model server? give --base-url URL"),
        ([*COMMAND, "--set", "rollout_strategy=MCTS", "--", "true"], "MCTS needs an environment that can fork"),
        ([*COMMAND, "--", "./absent"], "error: ./absent cannot be started in .: No such file or directory"),
        ([*COMMAND, "--attempts", "2", "--", "true"], "after --, which has no --attempts"),
        (["run", "-t", "Think.", "--workspace", "./typo"], "error: --workspace: there is no folder typo; --create"),
        (["run", "-t", "Think.", "--model", "nosuch"], "does not serve nosuch. It has: m"),
        (["run", "-t", "Think.", "--model", "m", "--base-url", "http://127.0.0.1:9/v1"], "no model server answers at"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the host starts, and before a folder is made."""
    monkeypatch.chdir(tmp_path)
    with serve() as server:
        server.script("m", [])
        server.context = 8192
        where = ["--base-url", server.url] if "--model" in words and "--base-url" not in words else []
        assert main([*words, *where]) == 1
    err = capfd.readouterr().err
    assert expected in err and err.count("\n") == 1, err
    assert not (tmp_path / "typo").exists() and not server.requests["m"]


def counts(body: Any) -> Any:
    if "Yes or No" in body["messages"][-1]["content"]:
        return reply("Yes")
    return reply("two" if "Go on." in str(body["messages"]) else "one")


@pytest.mark.parametrize(("code", "options"), [(7, []), (3, ["--set", "max_turns=2"])])
async def test_another_agents_command_is_recorded_and_its_exit_code_returned(
    tmp_path: Path, code: int, options: list[str]
) -> None:
    """With a strategy each of its completions is the best of two."""
    best = '[rl]\nrollout_strategy = "BestOfN"\nstrategy = { n = 2, value = "model" }\n'
    (tmp_path / "config.toml").write_text(best if options else "[rl]\n")
    (tmp_path / "project").mkdir()
    (tmp_path / "project/agent.py").write_text(AGENT)
    environ = {**os.environ, "HOME": str(tmp_path), "OPENHANDS_RL_API_KEY": "sk-for-other-servers"}
    environ.pop("TQDM_DISABLE", None)  # the bars of the command are its own
    with serve() as server:
        server.policies["counter"] = counts
        command = ["run", "--base-url", server.url, "--store", "store", "--workspace", "project", *options]
        words = [sys.executable, "-m", "openhands_rl_plugin", *command, "--", sys.executable, "agent.py", str(code)]
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    counted, recorded = done.stdout.splitlines()
    assert counted == "counted to two"
    assert re.match(r"recorded in store as \w{8}: 2 completions; token ids: yes; reward: not scored", recorded)
    async with FileTrajectoryStorage(tmp_path / "store") as storage:
        [episode] = [each async for each, _ in storage.find(TrajectoryFilter())]
    assert (episode.stop, episode.evidence["exit_code"]) == (StopReason.TERMINATED, code)
    assert [message.content for message in episode.messages()] == ["Count.", "one", "Go on.", "two"]
    assert (episode.strategy.name, episode.usage.calls > 2) == (("BestOfN", True) if options else ("gateway", False))


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.skipif("v0" not in installed_hosts(), reason="needs OpenHands V0")
@pytest.mark.shows("openhands-rl run")
def test_run_rolls_out_a_task_with_openhands_v0(tmp_path: Path) -> None:
    answers = [
        reply("I write.", call("execute_bash", {"command": "echo hello > greeting.txt", "security_risk": "LOW"})),
        reply("Done.", call("finish", {"message": "It is written."})),
    ]
    environ = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "MY_KEY": "sk-secret"}
    environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environ |= {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    for name in ("openhands", "json", "modal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__file__} was executed')\n")
    with serve() as server:
        server.script("writer", answers * 2)
        given = ["--model", "writer", "--base-url", server.url, "--store", "store"]
        given += ["--set", "serving.api_key_env=MY_KEY"]
        (tmp_path / "config.toml").write_text("[llm]\nnative_tool_calling = true\n[agent]\nenable_mcp = false\n[rl]\n")
        command = ["openhands-rl", "run", "-t", "Write hello", "--workspace", "project", "--create", *given]
        several, options = [*command, "--attempts", "2"], {"cwd": tmp_path, "env": environ, "timeout": 250}
        done = subprocess.run(several, capture_output=True, text=True, **options)
        failed = subprocess.run(command[:-2], capture_output=True, text=True, **options)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert [(tmp_path / f"project-attempt-{at}/greeting.txt").read_text() for at in (1, 2)] == ["hello\n"] * 2
    assert len(re.findall(r"recorded in store as \w{8}: 2 completions; token ids: yes", output)) == 2, output
    assert re.search(r"2 attempts at write-hello-\w{8}: 0 scored; openhands-rl studio store", output), output
    assert failed.returncode == 1 and "0 completions; token ids: none" in failed.stdout, failed.stderr
    assert "sk-secret" not in output and server.requests["writer"]
    assert not list(tmp_path.glob("openhands-rl-*"))

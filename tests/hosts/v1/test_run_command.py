"""``openhands-rl run`` as a process, with the real SDK: a folder is worked on, the last line says what was recorded."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted_model import ScriptedModel, call, reply
from sdk_play import finish, repair, stored, think

from openhands_rl_plugin.core.types import StopReason

pytestmark = pytest.mark.timeout(240)

PROGRAM = str(Path(sys.executable).parent / "openhands-rl")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The command in an empty home."""
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.Popen(
        [PROGRAM, *words], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.shows("openhands-rl run")
async def test_a_task_is_worked_on_and_the_last_line_names_what_was_recorded(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.script("run-repair", repair(Path("/workspace")))
    for name in ("openhands", "json", "colorama"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__file__} was executed')\n")
    given = ["--workspace", str(workspace), "--model", "run-repair", "--base-url", server.url, "--store", "store"]
    process = start(tmp_path, "run", "-t", "Correct calc.py.", *given)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    lines = out.splitlines()
    assert lines[:3] == ["I look.", "[file_editor: view /workspace/calc.py [1, 2]]", "I correct it."]
    assert "done" in lines and (workspace / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED
    pattern = rf"recorded in store as {episode.id[:8]}: 4 completions; token ids: yes; reward: not scored"
    assert re.match(pattern, lines[-1]), lines[-1]
    assert "OpenHands SDK" not in out + err and "price" not in err and "Cost" not in err and "INFO" not in err, err


@pytest.mark.slow
async def test_ctrl_c_ends_a_completion_at_once_and_what_was_sampled_stays(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.script("run-stopped", [think("one")])

    def slow(body: dict) -> dict:
        server.delay = 15.0
        return think("one")

    server.policies["run-stopped"] = slow
    (tmp_path / "config.toml").write_text(
        f'[llm]\nmodel = "openai/run-stopped"\nbase_url = "{server.url}"\nnum_retries = 0\nnative_tool_calling = true\n'
        '[rl]\nstorage = {path = "store"}\n'
    )
    process = start(tmp_path, "run", "-t", "Think.", "--workspace", str(workspace))
    assert process.stdout is not None
    assert process.stdout.readline() == "[think: one]\n"
    while not server.at_once:
        time.sleep(0.05)
    pressed, server.delay = time.monotonic(), 0.0
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, out + err
    assert time.monotonic() - pressed < 12
    assert "recorded in store as " in out.splitlines()[-1] and "never trained on" in out
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.UNFINISHED and len([node for node in episode.nodes if node.sampled]) == 1


@pytest.mark.slow
@pytest.mark.shows("kept after a killed process")
async def test_what_was_answered_before_a_kill_is_stored(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.policies["run-killed"] = lambda body: think("hm", f"call-{len(body['messages'])}")
    given = ["--workspace", str(workspace), "--model", "run-killed", "--base-url", server.url, "--store", "store"]
    process = start(tmp_path, "run", "-t", "Think.", *given)
    try:
        while len(server.requests["run-killed"]) < 3:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    asked = len(server.requests["run-killed"])
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.UNFINISHED
    # The request after an answer is sent when the answer is stored, and the last request may have been answered.
    assert len(list(episode.sampled())) in (asked - 1, asked)
    heard = [message.content for message in episode.messages() if message.role == "tool"]
    assert len(heard) >= 1 and all(node.tokens is not None for node in episode.sampled())


def finished(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    """The exit code, and the lines of both outputs."""
    out, err = process.communicate(timeout=400)
    return process.returncode, out.splitlines(), err.splitlines()


ATTEMPTS = """
[llm]
model = "openai/{model}"
base_url = "{url}"
native_tool_calling = true
[rl]
max_response_length = 64
storage = {{ path = "store" }}
workspace = {{ prompt = "compact" }}
reward = {{ name = "command", options = {{ command = "python3 -c 'import calc; assert calc.add(1, 2) == 3'" }} }}
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_attempts_at_a_task_of_ones_own_are_a_group_to_train_on(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    from tiny_model import write_model

    begun: list[str] = []

    def mends_every_second(body: dict) -> dict:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if not turn:
            begun.append("")
        right, wrong = "sed -i 's/a - b/a + b/' calc.py", "sed -i 's/a - b/b - a/' calc.py"
        return finish() if turn else reply(None, call("terminal", {"command": (wrong, right)[len(begun) % 2]}))

    server.policies["run-attempts"] = mends_every_second
    (tmp_path / "config.toml").write_text(ATTEMPTS.format(model="run-attempts", url=server.url))
    code, out, err = finished(
        start(tmp_path, "run", "-t", "Correct calc.py.", "--workspace", "project", "--attempts", "3")
    )
    assert code == 0, (out, err)
    episodes = await stored(tmp_path / "store")
    assert [each.stop for each in episodes] == [StopReason.TERMINATED] * 3
    task, group = episodes[0].task.id, episodes[0].group_id
    assert task.startswith("correct-calc-py-") and {(each.task.id, each.group_id) for each in episodes} == {
        (task, group)
    }
    assert f"3 attempts at {task}: 2 of 3 succeeded; pass@1 0.67, pass@3 1.00" in out[-1]
    assert "a - b" in (workspace / "calc.py").read_text(), "the folder itself stays as it is"
    mended = [(tmp_path / f"project-attempt-{number}" / "calc.py").read_text() for number in (1, 2, 3)]
    assert ["a + b" in text for text in mended] == [True, False, True]

    code, out, err = finished(start(tmp_path, "run", "-t", "Correct calc.py.", "--workspace", "project"))
    assert code == 0, (out, err)
    *_, again = await stored(tmp_path / "store")
    assert again.task == episodes[0].task and again.group_id != group, "the same task, of another start"

    write_model(tmp_path / "model", max_position_embeddings=8192)
    options = ["--model", "model", "--adapters", "adapters", "--task", task, "--algorithm"]
    code, out, err = finished(start(tmp_path, "train", "store", *options, "dpo", "--dry-run"))
    assert code == 0 and "  pairs: 2, 0 of them chosen by people" in out, (out, err)
    options += ["grpo", "--set", "training.dtype=float32", "training.lora_rank=2", "training.num_epochs=1"]
    code, out, err = finished(start(tmp_path, "train", "store", *options))
    assert code == 0 and "  episodes: 4 used; left out: none" in out, (out, err)
    assert (tmp_path / "adapters" / "policy-v000001" / "adapter_model.safetensors").is_file()

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
from scripted_model import ScriptedModel
from sdk_play import repair, stored, think

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.hosts.v1.task import make_llm

pytestmark = pytest.mark.timeout(240)

SECRET = "sk-never-shown"
PROGRAM = str(Path(sys.executable).parent / "openhands-rl")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """The command in an empty home."""
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    return subprocess.Popen(
        [PROGRAM, "run", *words], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.shows("openhands-rl run")
async def test_a_task_is_worked_on_and_the_last_line_says_what_was_recorded(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.script("run-repair", repair(Path("/workspace")))
    given = ["--workspace", str(workspace), "--model", "run-repair", "--base-url", server.url, "--store", "store"]
    process = start(tmp_path, "-t", "Correct calc.py.", *given)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    lines = out.splitlines()
    assert lines[:3] == ["I look.", "[file_editor: view /workspace/calc.py]", "I correct it."]
    assert "done" in lines and (workspace / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED
    pattern = rf"recorded in store as {episode.id[:8]}: 4 completions; token ids: yes; reward: not scored"
    assert re.match(pattern, lines[-1]), lines[-1]
    assert "OpenHands SDK" not in out + err and "price" not in err and "Cost" not in err and "INFO" not in err, err


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
    process = start(tmp_path, "-t", "Think.", "--workspace", str(workspace))
    assert process.stdout is not None
    assert process.stdout.readline() == "(one)\n"
    while not server.at_once:
        time.sleep(0.05)
    pressed, server.delay = time.monotonic(), 0.0
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, out + err
    assert time.monotonic() - pressed < 12
    assert "recorded in store as " in out.splitlines()[-1] and "never trained on" in out
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.ERROR and len([node for node in episode.nodes if node.sampled]) == 1


@pytest.mark.slow
@pytest.mark.shows("kept after a killed process")
async def test_what_was_answered_before_a_kill_is_stored(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.policies["run-killed"] = lambda body: think("hm", f"call-{len(body['messages'])}")
    given = ["--workspace", str(workspace), "--model", "run-killed", "--base-url", server.url, "--store", "store"]
    process = start(tmp_path, "-t", "Think.", *given)
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


def test_a_setting_that_the_sdk_refuses_is_named_without_its_value() -> None:
    with pytest.raises(ConfigError) as refused:
        make_llm({"model": "openai/x", "num_retries": "many", "api_key": [SECRET]})
    said = str(refused.value)
    assert said.startswith("[llm] ") and "[llm] num_retries: must be a valid integer" in said and SECRET not in said


def test_settings_of_v0_that_v1_does_not_have_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    given = {"model": "openai/x", "temperature": 0.5, "custom_llm_provider": "me", "native_tool_calling": False}
    with caplog.at_level("WARNING", logger="openhands"):  # a runner in another test may have raised it
        llm = make_llm(given)
    assert (llm.temperature, llm.native_tool_calling, llm.reasoning_effort) == (0.5, False, None)
    assert "[llm] custom_llm_provider: not a setting of this OpenHands" in caplog.text

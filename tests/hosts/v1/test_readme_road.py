"""README's road for OpenHands V1 as it is written: a task, a verdict, training, publishing, the next run samples it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from fixing_model import write_fixer

from openhands_rl_plugin import AdapterStore
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.server import running_server

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
V1 = README[README.index("### In OpenHands V1") : README.index("### In OpenHands V0")]
ROAD = V1[V1.index("From the work to a better adapter") :]
BIN = Path(sys.executable).parent


def run(command: str, folder: Path) -> str:
    """Both outputs of one of README's commands, in an empty home."""
    environ = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": f"{folder}/home",
        "TMPDIR": str(folder),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readmes_road_from_a_task_to_an_adapter_that_the_next_run_samples_from(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    write_fixer(tmp_path / "model", ("terminal", {"command": "echo hi > it"}), ("finish", {"message": "Done."}))
    server = ServerConfig(model=str(tmp_path / "model"), served_model_name="model", port=0, dtype="float32", threads=1)
    [config] = re.findall(r"```toml\n(.*?)```", V1, re.DOTALL)
    agent, *rest = re.findall(r"```\n(.*?)```", ROAD, re.DOTALL)[0].strip().splitlines()
    with running_server(server) as url:
        text = config.replace("http://127.0.0.1:8100", url)
        # The small model's calls are native, and its answers short.
        text = text.replace("native_tool_calling = false", "native_tool_calling = true")
        (tmp_path / "config.toml").write_text(re.sub(r"max_response_length = \d+", "max_response_length = 64", text))
        output = run(agent, tmp_path)
        assert (tmp_path / "workspace/it").read_text() == "hi\n"
        known = re.search(r"recorded in ~/.openhands/rl_trajectories as (\w{8}): 2 completions; token ids: yes", output)
        assert known and "reward: not scored (openhands-rl score " in output, output
        listed, *later = [run(line.replace("3f2a9c1d", known[1]), tmp_path) for line in rest]
        assert known[1] in listed and "make-the-failing-test-pass" in listed
        assert len(later) == 2
        (version,) = AdapterStore(tmp_path / "home/.openhands/rl_adapters").versions("policy")
        run(agent, tmp_path)
    table = run("openhands-rl list ~/.openhands/rl_trajectories --json", tmp_path).splitlines()
    assert version.name == "policy-v000001"
    assert [f'"version":{number}' in line for line, number in zip(table, ("null", 1), strict=True)] == [True, True]

"""``openhands-rl loop`` over repository tasks, with the installed OpenHands: what passes the tests is learnt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixing_model import write_chooser
from git_backend import make_instances
from needs import needs_bubblewrap
from train_store import stored

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.evals.swe.instances import row_of
from openhands_rl_plugin.training.loop.plan import LoopState

SHELL = {"v0": "execute_bash", "v1": "terminal"}[host_of(RLSettings())]
TESTS = "import adder; print('PASSED' if adder.add(2, 3) == 5 else 'FAILED', 'check.py::adds')"
SETTINGS = """
[rl]
max_turns = 4
max_prompt_length = 30000
max_response_length = 64
max_workers = 2
storage = {{ path = "{folder}/trajectories", durable = false }}
[rl.training]
algorithm = "grpo"
dtype = "float32"
lora_rank = 4
lora_alpha = 8
learning_rate = 3e-2
num_epochs = 1
[rl.loop]
iterations = 2
tasks_per_iteration = 2
samples_per_task = 6
held_out = 2
[rl.serving]
adapters_path = "{folder}/adapters"
"""


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write_rows(folder: Path, count: int) -> Path:
    """Tasks of one repository, beside a mirror of it."""
    instances = make_instances(folder, count)
    (folder / "mirror" / "owner").mkdir(parents=True)
    (folder / "origin").rename(folder / "mirror" / "owner" / "adder.git")
    added = f"--- /dev/null\n+++ b/check.py\n@@ -0,0 +1 @@\n+{TESTS}\n"
    own = {
        "test_command": "python check.py",
        "packages": [],
        "test_files": [],
        "test_patch": f"diff --git a/check.py b/check.py\nnew file mode 100644\n{added}",
        "FAIL_TO_PASS": ["check.py::adds"],
    }
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({**row_of(each), **own}) + "\n" for each in instances))
    return file


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_bubblewrap
def test_what_passes_the_tests_is_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path, 4)
    mends, looks = (call(SHELL, command=command) for command in ("sed -i s/-/+/ adder.py", "ls"))
    model = write_chooser(tmp_path / "model", [mends, looks], call("finish", message="Done."))
    config = tmp_path / "config.toml"
    config.write_text(SETTINGS.format(folder=tmp_path))
    words = ["loop", str(rows), "--config", str(config), "--model", str(model), "--run-dir", str(tmp_path / "run")]
    where = ["--mirror", str(tmp_path / "mirror"), "--cache", str(tmp_path / "cache"), "--processes", "1"]
    assert cli.main([*words, *where]) == 0
    printed = capsys.readouterr().out
    state = LoopState.load(tmp_path / "run" / "state.json")
    assert [record.name for record in state.records] == [
        "evaluate-base",
        "iteration-000",
        "iteration-001",
        "evaluate-final",
    ]
    found = stored(tmp_path / "trajectories")
    assert len(found) == 2 + 2 * 12 + 2 and not [each for each, _ in found if each.failure]
    for trajectory, scores in found:
        (first,) = next(trajectory.sampled()).message.tool_calls
        assert [score.reward for score in scores] == [float("sed" in first.arguments)]
        assert all(node.tokens is not None for node in trajectory.sampled())
    last = [scores[0].reward for trajectory, scores in found if trajectory.run_id.endswith("evaluate-final")]
    assert last == [1.0, 1.0], printed

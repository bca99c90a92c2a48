"""``openhands-rl evaluate repair-1`` with a model that repairs everything, and ``grade`` of the published fixes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.host import TOOLS, installed_hosts
from openhands_rl_plugin.contrib.repair.oracle import ORACLE, RepairOracle, serve_oracle
from openhands_rl_plugin.contrib.repair.rows import repair_instances
from openhands_rl_plugin.evals.swe.dataset import row_of

CONFIG = '[rl.workspace]\nprompt = "compact"\n[rl.storage]\npath = "{folder}/store"\n'


@needs_bubblewrap
@pytest.mark.slow
def test_the_oracle_solves_held_out_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config, out = tmp_path / "config.toml", tmp_path / "out"
    config.write_text(CONFIG.format(folder=tmp_path))
    words = ["evaluate", "repair-1", "--config", str(config), "--agent", "RLAgent", "--limit", "2", "--out", str(out)]
    with serve_oracle(RepairOracle(repair_instances(1, "heldout"), TOOLS[installed_hosts()[0]])) as url:
        model = ["--model", f"openai/{ORACLE}", "--base-url", url, "--set", "max_turns=12", "--processes", "0"]
        assert cli.main([*words, *model, "--no-native-tool-calling"]) == 0, capsys.readouterr()
    rows = [json.loads(line) for file in out.rglob("output.jsonl") for line in file.read_text().splitlines()]
    assert [row["test_result"]["report"]["resolved"] for row in rows] == [True, True]


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.skipif(find_spec("uv") is None, reason="uv is not installed, which the local back end asks for")
def test_the_published_fixes_are_graded_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row_of(each)) + "\n" for each in repair_instances(1, "train")[:3]))
    assert cli.main(["grade", "gold", "--instances", str(rows), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("3 resolved")

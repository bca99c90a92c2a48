"""The command and the scripts: what they print before anything is rolled out, and their bad inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from git_backend import make_instances

from openhands_rl_plugin.cli import main
from openhands_rl_plugin.config.host import agent_named, host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.evals.runs.plan import KEY_VARIABLE
from openhands_rl_plugin.evals.swe.instances import row_of

ROOT = Path(__file__).parents[3]
STOCK = agent_named("stock", host_of(RLSettings()))
SCRIPTS = sorted(file for file in (ROOT / "evaluation" / "scripts").glob("*.sh") if file.name != "common.sh")
CONFIG = """\
[llm]
num_retries = 7
[llm.eval]
model = "openai/org/qwen"
base_url = "http://127.0.0.1:1/v1"
api_key = "sk-planted-0123456789abcdef"
temperature = 0.25
[rl]
rollout_strategy = "BestOfN"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(KEY_VARIABLE, "")
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    return file


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row_of(each)) + "\n" for each in make_instances(tmp_path, 5)))
    return file


def test_a_dry_run_shows_what_would_be_done(
    rows: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["evaluate", str(rows), "--llm", "eval", "--config", str(config), "--out", str(tmp_path / "out")]
    assert main([*words, "--agent", "RLAgent", "--runs", "2", "--include", "*-1", "*-3", "--dry-run"]) == 0
    seen = capsys.readouterr().out
    assert "2 instances, 2 runs" in seen and "RLAgent with BestOfN" in seen and "org/qwen at http://127.0.0.1:1" in seen
    assert "rows-test/RLAgent/qwen_maxiter_50_N_v1-run_1" in seen and "temperature 1, 0 done" in seen
    assert not (tmp_path / "out").exists() and "sk-planted" not in seen
    assert main([*words, "--dry-run"]) == 0
    assert "temperature 0.25, 0 done" in capsys.readouterr().out, "a stock agent samples as the model's section says"


NOTED = {"strategy": "BestOfN", "strategy_options": {"n": 4}, "temperature": 1.0, "seed": 0}
SAME = ["--set", "rollout_strategy=BestOfN", "strategy.n=4"]


@pytest.mark.parametrize(
    ("details", "words", "seen"),
    [
        (NOTED, SAME, ""),
        (NOTED, [], '(strategy_options: {"n": 4}, now {})'),
        (NOTED, [*SAME, "sampling.seed=1"], "(seed: 0, now 1)"),
        ({"workspace": {"isolation": "bubblewrap", "prompt": "compact"}}, [], '"prompt": "compact"}, now'),
    ],
)
def test_results_are_not_shown_as_those_of_other_settings(
    details: dict, words: list[str], seen: str, rows: Path, config: Path, tmp_path: Path, capsys
):
    directory = tmp_path / "out/rows-test/RLAgent/qwen_maxiter_50_N_v1-run_0"
    directory.mkdir(parents=True)
    metadata = {"llm_config": {"model": "openai/org/qwen", "top_p": 1.0}, "details": details}
    (directory / "metadata.json").write_text(json.dumps(metadata))
    (directory / "output.jsonl").write_text('{"instance_id": "owner__adder-1"}\n')
    command = ["evaluate", str(rows), "--llm", "eval", "--config", str(config), "--out", str(tmp_path / "out")]
    assert main([*command, "--agent", "RLAgent", *words, "--dry-run"]) == (1 if seen else 0)
    printed = capsys.readouterr()
    if seen:
        (line,) = printed.err.splitlines()
        assert seen in line and str(directory) in line and "--note or another --out" in line
    else:
        assert "1 done" in printed.out


def test_whose_adapter_is_evaluated(rows: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A version of an adapter is no base model, or nothing could be trained on its episodes."""
    config.write_text(CONFIG.replace("[llm]", '[llm]\nbase_url = ""') + '[rl.serving]\nmodel = "org/base"\n')
    words = ["evaluate", str(rows), "--agent", "RLAgent", "--out", str(tmp_path / "out"), "--dry-run"]
    there = ["--base-url", "http://127.0.0.1:1/v1"]
    for options, seen in (
        (["--model", "policy-v000007", "--config", str(config)], "policy-v000007 on org/base at https://api.openai"),
        (["--model", "policy-v000007", "--base-model", "other", *there], "policy-v000007 on other at http://127"),
    ):
        assert main([*words, *options]) == 0
        assert seen in capsys.readouterr().out
    assert main([*words, "--model", "policy-v000007"]) == 1
    assert "policy-v000007 is a version of an adapter: give its base model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["swe-bench-light"], "unknown suite 'swe-bench-light'; available: "),
        (["ROWS", "--include", "django__*"], "no instance matches 'django__*'"),
        (["ROWS", "--llm", "evil"], "unknown [llm] section 'evil'; available: eval"),
        (["environment", "--agent", "RLAgent"], "--tasks N"),
        (["webshop"], f"webshop is an environment, which only RLAgent supports, not {STOCK}"),
        (["swe-local", "--dataset-file", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_options_are_clear_lines(
    rows: Path, config: Path, capsys: pytest.CaptureFixture[str], words: list[str], seen: str
):
    given = [str(rows) if word == "ROWS" else word for word in words]
    llm = [] if "--llm" in words else ["--llm", "eval"]
    assert main(["evaluate", *given, *llm, "--config", str(config), "--dry-run"]) in (1, 2)
    assert seen in capsys.readouterr().err


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_script_explains_itself(script: Path):
    assert subprocess.run([script, "--help"], capture_output=True, text=True).stdout.startswith(script.name)


def test_a_rollout_script(config: Path, tmp_path: Path):
    program = f"{sys.executable} -m openhands_rl_plugin.cli"
    done = subprocess.run(
        [ROOT / "evaluation/scripts/rollout-swe-train-full.sh", "eval", "t1", "--dry-run"],
        env={"PATH": "/usr/bin:/bin", "CONFIG": str(config), "OPENHANDS_RL": program, "OUT": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "20 runs, 64 at a time" in done.stdout and "qwen_maxiter_50_N_v2.2-no-hint-t1-run_0" in done.stdout


def test_an_environment_is_evaluated_within_the_bounds_of_training(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bounds = "max_turns = 7\nmax_prompt_length = 1500\nmax_response_length = 90\nmax_obs_length = 300\nmax_workers = 3"
    own = tmp_path / "bounds.toml"
    own.write_text(f'{config.read_text()}env_name = "agentgym/babyai"\n{bounds}\n')
    words = ["evaluate", "environment", "--tasks", "2", "--config", str(own), "--llm", "eval", "--agent", "RLAgent"]
    words += ["--out", str(tmp_path / "out"), "--dry-run"]
    assert main(words) == 0
    seen = capsys.readouterr().out
    assert "3 at a time" in seen and "at most 7 iterations" in seen
    assert "in tokens: prompt 1,500, answer 90, observation 300" in seen
    assert "resolved by a return of at least 0.5" in seen

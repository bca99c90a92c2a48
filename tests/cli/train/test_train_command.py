"""``openhands-rl train``: from stored episodes to a new version, to a server, or to one clear line."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from train_store import TINY, episode, store_of, stored

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.records import LabelKind
from openhands_rl_plugin.core.types import Failure, FailureKind, PolicyRef, Task
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.rollout.scoring import add_label
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message="away", boundary="test")
    foreign = PolicyRef(base_model="tiny", adapter="other", version=1)
    return store_of(
        tmp_path / "store",
        *(episode(number, float(number % 2)) for number in range(4)),
        episode(4, 1.0, failure=failure),
        episode(5, 1.0, policy=foreign),
    )


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def scores_in(store: Path) -> list[str]:
    return [score.reward_version for _, scores in stored(store) for score in scores]


def test_versions_follow_each_other(store: Path, model: Path, tmp_path: Path, capsys: Capture) -> None:
    adapters = tmp_path / "adapters"
    words = ["train", str(store), "--model", str(model), "--adapters", str(adapters), "--adapter", "shop", *TINY]
    assert cli.main([*words, "--algorithm", "dapo", "--reward", "success"]) == 0
    printed = capsys.readouterr().out
    assert "shop from the base model, by dapo" in printed
    assert "episodes: 4 used; left out:\n" in printed and "\n    1 by other models" in printed
    assert "\n    1 failed: infrastructure\n" in printed
    assert "shop-v000001: steps 1, " in printed
    assert scores_in(store) == ["success-1@environment"] * 5, "the one of another adapter is scored too"
    serving = ServerConfig(model=str(model), served_model_name="tiny", port=0, dtype="float32", adapters="/")
    with running_server(serving) as url:
        assert cli.main([*words, "--publish", "--set", f"serving.base_url={url}/v1"]) == 0
        served = {card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]}
    assert served == {"tiny", "shop-v000002"}
    assert "shop from shop-v000001, by reinforce++-baseline" in capsys.readouterr().out
    assert cli.main([*words, "--from", "base", "--algorithm", "dpo"]) == 0
    versions = AdapterStore(adapters).versions("shop")
    assert [each.parent for each in versions] == [None, "shop-v000001", None]
    assert versions[1].base_model == "tiny" and versions[1].step == 2
    lines = (adapters / "shop.training" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["done"] for line in lines] == [1]


def test_a_dry_run_shows_what_would_be_trained_and_leaves_nothing(
    store: Path, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "adapters"), "--dry-run"]
    assert cli.main([*words, "--algorithm", "rejection-sampling", "--set", "training.keep_best=5"]) == 0
    printed = capsys.readouterr().out
    assert "policy from the base model, by rejection-sampling" in printed
    causes = ("1 by other models", "2 without a signal", "1 failed: infrastructure\n")
    assert "episodes: 2 used; left out:\n" in printed and all(f"\n    {cause}" in printed for cause in causes)
    assert "sequences: 2; tokens: 106, of them trained 20; steps: 3" in printed
    assert "memory: about" in printed
    assert not (tmp_path / "adapters").exists() and scores_in(store) == []


def test_the_reward_comes_from_the_configuration_or_from_options(
    store: Path, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[rl.reward]\nname = "success"\noptions = { threshold = 2.0 }\n')
    words = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "adapters"), *TINY]
    assert cli.main([*words, "--config", str(config)]) == 1
    assert "nothing to compare" in _printed(capsys) and scores_in(store) == ["success-1@2"] * 5
    assert cli.main([*words, "--config", str(config), "--set", "reward.options.threshold=0.5"]) == 0, "over the file"
    assert cli.main([*words, "--config", str(config), "--reward", "return"]) == 0
    assert sorted(set(scores_in(store))) == ["return-1", "success-1@0.5", "success-1@2"]


def test_a_version_is_published_to_all_servers_of_the_configuration(
    store: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """With the key that they ask for, below the directory and under the name that ``[rl.serving]`` says."""
    monkeypatch.setenv("KEY_OF_A_TEST", "a-key-of-a-test")
    serving = ServerConfig(
        model=str(model), served_model_name="tiny", port=0, dtype="float32", api_key_env="KEY_OF_A_TEST", adapters="/"
    )
    config = tmp_path / "config.toml"
    with running_server(serving) as one, running_server(serving) as two:
        config.write_text(
            f'[rl.serving]\nbase_urls = ["{one}/v1", "{two}/v1"]\napi_key_env = "KEY_OF_A_TEST"\n'
            f'adapter = "own"\nadapters_path = "{tmp_path / "adapters"}"\n'
        )
        words = ["train", str(store), "--model", str(model), "--config", str(config), *TINY]
        assert cli.main([*words, "--publish"]) == 0
        key = {"authorization": "Bearer a-key-of-a-test"}
        for url in (one, two):
            assert "own-v000001" in httpx.get(f"{url}/v1/models", headers=key).text
    assert f"own-v000001 is in use at {one}/v1, {two}/v1" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", ["sft", "reinforce++"])
def test_what_only_measures_is_not_learnt_from_unless_it_is_named(
    algorithm: str, store: Path, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    splits = ("heldout", "held-out", "validation", "test", "heldout")
    measured = (
        episode(10 + at, float(at > 3), task=Task(id="other", environment="shop", split=split))
        for at, split in enumerate(splits)
    )
    store_of(store, *measured)
    words = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "adapters")]
    words += ["--algorithm", algorithm, *TINY]
    assert cli.main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n    {cause}" in printed for cause in ("4 held out", "1 by other models", "1 failed: infra"))
    assert cli.main([*words, "--dry-run", "--split", "heldout"]) == 0
    output = capsys.readouterr().out
    assert f"episodes: {2 if algorithm == 'reinforce++' else 1} used" in output and "held out" not in output


WRONG = [
    (["--publish"], "--publish: there is no server to publish to: set base_url in [rl.serving]"),
    (["--set", "training.learning_rate=fast"], "[rl.training] learning_rate: must be a valid number"),
    (["--set", "training.method=full", "--publish"], "no running server loads"),
    (["--set", "fast"], "--set fast: give KEY=VALUE"),
    (["--from", "9"], "--from 9: policy has no such version"),
    (["--reward", "retrun"], "unknown reward 'retrun'; available: command, "),
    (["--run", "no-such-run"], "no stored episode of policy or a base model matches"),
    (["--algorithm", "grpo", "--min-reward", "0.5"], "nothing to compare"),
    (["--algorithm", "sft", "--set", "training.imitate_above=1"], "nothing to imitate"),
    (["--model", "no-such-model"], "--model no-such-model: this is not the folder of a model"),
]


@pytest.mark.parametrize(("options", "why"), WRONG, ids=[" ".join(options) for options, _ in WRONG])
def test_wrong_input_is_one_line(
    options: list[str], why: str, store: Path, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "adapters"), *options]
    assert cli.main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and why in line


@pytest.mark.slow
def test_an_interrupted_training_ends_at_once_and_goes_on(model: Path, store: Path, tmp_path: Path) -> None:
    words = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "adapters"), *TINY]
    words += ["--set", "training.num_epochs=300", "training.checkpoint_steps=5"]
    lines = tmp_path / "adapters" / "policy.training" / "metrics.jsonl"

    def steps() -> list[int]:
        return [json.loads(line)["done"] for line in lines.read_text().splitlines()] if lines.exists() else []

    command = [sys.executable, "-m", "openhands_rl_plugin.cli", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=default_interrupts) as process:
        deadline = time.monotonic() + 100
        while len(steps()) < 12 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=20)[1]
    assert process.returncode == 130 and "interrupted; the same command continues" in printed
    before = steps()
    assert len(before) < 200, "it ended where it was"
    assert cli.main(words) == 0
    assert steps() == list(range(1, 301)), "and went on from the last checkpoint"


def default_interrupts() -> None:
    """As in a terminal; what runs in the background ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_episodes_of_two_models_are_not_mixed(model: Path, tmp_path: Path, capsys: Capture) -> None:
    mixed = store_of(tmp_path / "mixed", episode(0, 1.0), episode(1, 0.0), episode(2, 1.0, base_model="another"))
    words = ["train", str(mixed), "--model", str(model), "--adapters", str(tmp_path / "adapters"), "--dry-run"]
    assert cli.main(words) == 1
    assert "tiny (2), another (1); choose one with --base-model" in capsys.readouterr().err
    assert cli.main([*words, "--base-model", "tiny"]) == 0
    assert "\n    1 by other models" in capsys.readouterr().out


def test_labels_are_trained_on_where_they_are_asked_for_only(model: Path, tmp_path: Path, capsys: Capture) -> None:
    task = Task(id="s", environment="workspace", instruction="Mend it.")
    store = store_of(tmp_path / "store", *(episode(at, 0.0, task=task, id=f"run-{at}") for at in range(4)))
    by_author = {"ann": (1.0, 0.0, 1.0), "bob": (1.0, 0.0, 0.0)}

    async def label() -> None:
        async with FileTrajectoryStorage(store) as storage:
            for author, values in by_author.items():
                for at, value in enumerate(values):
                    await add_label(storage, f"run-{at}", LabelKind.VERDICT, value=value, author=author)

    asyncio.run(label())
    words = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "adapters"), *TINY, "--dry-run"]
    assert cli.main(words) == 1
    assert "4 have no reward: say one" in capsys.readouterr().err, "a label is no reward"
    assert cli.main([*words, "--reward", "human"]) == 0
    asked = capsys.readouterr().out
    assert "episodes: 2 used" in asked and "2 have no reward: nobody gave a verdict that counts" in asked
    settings = tmp_path / "config.toml"
    settings.write_text('[rl.reward]\nname = "human"\n', encoding="utf-8")
    assert cli.main([*words, "--config", str(settings), "--algorithm", "dpo"]) == 0
    assert "pairs: 1, 0 of them chosen by people" in capsys.readouterr().out
    assert cli.main(["score", str(store), "--id", "run-0", "--better-than", "run-3"]) == 0
    assert cli.main([*words, "--algorithm", "dpo"]) == 0
    assert "pairs: 1, 1 of them chosen by people" in capsys.readouterr().out, "though nobody rewarded it"


def _printed(capsys: Capture) -> str:
    return " ".join(capsys.readouterr().err.split())

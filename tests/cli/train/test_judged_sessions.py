"""Sessions that a client judges at their end are trained on; what nobody judged is named with its remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from train_store import TINY, episode, store_of

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.records import LabelKind
from openhands_rl_plugin.core.types import Task
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.rollout.scoring import add_label
from openhands_rl_plugin.session.client_sessions import GatewayConfig
from openhands_rl_plugin.session.gateway import running_gateway
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

ASKED = {"role": "user", "content": "one two"}
Outcomes = dict[str, dict[str, object]]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    served = ServerConfig(model=str(model), served_model_name="tiny", port=0, dtype="float32", threads=1)
    with running_server(served) as url:
        yield url


async def recorded(server: str, store: Path, outcomes: Outcomes) -> None:
    """A session for each outcome, sampled from the embedded server through the gateway and ended with it."""
    async with (
        FileTrajectoryStorage(store) as storage,
        running_gateway(GatewayConfig(upstream=f"{server}/v1", port=0), storage) as gateway,
        httpx.AsyncClient(base_url=gateway, timeout=60, trust_env=False) as http,
    ):
        for seed, (name, outcome) in enumerate(outcomes.items()):
            body = {"model": "tiny", "messages": [ASKED], "max_tokens": 6, "seed": seed}
            said = await http.post("/v1/chat/completions", json=body, headers={"x-litellm-session-id": name})
            assert said.status_code == 200, said.text
            assert (await http.post(f"/session/{name}/end", json=outcome)).status_code == 200


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_four_sessions_with_told_successes_train(
    server: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    asyncio.run(recorded(server, store, {f"s{at}": {"success": at % 2 == 0} for at in range(4)}))
    words = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "adapters"), *TINY]
    assert cli.main([*words, "--dry-run"]) == 0
    assert "episodes: 4 used; left out: none" in capsys.readouterr().out, "the same question is the same task"
    assert cli.main(words) == 0
    assert "policy-v000001: steps 1" in capsys.readouterr().out
    assert cli.main([*words, "--algorithm", "rejection-sampling", "--set", "training.keep_best=9", "--dry-run"]) == 0
    assert "episodes: 2 used" in capsys.readouterr().out


def test_labels_are_trained_on_where_they_are_asked_for_only(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Task(id="s", environment="workspace", instruction="Mend it.")
    store = store_of(tmp_path / "store", *(episode(at, 0.0, task=task, id=f"run-{at}") for at in range(4)))
    said = {"ann": (1.0, 0.0, 1.0), "bob": (1.0, 0.0, 0.0)}

    async def label() -> None:
        async with FileTrajectoryStorage(store) as storage:
            for author, values in said.items():
                for at, value in enumerate(values):
                    await add_label(storage, f"run-{at}", LabelKind.VERDICT, value=value, author=author)

    asyncio.run(label())
    words = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "adapters"), *TINY, "--dry-run"]
    assert cli.main(words) == 1
    assert "4 have no reward: say one" in capsys.readouterr().out, "a label is no reward"
    assert cli.main([*words, "--reward", "human"]) == 0
    asked = capsys.readouterr().out
    assert "episodes: 2 used" in asked and "2 have no reward: nobody gave a verdict that counts" in asked
    settings = tmp_path / "config.toml"
    settings.write_text('[rl.reward]\nname = "human"\n', encoding="utf-8")
    assert cli.main([*words, "--config", str(settings), "--algorithm", "dpo"]) == 0
    assert "pairs: 1, 0 of them chosen by people" in capsys.readouterr().out
    assert cli.main(["score", str(store), "--undo", "--author", "bob"]) == 0
    assert cli.main([*words, "--reward", "human"]) == 0
    assert "episodes: 3 used" in capsys.readouterr().out, "labels as they are now, with nothing stored"
    assert cli.main(["score", str(store), "--id", "run-0", "--better-than", "run-3"]) == 0
    assert cli.main([*words, "--algorithm", "dpo"]) == 0
    assert "pairs: 1, 1 of them chosen by people" in capsys.readouterr().out, "though nobody rewarded it"

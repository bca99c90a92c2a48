"""Scores of a verifier: kept as they are made, the same from a server, and good enough to choose by."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from verifier_store import BAD, GOOD, episode, scores_in, store_of, toy_episodes

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.core.errors import ConfigError, GraderError
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Failure, FailureKind, Message, Observation
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.rollout.scoring import AT_ONCE
from openhands_rl_plugin.testing import ScriptedEngine, check_reward

pytestmark = pytest.mark.contract

ROUNDED = 0.01 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 1e-4
"""How far a score may be from that of a float32 server: in this process it is in bfloat16 where that is native."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def served(judge_model: Path, verifier: Path) -> Iterator[str]:
    """A server of the verifier, up to /v1."""
    config = ServerConfig(model=str(judge_model), served_model_name="tiny", port=0, dtype="float32", adapters="/")
    with running_server(config) as url:
        body = {"lora_name": verifier.name, "lora_path": str(verifier)}
        assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).is_success
        yield f"{url}/v1"


def test_the_command_scores_once(verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Failure(kind=FailureKind.INFRASTRUCTURE, message="away", boundary="test")
    store = store_of(tmp_path / "store", *toy_episodes(3), episode(1, 9, success=True, failure=broken))
    words = ["score", str(store), "--verifier", str(verifier)]
    assert cli.main([*words, "--dry-run"]) == 0
    assert "13 to score, 0 already" in capsys.readouterr().out and not any(scores_in(store).values())
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "12 scored, 0 already" in printed and "infrastructure: away" in printed
    assert cli.main(words) == 0
    assert "0 scored, 12 already" in capsys.readouterr().out
    found = scores_in(store)
    assert found.pop("episode-1-9") == []
    for name, scores in found.items():
        (score,) = scores
        sha = score.reward_version.removeprefix("verifier-1@")[:16]
        assert (verifier / "manifest.json").read_text().find(f'"sha256": "{sha}') > 0
        assert score.reward is not None and (score.reward > 0.5) == (int(name[-1]) % 2 == 0)
        assert score.detail["truncated"] is False and score.detail["adapter"] == "verifier-v000001"


@pytest.mark.slow
def test_a_killed_run_goes_on(verifier: Path, tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", *toy_episodes(10))
    command = [sys.executable, "keep_scoring.py", str(store), str(verifier)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1] / "helpers"
    ) as process:
        assert process.stdout is not None and process.stdout.readline().strip() == str(AT_ONCE)
        process.kill()
    kept = {name for name, scores in scores_in(store).items() if scores}
    assert len(kept) == AT_ONCE and {name.rpartition("-")[0] for name in kept} < {f"episode-{at}" for at in range(10)}
    assert cli.main(["score", str(store), "--verifier", str(verifier)]) == 0
    assert [len(scores) for scores in scores_in(store).values()] == [1] * 40


async def test_a_server_gives_the_same_scores(verifier: Path, served: str) -> None:
    here = build("rewards", "verifier", {"adapter": str(verifier)})
    there = build("rewards", "verifier", {"adapter": str(verifier), "base_url": served})
    episodes = toy_episodes(2)
    for left, right in zip(await here.judge_all(episodes), await there.judge_all(episodes), strict=True):
        assert left.reward_version == right.reward_version
        assert left.reward == pytest.approx(right.reward, abs=ROUNDED)
        assert left.detail["label_mass"] == pytest.approx(right.detail["label_mass"], abs=max(ROUNDED, 1e-3))
    for alone, together in zip(await asyncio.gather(*map(here, episodes)), await here.judge_all(episodes), strict=True):
        assert alone.reward == pytest.approx(together.reward, abs=ROUNDED)
    await check_reward(here, episodes[:2])


async def test_a_server_that_is_not_there_is_a_failure_and_no_score(verifier: Path, served: str) -> None:
    unknown = build("rewards", "verifier", {"adapter": str(verifier), "base_url": served, "served_model": "other"})
    (outcome,) = await unknown.judge_all([episode(1, 1, success=True)])
    assert isinstance(outcome, Failure) and "404" in outcome.message
    with pytest.raises(GraderError, match="404"):
        await unknown(episode(1, 1, success=True))
    with pytest.raises(ConfigError, match=r"is no verifier: .*verifier.json"):
        build("rewards", "verifier", {"adapter": "no-such-directory"})


async def test_best_of_n_takes_what_the_verifier_likes(verifier: Path, served: str) -> None:
    options = {"adapter": str(verifier), "base_url": served}
    strategy = build("strategies", "BestOfN", {"n": 3, "value": "verifier", "value_options": options})
    tree = EpisodeTree()
    tree.observe(Observation(messages=episode(5, 1, success=True).messages()[:2]))
    engine = ScriptedEngine([f"fox dog {BAD}", f"fox dog {GOOD}", f"dog fox {BAD}"])
    chosen = await strategy.decide(tree, engine, None)
    assert tree.nodes[chosen].message == Message(role="assistant", content=f"fox dog {GOOD}")
    values = [tree.nodes[at].value or 0.0 for at in tree.children(tree.head)]
    assert 1 > values[1] > max(values[0], values[2]) > 0

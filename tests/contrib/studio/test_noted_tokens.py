"""What a training noted of tokens, from the command that trains to the page that shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from studio_client import Client
from train_store import TINY, episode, store_of
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.cli import main
from openhands_rl_plugin.contrib.studio.command import sources_at
from openhands_rl_plugin.core.types import Trajectory

REWARDS = (1.0, 0.0)


def test_notes_of_a_training_are_served_with_the_tokens(
    model: Path, tmp_path: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes = [episode(at, reward) for at, reward in enumerate(REWARDS)]
    store, adapters = store_of(tmp_path / "store", *episodes), tmp_path / "adapters"
    command = ["train", str(store), "--model", str(model), "--adapters", str(adapters), "--base-model", "tiny"]
    options = [*TINY[:4], "--num-epochs", "2", "--algorithm", "grpo", "--from", "base", "--learning-rate", "1e-2"]
    assert main([*command, *options, "--keep-token-notes", "all"]) == 0
    capsys.readouterr()

    browser = client(sources=sources_at([str(store), str(adapters)]))
    path = f"/api/episodes/{episodes[0].id}/nodes/2/tokens"
    page = browser.get(path).json()
    told = [(each["epoch"], each["epochs"], each["algorithm"], each["stage"]) for each in page["notes"]]
    assert told == [(1, 2, "grpo", "policy.training"), (2, 2, "grpo", "policy.training")]
    assert page["noted"] == page["notes"][1]["key"]
    first = browser.get(path, params={"notes": page["notes"][0]["key"]}).json()
    assert first["noted"] == page["notes"][0]["key"]
    # Before its first step the policy is the base model.
    logprobs, entropies = base_numbers(model, episodes[0])
    assert first["tokens"]["trainer"][:3] == first["tokens"]["entropy"][:3] == [None] * 3, "of the prompt"
    assert first["tokens"]["trainer"][3:] == pytest.approx(logprobs, abs=1e-5)
    assert first["tokens"]["entropy"][3:] == pytest.approx(entropies, abs=1e-5)
    assert first["tokens"]["advantage"][3:] == pytest.approx([2**-0.5] * 5, abs=1e-3)
    assert set(first["tokens"]["clipped"][3:]) == {0.0}
    part = browser.get(path, params={"notes": page["notes"][0]["key"], "from": 5}).json()
    assert part["tokens"]["trainer"] == first["tokens"]["trainer"][5:]
    assert page["tokens"]["trainer"] != first["tokens"]["trainer"], "the policy has moved"


def test_tokens_without_notes_say_so(tmp_path: Path, client: Client) -> None:
    store = store_of(tmp_path / "store", episode(0, 1.0))
    page = client(sources=sources_at([str(store)])).get("/api/episodes/episode-tiny-0/nodes/1/tokens").json()
    assert (page["notes"], page["noted"]) == ([], None) and "trainer" not in page["tokens"]


def base_numbers(model: Path, trajectory: Trajectory) -> tuple[list[float], list[float]]:
    """Logprobs and entropies of the last five tokens."""
    ids: list[int] = []
    for node in trajectory.nodes:
        if node.tokens is not None:
            ids += [*node.tokens.prompt_ids, *node.tokens.sampled_ids]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logprobs = torch.log_softmax(plain(torch.tensor([ids])).logits[0, -6:-1], -1)
    chosen = logprobs.gather(1, torch.tensor(ids[-5:])[:, None])[:, 0]
    return chosen.tolist(), (-(logprobs.exp() * logprobs).sum(-1)).tolist()

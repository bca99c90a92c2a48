from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from train_store import store_of

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    Message,
    Node,
    Observation,
    PolicyRef,
    Score,
    Tokens,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.testing import example_trajectory

EPISODES = 8
POLICY = PolicyRef(base_model="m", adapter="shop", version=7)


def searched() -> Trajectory:
    """Two candidates, of which the second is acted on; the next prompt does not extend the first."""
    tree = EpisodeTree()
    tree.observe(Observation(messages=(Message(role="user", content="Buy it.\x1b[2J\x9b31m\u202e"),)))
    call = ToolCall(id="1", name="bash", arguments='{"command": "ls"}')
    for text, calls in (("aside", ()), ("taken", (call,))):
        message = Message(role="assistant", content=text, tool_calls=calls)
        tokens = Tokens(prompt_ids=(1, 2, 3), sampled_ids=(4, 5), logprobs=(-0.5, -0.5))
        chosen = tree.propose(Completion(message=message, tokens=tokens, policy=POLICY, finish_reason="length"))
    tree.nodes[chosen].value, tree.nodes[chosen].visits = 0.25, 3
    report = {"strategy": "BestOfN", "turn": {"calls": 3}, "merged": 1}
    tree.nodes[chosen].metadata["search"] = {"report": report, "merged": 1}
    tree.nodes[1].metadata["search"] = {"dropped": "this branch is rotten\x1b[2J"}
    tree.commit(chosen)
    long = "\n".join(f"line {at}" for at in range(100))
    tree.observe(Observation(messages=(Message(role="tool", content=long, tool_call_id="1"),), reward=0.5))
    tokens = Tokens(prompt_ids=(9, 9), sampled_ids=(8,), logprobs=(-0.5,))
    last = Message(role="assistant", content="done")
    tree.commit(tree.propose(Completion(message=last, tokens=tokens, policy=POLICY)))
    nodes = tuple(Node(**vars(each)) for each in tree.nodes)
    return example_trajectory(0).model_copy(update={"id": "searched-episode", "nodes": nodes, "head": tree.head})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    score = Score(trajectory_id="searched-episode", reward=0.75, reward_version="v1")
    return store_of(tmp_path, *map(example_trajectory, range(EPISODES)), searched(), scores=[score])


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_an_episode_is_shown_turn_by_turn(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = shown(capsys, "show", store, "search")
    assert "#2 assistant turn 1  +3 prompt, 2 sampled of 5 tokens · reward 0.5 · value 0.25 · 3 visits" in printed
    assert "shop-v000007 · ended by length" in printed
    assert '  → bash({"command": "ls"})' in printed
    assert "segment 2: this prompt does not extend" in printed
    assert "aside" not in printed
    assert "line 5\n" in printed and "line 50\n" not in printed and "--full` shows them" in printed
    assert "score 0.75 by v1" in printed
    assert "5 prompt and 3 sampled tokens in 2 segments; 5 nodes" in printed
    assert "line 50\n" in shown(capsys, "show", store, "search", "--full")


def test_the_tree_marks_what_was_acted_on(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "show", store, "search", "--tree").splitlines()
    aside = next(line for line in lines if line.endswith("aside"))
    taken = next(line for line in lines if "taken" in line)
    assert aside.startswith("  ○ #1") and "dropped: this branch is rotten\\x1b[2J" in aside
    assert taken.startswith("  ● #2") and "· 1 merged ·" in taken
    assert any(line.strip() == 'search: {"strategy": "BestOfN", "turn": {"calls": 3}, "merged": 1}' for line in lines)


def test_a_longer_beginning_is_asked_for_when_several_fit(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(store), "0000"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {EPISODES} episodes") and example_trajectory(3).id in printed
    assert cli.main(["show", str(store), example_trajectory(3).id]) == 0
    assert "failed (infrastructure, environment.step): the server went away" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["show", "STORE", "no-such"], ["list", "STORE/none"], ["list", "EMPTY", "--by"]])
def test_a_wrong_store_or_id_is_one_line(
    words: Sequence[str], store: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert cli.main([word.replace("STORE", str(store)).replace("EMPTY", str(empty)) for word in words]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert list(empty.iterdir()) == []


def ids(printed: str) -> list[str]:
    return [json.loads(line)["id"] for line in printed.splitlines()]


def test_the_list_is_filtered_sorted_and_paged(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everything = [example_trajectory(at).id for at in range(EPISODES)] + ["searched-episode"]
    assert ids(shown(capsys, "list", store, "--json")) == everything
    assert ids(shown(capsys, "list", store, "--json", "--limit", 3)) == everything[:3]
    best = ids(shown(capsys, "list", store, "--json", "--sort", "reward", "--desc", "--no-failed"))
    assert best[:5] == [everything[at] for at in (0, 2, 4, 6)] + ["searched-episode"]
    assert ids(shown(capsys, "list", store, "--json", "--failure", "infrastructure")) == everything[3:8:4]
    since, until = (datetime.fromtimestamp(at).isoformat() for at in (1030, 1040))
    assert ids(shown(capsys, "list", store, "--json", "--since", since, "--until", until)) == everything[3:4]
    assert ids(shown(capsys, "list", store, "--json", "--unfinished")) == []
    table = shown(capsys, "list", store, "--limit", 2)
    assert "2 of 9 episodes; --limit shows more" in table and "grid-1" in table
    assert "0 of 0 episodes" in shown(capsys, "list", store, "--run", "other")


def test_figures_by_group(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = json.loads(shown(capsys, "list", store, "--by", "environment", "--json", "--no-failed"))
    assert (group["name"], group["episodes"], group["valid"]) == (["grid"], 7, 7)
    assert group["success"]["mean"] == pytest.approx(4 / 7)
    assert group["reward"]["mean"] == pytest.approx(4.75 / 7)
    assert group["reward"]["low"] <= group["reward"]["mean"] <= group["reward"]["high"]
    (group,) = json.loads(shown(capsys, "list", store, "--by", "environment", "--json", "--success-at", "0.7"))
    assert group["success"]["mean"] == pytest.approx(5 / 7)
    assert group["failures"] == {"infrastructure": 2}
    printed = shown(capsys, "list", store, "--by")
    assert "infrastructure 2" in printed
    assert shown(capsys, "list", store, "--by", "--run", "other") == "no episodes match\n"
    assert cli.main(["list", str(store), "--by", "enviroment"]) == 1
    assert "available: " in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--json"], []])
def test_whoever_reads_may_stop_early(store: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "openhands_rl_plugin.cli", "list", str(store), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == cli.BROKEN_PIPE
        assert process.stderr.read() == b""

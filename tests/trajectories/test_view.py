from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from train_store import store_of

from evaluation.performance.search.planning import PlanningEnvironment, PlanningOptions
from openhands_rl_plugin import cli
from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.records import TrajectorySummary
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    FailureKind,
    Message,
    Node,
    Observation,
    PolicyRef,
    Score,
    StopReason,
    Task,
    Tokens,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.rollout.strategies.base import BestOfNOptions, BestOfNStrategy
from openhands_rl_plugin.rollout.strategies.search import SearchBudget
from openhands_rl_plugin.testing import ScriptedEngine, example_trajectory
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage
from openhands_rl_plugin.trajectories.view import figures_of

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
    assert aside.startswith("  ○ #1") and taken.startswith("  ● #2")


class Rotten(PlanningEnvironment):
    """The second way kills every fork that takes it."""

    async def step(self, action: Message) -> Observation:
        if action.content == "1":
            raise InfrastructureError("this branch is rotten\x1b[2J")
        return await super().step(action)


async def best_of_n(folder: Path) -> None:
    """Two turns: the first drops a branch, the second merges two."""
    world = Rotten(PlanningOptions(depth=2, branching=3))
    engine = ScriptedEngine(["0", "1", "2", "2", "2"])
    options = BestOfNOptions(n=3, value="none", temperature=0.7, episode_budget=SearchBudget(calls=5))
    strategy = BestOfNStrategy(options)
    tree = EpisodeTree()
    tree.observe(await world.reset(Task(id="plan", environment="planning")))
    while not tree.terminated:
        tree.commit(await strategy.decide(tree, engine, world))
        tree.observe(await world.step(tree.action))
    nodes = tuple(Node(**vars(each)) for each in tree.nodes)
    trajectory = example_trajectory(0).model_copy(update={"id": "best-of-n", "nodes": nodes, "head": tree.head})
    async with FileTrajectoryStorage(folder) as storage:
        await storage.add(trajectory)


def test_what_a_search_spent_and_why_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(best_of_n(tmp_path))
    printed = shown(capsys, "show", tmp_path, "best", "--tree")
    first, second = [line for line in printed.splitlines() if line.strip().startswith("search: ")]
    assert "turn 3 calls" in first and "dropped 1" in first and "cut by" not in first
    assert "turn 2 calls" in second and "episode 5 calls" in second and "merged 1" in second
    aside = next(line for line in printed.splitlines() if "dropped:" in line)
    assert aside.lstrip().startswith("○") and "rotten\\x1b[2J" in aside
    assert "simulated reward" in printed and printed.count("temperature 0.7") == 4
    assert "· 1 merged ·" in printed
    assert "search: strategy BestOfN" in shown(capsys, "show", tmp_path, "best")
    turns = json.loads(shown(capsys, "show", tmp_path, "best", "--json"))["turns"]
    decided = [turn["search"]["report"] for turn in turns if "report" in turn["search"]]
    assert [report["turn"]["calls"] for report in decided] == [3, 2]
    assert [turn["search"]["merged"] for turn in turns if "merged" in turn["search"]] == [1]
    assert ["rotten" in turn["search"]["dropped"] for turn in turns if "dropped" in turn["search"]] == [True]
    assert {turn["temperature"] for turn in turns} == {None, 0.7}
    assert any(turn["simulated"] for turn in turns if not turn["acted"])


def test_a_longer_beginning_is_asked_for_when_several_fit(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(store), "0000"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: {EPISODES} episodes") and example_trajectory(3).id in told
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
    assert "did you mean 'environment'" in capsys.readouterr().err


def test_what_is_no_sample_of_the_policy_is_in_no_mean(tmp_path: Path) -> None:
    changes: list[dict[str, object]] = [
        {},
        {"reward": 0.0, "turns": 4},
        {"failure": FailureKind.MODEL, "stop": StopReason.ERROR, "episode_return": 0.0},
        {"stop": StopReason.UNFINISHED, "episode_return": 0.0},
        {"episode_return": None},
    ]

    store = store_of(tmp_path, example_trajectory(0))

    async def summaries() -> AsyncIterator[TrajectorySummary]:
        async with FileTrajectoryStorage(store) as storage:
            async for plain in storage.summaries():
                for change in changes:
                    yield plain.model_copy(update={"turns": 2, "episode_return": 1.0, "reward": None, **change})

    (group,) = asyncio.run(figures_of(summaries(), ("environment",), lambda _, reward: reward >= 1.0))
    assert group.items() >= {"name": ("grid",), "episodes": 5, "valid": 2, "unfinished": 1, "turns": 3.0}.items()
    assert (group["reward"].mean, group["success"].mean) == (0.5, 0.5)


def test_whoever_reads_may_stop_early(store: Path) -> None:
    command = [sys.executable, "-m", "openhands_rl_plugin.cli", "list", str(store), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == cli.BROKEN_PIPE
        assert process.stderr.read() == b""

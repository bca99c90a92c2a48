"""What models and environments wrote is shown by every command that reads stores, and obeyed by no terminal."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from hostile import ACTED_UPON, TEXT
from rich.console import Console

from openhands_rl_plugin import cli
from openhands_rl_plugin.apps.loop.reporting import ProgressListener
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    FailureKind,
    Message,
    Observation,
    PolicyRef,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Times,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.training.loop.plan import StageRecord
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

POLICY = PolicyRef(base_model=TEXT)


class HostileReward:
    """A reward that says why it has no score with what the model wrote."""

    version = "hostile-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        return Score(trajectory_id=trajectory.id, reward=None, detail={"reason": TEXT}, reward_version=self.version)


def hostile(number: int, *, failed: bool = False) -> Trajectory:
    """Every text of an episode is hostile."""
    call = ToolCall(id=TEXT, name=TEXT, arguments=TEXT)
    tree = EpisodeTree()
    tree.observe(Observation(messages=(Message(role="system", content=TEXT), Message(role="user", content=TEXT))))
    answer = Message(role="assistant", content=TEXT, tool_calls=(call,))
    chosen = tree.propose(Completion(message=answer, policy=POLICY, finish_reason=TEXT))
    tree.nodes[chosen].metadata["search"] = {TEXT: TEXT}
    tree.commit(chosen)
    tree.observe(Observation(messages=(Message(role="tool", content=TEXT, tool_call_id=TEXT),), reward=0.5))
    request = EpisodeRequest(
        task=Task(id=f"{TEXT}{number % 2}", environment=TEXT, split=TEXT, instruction=TEXT), run_id=TEXT, group_id=TEXT
    )
    return tree.freeze(
        request,
        trajectory_id=f"hostile-{number}",
        strategy=StrategySpec(name=TEXT, options={TEXT: TEXT}),
        policy=POLICY,
        stop=StopReason.ERROR if failed else StopReason.TERMINATED,
        failure=Failure(kind=FailureKind.MODEL, message=TEXT, boundary=TEXT) if failed else None,
        times=Times(started=0.0, finished=1.0),
        evidence={"git_patch": TEXT, TEXT: TEXT},
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "store"

    async def fill() -> None:
        async with FileTrajectoryStorage(folder) as storage:
            for number in range(4):
                await storage.add(hostile(number, failed=number == 3))
                detail = {"reason": TEXT, TEXT: TEXT}
                scored = Score(trajectory_id=f"hostile-{number}", reward=0.5, detail=detail, reward_version=TEXT)
                await storage.add_scores([scored])

    asyncio.run(fill())
    return folder


COMMANDS: dict[str, list[str]] = {
    "list": ["list", "STORE"],
    "show": ["show", "STORE", "hostile-0"],
    "show the tree": ["show", "STORE", "hostile-0", "--tree"],
    "show what is not there": ["show", "STORE", TEXT],
    "statistics": ["list", "STORE", "--by"],
    "score": ["score", "STORE", "--reward", "test_hostile_terminal:HostileReward"],
    "score by hand": ["score", "STORE", "--id", "hostile-1", "--value", "1", "--note", TEXT],
    "export": ["export", "STORE", "--format", "sft", "--out", "OUT.jsonl"],
    "doctor": ["doctor", "drift", "STORE"],
    "an unknown command": [TEXT],
    "an unknown option": ["list", "STORE", f"--{TEXT}"],
    "a wrong value": ["list", "STORE", "--min-reward", TEXT],
}
COMMANDS["graded rows that are wrong"] = ["grade", "ROWS", "--instances", "ROWS", "--out", "OUT"]
COMMANDS["an import that is wrong"] = ["import", "ROWS", "--into", "OUT", "--skip-bad"]
COMMANDS["an evaluation"] = ["evaluate", "ROWS", "--model", TEXT, "--base-url", "http://127.0.0.1:1/v1", "--dry-run"]
WRONG = {"an unknown command", "an unknown option", "a wrong value"}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_hands_a_terminal_what_it_would_obey(
    name: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"instance_id": TEXT, "repo": "a/b", "base_commit": "c", "version": TEXT, "patch": "", "test_patch": ""}
    row |= {"problem_statement": TEXT, "FAIL_TO_PASS": "[]", "PASS_TO_PASS": "[]", "split": TEXT}
    row |= {"model_name_or_path": TEXT, "model_patch": TEXT}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    places: dict[str, str] = {"STORE": str(store), "ROWS": str(tmp_path / "rows.jsonl"), "OUT": str(tmp_path / "out")}
    places["OUT.jsonl"] = str(tmp_path / "out.jsonl")
    words: list[str] = [places.get(word, word) for word in COMMANDS[name]]
    code = cli.main(words)
    printed = capsys.readouterr()
    output = printed.out + printed.err
    assert output.strip() and "Traceback" not in output and (code != 2 or name in WRONG), (code, output)
    assert not sorted(set(output) & ACTED_UPON), [line for line in output.splitlines() if set(line) & ACTED_UPON][:3]


@pytest.mark.parametrize("command", ["report", "compare"])
def test_reports_of_hostile_names(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for name in ("a", "b"):
        folder = tmp_path / name / (TEXT.replace("/", "|")[:120] + f"_{name}-run_0")
        folder.mkdir(parents=True)
        result = {"git_patch": TEXT, "report": {"resolved": name == "b"}, "outcome": {"reason": TEXT}}
        rows = [{"instance_id": f"{TEXT}{at}", "test_result": result, "error": TEXT} for at in range(3)]
        (folder / "output.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        metadata = {"agent_class": TEXT, "llm_config": {"model": TEXT}, "dataset": TEXT, "data_split": TEXT}
        (folder / "metadata.json").write_text(json.dumps(metadata))
        folders.append(str(tmp_path / name))
    cli.main(["evaluate", f"--{command}", *folders, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    both = printed.out + printed.err
    assert both.strip() and "Traceback" not in both
    assert not sorted(set(both) & ACTED_UPON), both


def test_progress_shows_hostile_answers() -> None:
    screen = io.StringIO()
    record = StageRecord(name="evaluate-base", adapter=None, metrics={"success": 0.5}, started=0.0, finished=1.0)
    with ProgressListener(3, Console(file=screen, width=100)) as listener:
        listener.stage_started("evaluate-base")
        listener.noted(TEXT)
        listener.stage_finished(record)
    assert not sorted(set(screen.getvalue()) & ACTED_UPON)
    assert "\\x1b[2J" in screen.getvalue()

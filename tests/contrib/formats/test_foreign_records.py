"""Records of other programs become episodes whose messages, calls, reasoning and outcome are those of the record."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from foreign_records import ATIF, BASH, RECORDS

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.messages import reasoning_of
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, Record
from openhands_rl_plugin.trajectories.exchange.formats import formats, recognised
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

CASES = [(name, number) for name, records in RECORDS.items() for number in range(len(records))]


def stored(path: Path) -> list[tuple[Trajectory, tuple[Score, ...]]]:
    async def read() -> list[tuple[Trajectory, tuple[Score, ...]]]:
        async with FileTrajectoryStorage(path) as storage:
            return [pair async for pair in storage.find(TrajectoryFilter(finished=None))]

    return asyncio.run(read())


def run(*words: str | Path) -> int:
    return cli.main([str(word) for word in words])


def imported(record: Any, folder: Path, file: str = "record.json") -> list[tuple[Trajectory, tuple[Score, ...]]]:
    target = folder / file
    target.write_text(json.dumps(record))
    assert run("import", target, "--into", folder / "store") == 0
    return stored(folder / "store")


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_record_is_recognised_and_read(
    name: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RECORDS[name][number]
    found = imported(record, tmp_path)
    assert f"format: {name} (1 files)" in capsys.readouterr().out
    assert all(trajectory.strategy.options["format"] == name for trajectory, _ in found)
    if name == "output-jsonl":
        return
    for trajectory, _ in found:
        texts = [(message.role, message.content) for message in trajectory.messages()]
        assert ("user", "Fix f.") in texts
        assert texts[-1] in (("assistant", "Done."), ("assistant", "No."))
        assert trajectory.task.instruction == "Fix f."
        assert "[thinking]" not in trajectory.model_dump_json()
    text = json.dumps(record)
    if "I should look." in text:
        assert [reasoning_of(node) for node in found[0][0].sampled()] == ["I should look.", None]
    if "tool_calls" in text or "function_call" in text:
        (call,) = [call for message in found[0][0].messages() for call in message.tool_calls][:1]
        assert (call.name, json.loads(call.arguments)) == ("bash", {"command": "ls"})
        (result,) = [message for message in found[0][0].messages() if message.role == "tool"]
        assert (result.content, result.tool_call_id) == ("a.py", call.id)


def test_outcomes_patches_and_names_survive(tmp_path: Path) -> None:
    for name, number, patch, resolved in (
        ("sft-native", 0, "diff --git a b", True),
        ("nebius", 0, "diff --git a b", True),
        ("mini-swe-agent", 1, "diff --git a b", None),
        ("swe-agent", 0, "diff --git a b", None),
    ):
        folder = tmp_path / f"{name}{number}"
        folder.mkdir()
        ((trajectory, scores),) = imported(RECORDS[name][number], folder, file="t1.traj.json")
        assert trajectory.evidence["patch"] == patch
        assert trajectory.evidence.get("resolved") is resolved
        assert trajectory.task.id == "t1"
        assert [score.reward for score in scores] == ([] if resolved is None else [float(resolved)])


def test_atif_brings_ids_and_logprobs(tmp_path: Path) -> None:
    trial = tmp_path / "jobs" / "trial-1"
    (trial / "agent").mkdir(parents=True)
    (trial / "agent" / "trajectory.json").write_text(json.dumps(ATIF))
    (trial / "result.json").write_text(
        json.dumps({"task_name": "hello", "trial_name": "hello__1", "verifier_result": {"rewards": {"reward": 1.0}}})
    )
    assert run("import", tmp_path / "jobs", "--into", tmp_path / "store") == 0
    ((trajectory, (score,)),) = stored(tmp_path / "store")
    first, second = (node.tokens for node in trajectory.sampled())
    assert first is not None
    assert (first.prompt_ids, first.sampled_ids, first.logprobs) == ((1, 2), (3, 4), (-0.5, -0.25))
    assert second is not None and (second.extends, second.prompt_ids, second.sampled_ids) == (True, (5,), (6,))
    assert (trajectory.task.id, score.reward, trajectory.tools) == ("hello", 1.0, (BASH,))


def test_a_folder_of_mixed_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    for name, records in RECORDS.items():
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(json.dumps(records[-1]).encode()))
    (folder / "step.traj").write_text(json.dumps(RECORDS["swe-agent"][0], indent=1))
    assert run("import", folder, "--into", tmp_path / "store") == 0
    assert "swe-agent (2 files)" in capsys.readouterr().out
    assert len(stored(tmp_path / "store")) == len(RECORDS) + 2  # two of swe-agent, two of one row of TRL's
    whole = gzip.compress(json.dumps(ATIF).encode())
    broken = {"metadata.json": b'{"what": 1}', "zzz.json": b'[{"cut', "cut.json.gz": whole[:-9], "zipped.traj": whole}
    for name, content in broken.items():
        (folder / name).write_bytes(content)
    assert run("import", folder, "--into", tmp_path / "other") == 1
    printed = capsys.readouterr().err
    assert "metadata.json: is in none of the formats" in printed and "zzz.json: not valid JSON" in printed
    assert all(name in printed for name in broken) and "Traceback" not in printed
    assert len(stored(tmp_path / "other")) == len(RECORDS) + 2


MALFORMED: list[Any] = [None, 3, "x", [], {}, [None], [3], {"a": None}, [{}], [{"role": "user"}], True, 1e300]


@pytest.mark.parametrize("name", RECORDS)
def test_any_field_may_be_wrong(name: str) -> None:
    """A wrong value in any field of a record is an error of ours or is read; it is never another exception."""
    read = formats()[name].read
    assert read is not None
    wrong: Any
    for record in RECORDS[name]:
        row = {"messages": record} if isinstance(record, list) else record
        for field in row:
            for value in MALFORMED:
                for wrong in (
                    {**row, field: value},
                    {**row, field: [value, *row[field]]} if isinstance(row[field], list) else row,
                ):
                    recognised(wrong)
                    try:
                        read(Record(wrong), Path("x.json"))
                    except ExchangeError:
                        continue


@pytest.mark.parametrize("name", ["sft-native", "sft-text", "output-jsonl", "atif", "trajectories"])
def test_reasoning_goes_out_and_in_again(name: str, tmp_path: Path) -> None:
    """By every format that has a place for it; V0's events have one beside calls."""
    imported(RECORDS["sft-native"][0], tmp_path, "rows.jsonl")
    out = tmp_path / "out.jsonl"
    assert run("export", tmp_path / "store", "--format", name, "--out", out) == 0
    assert run("import", out, "--format", name, "--into", tmp_path / "again") == 0
    ((trajectory, _),) = stored(tmp_path / "again")
    assert [reasoning_of(node) for node in trajectory.sampled()] == ["I should look.", None]

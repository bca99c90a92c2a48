"""What records of others have beside plain conversations: marks, links, identities, reasoning, objects, odd bytes.

The shapes are those of public data sets and programs: SWE-agent, Nebius, SWE-smith, agent-data-protocol, ShareGPT,
OpenAI's fine-tuning files, mini-swe-agent, and what ``datasets`` makes of them.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from test_foreign_records import run, stored

from openhands_rl_plugin.core.messages import reasoning_of
from openhands_rl_plugin.core.types import Trajectory

USER, ANSWER = {"role": "user", "content": "Fix f."}, {"role": "assistant", "content": "Done."}
HELD = {"role": "assistant", "content": "Not me."}


def call(name: str = "bash", identity: Any = "c1", arguments: Any = '{"command":"ls"}') -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [*calls], **more}


def read(rows: Any, folder: Path, name: str = "rows.jsonl", rc: int = 0) -> list[Trajectory]:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(rows, bytes):
        lines = "\n".join(map(json.dumps, rows)) if name.endswith(".jsonl") else json.dumps(rows)
        rows = lines.encode()
    file.write_bytes(rows)
    assert run("import", file, "--into", folder / "store") == rc
    return [trajectory for trajectory, _ in stored(folder / "store")]


def swe_agent(*history: dict[str, Any]) -> dict[str, Any]:
    steps = [{"action": "ls", "observation": "a.py", "response": "ls", "thought": ""}]
    return {"trajectory": steps, "history": [*history], "info": {"exit_status": "submitted", "submission": "diff"}}


def nebius(*turns: tuple[str, str, bool]) -> dict[str, Any]:
    messages = [{"role": role, "text": text, "mask": mask, "system_prompt": None} for role, text, mask in turns]
    return {"instance_id": "t1", "trajectory": messages}


def adp(*content: dict[str, Any], **more: Any) -> dict[str, Any]:
    asked = {"class_": "text_observation", "source": "user", "content": "Fix f.", "name": None}
    last = {"class_": "message_action", "content": "Done.", "description": None}
    return {"schema_version": "1.5.0", "id": "t1", "details": {}, "content": [asked, *content, last], **more}


DEMO = ({**USER, "content": "Another.", "is_demo": True}, {**HELD, "is_demo": True})


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, {**HELD, "loss_mask": 0, "weight": None}, USER, {**ANSWER, "loss_mask": 1, "weight": 1}]},
        {"messages": [USER, {**HELD, "train": "False"}, USER, ANSWER]},
        {"messages": [*DEMO, USER, ANSWER]},
        {"conversations": [
            {"from": "human", "value": "Fix f.", "weight": None},
            {"from": "gpt", "value": "Not me.", "weight": 0},
            {"from": "gpt", "value": "Done.", "weight": 1},
        ]},
        nebius(("user", "Fix f.", False), ("ai", "Not me.", True), ("ai", "Done.", False)),
        adp({"class_": "message_action", "content": "Not me.", "description": None, "weight": 0}),
        swe_agent(*DEMO, USER, {**ANSWER, "agent": "main"}),
    ],
)  # fmt: skip
def test_what_is_marked_as_context_was_not_sampled(row: Any, tmp_path: Path) -> None:
    (found,) = read([row], tmp_path)
    assert [node.message.content for node in found.sampled()] == ["Done."]
    assert "Not me." in [message.content for message in found.messages()] and found.task.instruction == "Fix f."


BOTH = calling(*(call("read", each, {"path": each}) for each in "ab"))
ASKED = [
    {"type": "function_call", "call_id": each, "name": "read", "arguments": f'{{"path": "{each}"}}'} for each in "ab"
]
OUTPUTS = [{"type": "function_call_output", "call_id": each, "output": each.upper()} for each in "ba"]
MINI = {"info": {"exit_status": "Submitted"}, "trajectory_format": "mini-swe-agent-1.1"}
ACTIONS = [
    {"class_": "api_action", "function": "read", "kwargs": {"path": each, "text": None}, "tool_call_id": each}
    for each in "ab"
]
SEEN = [
    {"class_": "text_observation", "source": "user", "content": each.upper(), "tool_call_id": each} for each in "ba"
]


def legacy(path: str) -> list[dict[str, Any]]:
    """A call and its result in the form before tools."""
    asked = {"name": "read", "arguments": f'{{"path": "{path}"}}'}
    return [calling(function_call=asked), {"role": "function", "name": "read", "content": path.upper()}]


def results(*links: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": content, **link} for content, link in zip("BA", links, strict=True)]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, BOTH, *results({"tool_call_id": "b"}, {"tool_call_id": "a"}), ANSWER]},
        {"messages": [USER, BOTH, *results({"tool_use_id": "b"}, {"tool_use_id": "a"}), ANSWER]},
        {"messages": [USER, BOTH, *results({"tool_call_ids": ["b"]}, {"tool_call_ids": ["a"]})[::-1], ANSWER]},
        {"messages": [USER, calling(*(call("read", None, {"path": each}) for each in "ba")), *results({}, {}), ANSWER]},
        {"messages": [USER, calling(*(call(each, f"c{each}", {"path": each}) for each in "ab")),
                      *results({"name": "b"}, {"name": "a"}), ANSWER]},
        {"messages": [USER, *legacy("b"), *legacy("a"), ANSWER]},
        {**MINI, "messages": [USER, {"object": "response", "output": ASKED}, *OUTPUTS, ANSWER]},
        swe_agent(USER, BOTH, *results({"tool_call_ids": ["b"]}, {"tool_call_ids": ["a"]}), ANSWER),
        adp(*ACTIONS, *SEEN),
        {"conversations": [
            {"from": "human", "value": "Fix f."},
            {"from": "function_call", "value": json.dumps([{"name": "read", "parameters": {"path": p}} for p in "ab"])},
            *({"from": "observation", "value": each} for each in "AB"),
            {"from": "gpt", "value": "Done."},
        ]},
    ],
)  # fmt: skip
def test_every_result_belongs_to_its_call(row: Any, tmp_path: Path) -> None:
    (found,) = read([row], tmp_path)
    calls = {each.id: json.loads(each.arguments) for message in found.messages() for each in message.tool_calls}
    called = [
        (message.content, calls[message.tool_call_id or ""]) for message in found.messages() if message.role == "tool"
    ]
    assert sorted(called, key=str) == [("A", {"path": "a"}), ("B", {"path": "b"})]
    assert run("export", tmp_path / "store", "--format", "sft-native", "--out", tmp_path / "out.jsonl") == 0
    (out,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert {each["tool_call_id"] for each in out["messages"] if each["role"] == "tool"} == {*calls}


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
PAIR = {"chosen": "The one.", "rejected": "The two."}
SHARED = {"conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "The one."}]}


@pytest.mark.parametrize(
    ("row", "prompt", "rewards"),
    [
        ({"system": [{"type": "text", "text": "S.", "cache_control": None}], "messages": [USER, ANSWER], "reward": 0.5,
          "tools": [{"name": "bash", "description": "Runs.", "input_schema": SCHEMA}]}, ["S.", "Fix f."], [0.5]),
        ({"functions": [{"name": "bash", "description": "Runs.", "parameters": SCHEMA}], "messages": [USER, ANSWER],
          "tools": None, "system_prompt": "S."}, ["S.", "Fix f."], [None]),
        ({"system": "S.", "question": "Q?", "prompt": None, **PAIR}, ["S.", "Q?"], [1.0, 0.0]),
        ({"system": "", "instruction": "Q?", "input": "x = 1", **PAIR}, ["Q?\nx = 1"], [1.0, 0.0]),
        ({"example_id": 0, "prompt": [USER], "completion": [ANSWER], "task": "default", "reward": 0.25},
         ["Fix f."], [0.25]),
        ({"system": "S.", "tools": "", **SHARED, "id": "t", "reward": None}, ["S.", "Q?"], [None]),
    ],
)  # fmt: skip
def test_what_stands_beside_it(row: Any, prompt: list[str], rewards: list[Any], tmp_path: Path) -> None:
    found = read([row], tmp_path)
    assert [[m.content for m in each.messages()[:-1]] for each in found] == [prompt] * len(rewards)
    assert [scores[0].reward if scores else None for _, scores in stored(tmp_path / "store")] == rewards
    function = {"name": "bash", "description": "Runs.", "parameters": SCHEMA}
    offered = [{"type": "function", "function": function}] if row.get("functions") or row.get("tools") else []
    assert [*found[0].tools] == offered


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning_content": "Hm."},
        {"thinking": "Hm."},
        {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "format": None, "index": 0}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, "Done."]},
    ],
)
def test_reasoning_in_every_spelling(more: Any, tmp_path: Path) -> None:
    (found,) = read([{"messages": [USER, {**ANSWER, **more}]}], tmp_path)
    (answer,) = found.sampled()
    assert (answer.message.content, reasoning_of(answer)) == ("Done.", "Hm.")


def test_null_filled_structs_are_calls_with_their_own_arguments(tmp_path: Path) -> None:
    """``datasets`` gives every call the parameters of all tools, nested ones too, and every message calls."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    given = [{"command": "ls", "options": {"all": True}}, {"path": "x", "options": {"deep": {"n": 1}}}, {"path": "y"}]
    result = {"role": "tool", "content": "a.py", "tool_call_id": "c1"}
    rows = [
        {"instance_id": f"t{at}", "messages": [USER, calling(call(arguments=each)), result, ANSWER]}
        for at, each in enumerate(given)
    ]
    table = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    found = read(table.getvalue(), tmp_path, "rows.parquet")
    assert [json.loads(c.arguments) for each in found for m in each.messages() for c in m.tool_calls] == given


def test_a_bad_row_never_ends_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [{"id": name, "messages": [USER, ANSWER]} for name in ("\udcb2", "b", "c")]
    lines = [
        b"not json",
        json.dumps(good[0]).encode(),
        json.dumps({"id": "x", "messages": [USER, {**ANSWER, "role": "robot"}]}).encode(),
        b'{"messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"messages": [], "test_result": ' + b"[" * 185 + b"]" * 185 + b"}",
        json.dumps(good[1]).encode().replace(b"Done.", b"byte \xb2"),
        json.dumps({"id": "y", "messages": [USER, ANSWER], "score": math.nan}).encode(),
        json.dumps({"id": "z", "messages": [USER, calling({**call(), "function": {"arguments": "{}"}})]}).encode(),
        json.dumps({"id": "y", "messages": [USER, ANSWER], "score": 1e300}).encode(),
        b'{"messages": []}',
        json.dumps({"messages": [USER], "choices": [{"index": 0, "message": ANSWER}]}).encode(),
        b'{"prompt": "Q", "chosen": "yes", "rejected": "yes"}',
        json.dumps(good[2]).encode(),
    ]
    found = read(b"\n".join(lines), tmp_path, rc=1)
    assert [each.task.id for each in found] == ["\ufffd", "b", "c"] and found[1].messages()[1].content == "byte \ufffd"
    printed = capsys.readouterr()
    assert "rows.jsonl:1: not valid JSON" in printed.err and "--skip-bad leaves such records out" in printed.err
    assert "3 new trajectories of 3 records, 0 scores; 10 bad records skipped" in printed.out
    assert "rows.jsonl:7: score: must be a finite number" in printed.err
    assert "rows.jsonl:9: score: must be less than or equal to 1000000000" in printed.err
    assert run("import", tmp_path / "rows.jsonl", "--into", tmp_path / "store", "--skip-bad") == 0

"""From another program's records to an adapter: import, then train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from train_store import TINY

from openhands_rl_plugin import cli

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": {"type": "object"}}}]


def row(number: int, resolved: bool | None, arguments: str = '{"command": "ls"}') -> dict[str, object]:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    judged = {} if resolved is None else {"resolved": resolved}
    return {
        "instance_id": f"task-{number}",
        "run_id": "gpt-4o",
        "model": "gpt-4o" if number % 2 else "claude",
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "the quick fox"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "one two", "tool_call_id": "c1"},
            {"role": "assistant", "content": "three"},
        ],
        **judged,
    }


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def imported(folder: Path, *rows: dict[str, object], format: str = "sft-native") -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert cli.main(["import", str(file), "--format", format, "--into", str(folder / "store")]) == 0
    return folder / "store"


def train(store: Path, model: Path, *words: str) -> int:
    adapters = str(store.parent / "adapters")
    return cli.main(["train", str(store), "--model", str(model), "--adapters", adapters, *TINY, *words])


def test_an_import_becomes_an_adapter(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = imported(tmp_path, row(1, True), row(2, True), row(3, False), row(4, None))
    assert train(store, model, "--algorithm", "sft") == 0
    printed = capsys.readouterr().out
    assert f"4 episodes came without token ids: tokenised here, with the chat template of {model}" in printed
    assert "3 used" in printed, "the unresolved one is not imitated"
    assert "policy-v000001: steps 1, " in printed
    assert (tmp_path / "adapters" / "policy-v000001" / "adapter_model.safetensors").exists()

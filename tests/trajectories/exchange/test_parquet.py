"""Rows for trainers: what ``datasets`` and TRL make of them, with the stock chat templates."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from exchange_samples import CODE, TOOLS, call, reply, score, trajectory

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.types import JsonObject, Node, Trajectory
from openhands_rl_plugin.trajectories.exchange.formats import with_objects
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

sys.path.append(str(Path(__file__).parents[2] / "core" / "templates"))

from official_templates import HOW_TO_GET, official_template, small_tokenizer

EPISODE = trajectory([each for each in CODE if len(each.tool_calls) < 2 and each.tool_call_id not in ("c2", "c3")])
FAMILIES = ("qwen2.5", "qwen3", "llama3.1")


def searched() -> Trajectory:
    """As recorded, but its first call is the better one of two that search tried, with reasoning."""
    first = next(at for at, node in enumerate(EPISODE.nodes) if node.message.tool_calls)
    tried = {"value": 0.9, "visits": 3, "metadata": {"reasoning_content": "I try this."}}
    better = EPISODE.nodes[first].model_copy(update=tried)
    worse = better.model_copy(update={"value": 0.1, "message": reply(call("c9", "finish"))})
    nodes = (*EPISODE.nodes[:first], better, *EPISODE.nodes[first + 1 :], worse)
    return EPISODE.model_copy(update={"id": "00000000-0000-4000-8000-0000000000aa", "nodes": nodes})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "store"

    async def fill() -> None:
        async with FileTrajectoryStorage(path, durable=False) as storage:
            await storage.add(searched())
            await storage.add(EPISODE)
            await storage.add_scores([score(EPISODE, 1.0, resolved=True)])

    asyncio.run(fill())
    return path


def export(store: Path, name: str, out: Path, *words: str) -> int:
    return cli.main(["export", str(store), "--format", name, "--out", str(out), *words])


def loaded(file: Path) -> list[dict[str, Any]]:
    import datasets

    kind = "parquet" if file.suffix == ".parquet" else "json"
    return list(datasets.load_dataset(kind, data_files=str(file), split="train", cache_dir=str(file.parent / "cache")))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "columns"),
    [("preferences", ("prompt", "chosen")), ("sft-native", ("messages",))],
)
def test_trl_trains_on_what_was_recorded(
    store: Path, tmp_path: Path, family: str, name: str, columns: tuple[str, ...]
) -> None:
    """Each row of a Parquet or JSON Lines file gives TRL the tokens of the conversation itself."""
    from trl.data_utils import _tokenize, is_conversational

    if (template := official_template(family)) is None:
        pytest.skip(HOW_TO_GET)
    tokenizer = small_tokenizer(template)
    for ending in ("parquet", "jsonl"):
        out = tmp_path / f"rows.{ending}"
        assert export(store, name, out) == 0
        found = loaded(out)
        assert found
        for row in found:
            assert is_conversational(row)
            whole = [message for column in columns for message in row[column]]
            spoken = [written(node) for node in nodes_in(row, columns)]
            expected: Any = with_objects({"spoken": [*spoken]})["spoken"]
            ids = _tokenize(tokenizer, whole, tools=row["tools"])["input_ids"]
            assert ids == _tokenize(tokenizer, expected, tools=list(TOOLS))["input_ids"]


def nodes_in(row: dict[str, Any], columns: tuple[str, ...]) -> list[Node]:
    """The stored nodes that a row is made of."""
    found = next(each for each in (searched(), EPISODE) if each.id == row["trajectory_id"])
    last = row[columns[-1]][-1]["tool_calls"][0]["id"]
    calls = {each.id: at for at, node in enumerate(found.nodes) for each in node.message.tool_calls}
    return [found.nodes[at] for at in found.path(calls[last])]


def written(node: Node) -> JsonObject:
    reasoning = node.metadata.get("reasoning_content")
    return {**to_wire(node.message), **({"reasoning_content": reasoning} if reasoning else {})}

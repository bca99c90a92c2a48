"""Logs that the SDK wrote (1.15 and 1.58), with the messages that the SDK itself makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exchange_samples import DATA

from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.types import Message, PolicyRef, StopReason, Trajectory
from openhands_rl_plugin.trajectories.exchange.events import read_conversations, read_events

pytestmark = pytest.mark.contract

VERSIONS = ["1.15", "1.58"]


def lines(version: str) -> list[str]:
    return (DATA / f"v1_events_{version}.jsonl").read_text().splitlines()


def sdk_messages(version: str) -> list[Message]:
    wire = json.loads((DATA / f"v1_messages_{version}.json").read_text())
    return [to_message({"content": None, **message}) for message in wire]


def persisted(version: str, folder: Path) -> Path:
    """A conversation's folder as the SDK lays it out."""
    (folder / "events").mkdir(parents=True)
    for number, line in enumerate(lines(version)):
        (folder / "events" / f"event-{number:05d}-{json.loads(line)['id']}.json").write_text(line)
    (folder / "base_state.json").write_text((DATA / f"v1_state_{version}.json").read_text())
    return folder


def only(path: Path) -> Trajectory:
    (unit,) = read_conversations(path)
    return unit.read().trajectory


@pytest.mark.parametrize("version", VERSIONS)
def test_a_conversation_is_what_the_sdk_makes_of_its_events(version: str, tmp_path: Path) -> None:
    found = only(persisted(version, tmp_path / "conversation"))
    messages = [message.model_copy(update={"content": message.content or None}) for message in found.messages()]
    assert messages == sdk_messages(version)
    assert found.policy == PolicyRef(base_model="test-model")
    assert found.stop is StopReason.TERMINATED and found.failure is None
    assert found.task.id == json.loads((DATA / f"v1_state_{version}.json").read_text())["id"]
    assert found.task.instruction == "Write hello.py."
    names = [tool["function"]["name"] for tool in found.tools]
    assert names == ["terminal", "file_editor", "finish", "think"]
    assert 1 < found.times.finished - found.times.started + 1 < 600


def test_a_conversation_that_went_back_is_a_tree() -> None:
    tree = read_events([json.loads(line) for line in lines("1.58")], PolicyRef(base_model="m"))
    parents = [node.parent for node in tree.nodes]
    (fork,) = {parent for parent in parents if parent is not None and parents.count(parent) > 1}
    assert tree.nodes[fork].message.role == "tool"
    assert sum(node.sampled for node in tree.nodes) == 6


@pytest.mark.parametrize("version", VERSIONS)
def test_a_file_with_an_event_a_line_holds_the_same(version: str, tmp_path: Path) -> None:
    file = tmp_path / "conversation.jsonl"
    file.write_text("\n".join(lines(version)))
    assert only(file).messages() == only(persisted(version, tmp_path / "folder")).messages()


def test_the_conversations_of_sub_agents_are_no_samples_of_the_run(tmp_path: Path) -> None:
    """The SDK keeps them below their parent's."""
    persisted("1.58", persisted("1.58", tmp_path / "parent") / "subagents" / "child")
    parent, child = (unit.read().trajectory for unit in read_conversations(tmp_path / "parent"))
    assert child.run_id == f"{parent.run_id}/sub-agents" and child.messages() == parent.messages()


def test_events_of_newer_versions_are_passed_over() -> None:
    events = [json.loads(line) for line in lines("1.58")]
    nodes = len(read_events(events, PolicyRef(base_model="m")).nodes)
    new = {"id": "n", "kind": "SomethingNew", "source": "agent", "payload": {"x": 1}, "parent_id": events[2]["id"]}
    events.insert(3, new)
    events[4]["parent_id"] = "n"
    assert len(read_events(events, PolicyRef(base_model="m")).nodes) == nodes


def test_an_error_of_the_conversation_is_no_answer_of_the_model(tmp_path: Path) -> None:
    error = {"id": "e", "kind": "ConversationErrorEvent", "source": "environment", "code": "APIError", "detail": "down"}
    file = tmp_path / "c.jsonl"
    file.write_text("\n".join([*lines("1.15")[:6], json.dumps(error)]))
    found = only(file)
    assert found.stop is StopReason.ERROR
    assert found.failure is not None and found.failure.message == "APIError: down"
    error["code"] = "MaxIterationsReached"
    file.write_text("\n".join([*lines("1.15")[:6], json.dumps(error)]))
    assert only(file).stop is StopReason.MAX_TURNS

"""Records of AgentGym, both ways, and rows of AgentTraj."""

from __future__ import annotations

import json

import pytest
from exchange_samples import SHOP, same_talk, trajectory

from openhands_rl_plugin.contrib.formats import agentgym
from openhands_rl_plugin.core.types import JsonObject, Message
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, LeftOutError, Record


def plain(row: JsonObject) -> JsonObject:
    """As it comes out of a file."""
    return json.loads(json.dumps(row))


def test_agentgym_records_go_both_ways() -> None:
    episode = trajectory(SHOP, environment="webshop", task_id="6", reward=0.75, unsampled=(1,))
    (row,) = agentgym.rows(episode, ())
    assert row["env_name"] == "webshop" and row["task_id"] == "6" and row["id"] == episode.id
    held = plain(row)["trajectory"]
    assert isinstance(held, dict) and held["reward"] == 0.75
    assert held["conversation"][:2] == [
        {"from": "human", "value": "You are web shopping.", "loss": None},
        {"from": "gpt", "value": "Ok.", "loss": False},
    ]
    assert str(held["text"]).startswith("\nHuman: You are web shopping.\nAssistant: Ok.\nHuman: WebShop")
    read = agentgym.read(Record(plain(row)))
    found, scores = read.trajectory, read.scores
    assert found.messages() == episode.messages() and found.id == episode.id and not scores
    assert [node.sampled for node in found.nodes] == [node.sampled for node in episode.nodes]
    assert found.episode_return == 0.75 and found.run_id == "night-3"
    assert found.times.finished == episode.times.finished
    with pytest.raises(LeftOutError, match="tool calls"):
        list(agentgym.rows(trajectory(), ()))


def test_rows_of_agent_traj() -> None:
    conversation = [
        {"from": "human", "loss": None, "value": "Hi"},
        {"from": "gpt", "loss": True, "value": "Action:\nx"},
    ]
    found = agentgym.read(Record({"conversations": conversation, "item_id": "alfworld_7_2"})).trajectory
    assert (found.task.environment, found.task.id) == ("alfworld", "alfworld_7_2")
    assert same_talk(
        found.messages(), (Message(role="user", content="Hi"), Message(role="assistant", content="Action:\nx"))
    )
    with pytest.raises(ExchangeError, match="conversations: is required"):
        agentgym.read(Record({"conversations": None, "item_id": "webshop_1"}))
    with pytest.raises(ExchangeError, match="from: must be 'system', 'human'"):
        agentgym.read(Record({"conversations": [{"from": "robot", "value": "x"}], "item_id": "webshop_1"}))

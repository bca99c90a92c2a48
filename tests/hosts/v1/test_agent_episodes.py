"""A real conversation of the SDK with RLAgent: what is stored of it, and that it runs as with the stock agent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openhands.sdk.event import ActionEvent
from scripted_model import ScriptedModel, call, says
from sdk_play import EDITOR, converse, finish, make_agent, make_llm, repair, stored, think

from openhands_rl_plugin.core.types import StopReason, Trajectory

pytestmark = pytest.mark.contract


async def play(server: ScriptedModel, name: str, workspace: Path, answers: list[dict], **changes) -> Trajectory:
    """One task, closed; the only episode of the store."""
    server.script(name, answers)
    store = workspace.parent / "store"
    conversation = converse(make_agent(make_llm(server, name), store, **changes), workspace)
    conversation.send_message("Correct calc.py.")
    conversation.run()
    conversation.close()
    [episode] = await stored(store)
    return episode


@pytest.mark.shows("every completion with token ids and logprobs")
async def test_an_episode_is_stored_with_everything_that_was_sampled(server: ScriptedModel, workspace: Path) -> None:
    episode = await play(server, "repair", workspace, repair(workspace))
    assert (workspace / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert episode.stop is StopReason.TERMINATED and episode.failure is None
    assert episode.task.instruction == "Correct calc.py." and episode.task.environment == "workspace"
    sampled = [node for node in episode.nodes if node.sampled]
    assert [node.message.tool_calls[0].name for node in sampled] == [EDITOR, EDITOR, "terminal", "finish"]
    assert all(
        node.tokens is not None and len(node.tokens.logprobs) == len(node.tokens.sampled_ids) for node in sampled
    )
    assert all(node.sampling is not None and node.sampling.temperature == 1.0 for node in sampled)
    assert all(node.policy is not None and node.policy.base_model == "repair" for node in sampled)
    assert {tool["function"]["name"] for tool in episode.tools} == {EDITOR, "terminal", "finish", "think"}
    assert server.requests["repair"][0]["tools"] == list(episode.tools)
    assert "+    return a + b" in str(episode.evidence["git_patch"])
    assert episode.evidence["changed_files"] == {"calc.py": "modified"}
    assert episode.usage.calls == 4 and episode.usage.completion_tokens > 0


@pytest.mark.shows("each prompt extends the one before")
async def test_every_prompt_extends_the_one_before_although_the_sdk_repairs_calls(
    server: ScriptedModel, workspace: Path
) -> None:
    episode = await play(server, "extends", workspace, repair(workspace))
    sampled = [node for node in episode.nodes if node.sampled]
    assert [node.tokens.extends for node in sampled if node.tokens] == [False, True, True, True]
    asked = server.requests["extends"][1]["messages"]
    [replayed] = [message for message in asked if message["role"] == "assistant"]
    assert replayed["tool_calls"][0]["function"]["arguments"] == sampled[0].message.tool_calls[0].arguments
    assert not [node for node in episode.nodes if "replayed_as" in node.metadata]


async def test_ids_that_a_server_uses_again_are_told_apart(server: ScriptedModel, workspace: Path) -> None:
    answers = [
        says(None, call("think", '{"thought":"one" }', "same")),
        says(None, call("think", '{ "thought": "two"}', "same")),
        finish(id="same"),
    ]
    episode = await play(server, "same-ids", workspace, answers)
    assert [node.tokens.extends for node in episode.nodes if node.tokens] == [False, True, True]


async def test_parallel_calls_are_one_turn(server: ScriptedModel, workspace: Path) -> None:
    both = says("Both.", call("think", {"thought": "a"}, "call-a"), call("think", {"thought": "b"}, "call-b"))
    episode = await play(server, "parallel", workspace, [both, finish()])
    sampled = [node for node in episode.nodes if node.sampled]
    assert [len(node.message.tool_calls) for node in sampled] == [2, 1]
    assert [node.message.role for node in episode.nodes].count("tool") == 2
    assert [node.tokens.extends for node in sampled if node.tokens] == [False, True]


async def test_a_call_that_cannot_be_read_is_answered_and_recorded(server: ScriptedModel, workspace: Path) -> None:
    wrong = [says(None, call("no_such_tool", {"a": 1}, "call-1")), says(None, call("think", "not json", "call-2"))]
    episode = await play(server, "malformed", workspace, [*wrong, finish()])
    assert episode.stop is StopReason.TERMINATED
    assert [node.message.tool_calls[0].arguments for node in episode.nodes if node.sampled][1] == "not json"
    # Newer releases replay arguments that are no JSON in another form, because servers refuse such a request.
    last = server.requests["malformed"][-1]["messages"][-2]["tool_calls"][0]["function"]["arguments"]
    kept = last == "not json"
    assert kept or isinstance(json.loads(last), dict)
    assert [node.tokens.extends for node in episode.nodes if node.tokens] == [False, True, kept]


async def test_actions_and_completions_belong_together(server: ScriptedModel, workspace: Path) -> None:
    name = "ids"
    server.script(name, [think("a", "call-1"), finish()])
    store = workspace.parent / "store"
    conversation = converse(make_agent(make_llm(server, name), store), workspace)
    conversation.send_message("Think.")
    conversation.run()
    acted = [event.llm_response_id for event in conversation.state.events if isinstance(event, ActionEvent)]
    conversation.close()
    [episode] = await stored(store)
    assert acted == [node.metadata["response"]["id"] for node in episode.nodes if node.sampled]


async def test_costs_reach_the_conversation(server: ScriptedModel, workspace: Path) -> None:
    name = "costs"
    server.script(name, [think("a"), finish()])
    conversation = converse(make_agent(make_llm(server, name), workspace.parent / "store"), workspace)
    conversation.send_message("Think.")
    conversation.run()
    counted = conversation.conversation_stats.get_combined_metrics().accumulated_token_usage
    conversation.close()
    [episode] = await stored(workspace.parent / "store")
    assert counted is not None
    assert counted.prompt_tokens == episode.usage.prompt_tokens > 0
    assert counted.completion_tokens == episode.usage.completion_tokens > 0


@pytest.mark.shows("BestOfN")
async def test_best_of_n_samples_side_by_side_and_acts_on_one(server: ScriptedModel, workspace: Path) -> None:
    """Without forks a candidate is judged as it was said, by the model."""
    name, said = "best", iter(range(1000))

    def policy(body: dict) -> dict:
        if not body.get("tools"):
            return says("0.9" if "thought 1" in str(body["messages"]) else "0.1")
        done = any(message["role"] == "tool" for message in body["messages"])
        return finish() if done else think(f"thought {next(said)}", f"call-{next(said)}")

    server.policies[name] = policy
    store = workspace.parent / "store"
    rl = {"rollout_strategy": "BestOfN", "strategy": {"n": 3, "value": "model"}}
    conversation = converse(make_agent(make_llm(server, name), store, rl=rl), workspace)
    conversation.send_message("Think.")
    conversation.run()
    counted = conversation.conversation_stats.get_combined_metrics().accumulated_token_usage
    conversation.close()
    [episode] = await stored(store)
    assert episode.stop is StopReason.TERMINATED
    first = [node for node in episode.nodes if node.sampled and node.parent == 1]
    assert len(first) == 3 and len(episode.acted()) == 2
    assert counted is not None and counted.prompt_tokens == episode.usage.prompt_tokens


async def test_a_search_is_logged_and_counted_as_one_completion(
    server: ScriptedModel, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "logged"
    monkeypatch.setattr(server, "delay", 0.3)
    server.most_at_once = 0

    def policy(body: dict) -> dict:
        return finish() if body.get("tools") else says("0.5")

    server.policies[name] = policy
    store = workspace.parent / "store"
    rl = {"rollout_strategy": "BestOfN", "strategy": {"n": 3, "value": "model"}}
    logging = {"log_completions": True, "log_completions_folder": str(workspace.parent / "log")}
    conversation = converse(make_agent(make_llm(server, name, **logging), store, rl=rl), workspace)
    conversation.send_message("Think.")
    telemetry = conversation.agent.llm.telemetry
    assert telemetry is not None
    logged: list[str] = []
    updates: list[int] = []
    metrics = conversation.agent.llm.metrics
    telemetry.set_log_completions_callback(lambda _, data: logged.append(json.loads(data)["response"]["id"]))
    telemetry.set_stats_update_callback(lambda: updates.append(len(metrics.token_usages)))
    conversation.run()
    conversation.close()
    [episode] = await stored(store)
    calls = server.requests[name]
    assert server.most_at_once == 3 and len(calls) == 4
    assert len(logged) == max(updates) == len(metrics.token_usages) == 1
    counted = metrics.accumulated_token_usage
    assert counted is not None and counted.prompt_tokens == episode.usage.prompt_tokens
    assert episode.stop is StopReason.TERMINATED


@pytest.mark.parametrize("limit", [1, 2])
async def test_the_turn_limit_of_the_settings_ends_the_episode(
    server: ScriptedModel, workspace: Path, limit: int
) -> None:
    answers = [think(str(number), f"call-{number}") for number in range(5)]
    episode = await play(server, f"limit-{limit}", workspace, answers, rl={"max_turns": limit})
    assert episode.stop is StopReason.MAX_TURNS and episode.failure is None
    assert len(episode.acted()) == limit

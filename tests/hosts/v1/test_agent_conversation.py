"""What a conversation of the SDK can do works as with the stock agent, and is recorded as it is."""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import needs_bubblewrap
from openhands.sdk import LLM, Agent, AgentBase
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.conversation import LocalConversation
from scripted_model import ScriptedModel, call, reply
from sdk_play import EDITOR, converse, finish, make_agent, make_llm, run_task, stored, think

from openhands_rl_plugin.core.types import CONDENSATION, TURN, StopReason, Trajectory, kind_of
from openhands_rl_plugin.training.algorithms import samples_of
from openhands_rl_plugin.trajectories.exchange.events import read_conversations

pytestmark = pytest.mark.contract


def seen(trajectory: Trajectory) -> list[list[tuple[str, str, list[str]]]]:
    """What the model saw before each answer that was acted on. New SDKs send messages of a user in a row as one."""
    prompts = []
    for at in trajectory.acted():
        prompt: list[tuple[str, str, list[str]]] = []
        for each in trajectory.messages(at)[:-1]:
            text = each.content or ""
            if each.role == "user" and prompt and prompt[-1][0] == "user":
                text = f"{prompt.pop()[1]}\n{text}"
            prompt.append((each.role, text, [call.id for call in each.tool_calls]))
        prompts.append(prompt)
    return prompts


@pytest.mark.shows("condensers, summaries recorded")
async def test_a_condensed_conversation_trains_all_that_was_sampled_and_is_read_from_the_sdks_events(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    numbers = iter(range(1000))

    def policy(body: dict) -> dict:
        number = next(numbers)
        if not body.get("tools"):
            return reply(f"summary {number}")
        both = (call("think", {"thought": f"{name}{number}"}, f"{name}{number}") for name in "ab")
        return finish() if number > 16 else reply("Two.", *both)

    server.policies["condensed"] = policy
    llm, kept = make_llm(server, "condensed"), tmp_path / "kept"
    condenser = LLMSummarizingCondenser(llm=make_llm(server, "condensed", usage_id="condenser"), max_size=14)
    agent = make_agent(llm, tmp_path / "store", tools=(), condenser=condenser)
    run_task(agent, workspace, persistence_dir=str(kept), task="Think.")
    [episode] = await stored(tmp_path / "store")
    turns = [node for node in episode.nodes if node.sampled and kind_of(node) == TURN]
    summaries = [node for node in episode.nodes if node.sampled and kind_of(node) == CONDENSATION]
    assert all((node.message.content or "").startswith("summary") for node in summaries)
    assert len(episode.ends()) == len(summaries) + 1 > 2
    trained = sum(sum(sample.mask) for sample in samples_of(episode))
    assert trained == sum(len(node.tokens.sampled_ids) for node in turns if node.tokens) > 0
    assert episode.usage.calls == len(server.requests["condensed"])
    [unit] = read_conversations(kept)
    found = unit.read().trajectory
    assert found.evidence["condensations"] == len(summaries)
    assert len(found.acted()) == len(episode.acted()) and seen(found) == seen(episode)


@pytest.mark.skipif(not hasattr(LocalConversation, "arun"), reason="the SDK before 1.23 has no arun")
@pytest.mark.shows("async runs, interrupted")
async def test_arun_is_recorded_and_can_be_interrupted(server: ScriptedModel, workspace: Path, tmp_path: Path) -> None:
    server.script("arun", [think("a", "call-1"), finish()])
    conversation = converse(make_agent(make_llm(server, "arun"), tmp_path / "store", tools=()), workspace)
    conversation.send_message("Think.")
    await conversation.arun()
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED and len(episode.acted()) == 2

    server.script("arun", [think("never acted on", "call-2")])
    server.delay = 3.0
    try:
        slow = converse(make_agent(make_llm(server, "arun"), tmp_path / "slow", tools=()), workspace)
        slow.send_message("Think.")
        running = asyncio.ensure_future(slow.arun())
        await asyncio.sleep(1.0)
        running.cancel()
        await asyncio.wait([running])
        slow.close()
    finally:
        server.delay = 0.0
    assert [each.acted() for each in await stored(tmp_path / "slow")] in ([], [()])


@pytest.mark.shows("resumed conversations")
async def test_a_conversation_is_resumed_by_its_agent_and_not_by_another(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.script("resume", [reply("Which one?"), finish()])
    store, kept, id = tmp_path / "store", tmp_path / "kept", uuid.uuid4()

    def begin(agent: AgentBase) -> LocalConversation:
        return converse(agent, workspace, persistence_dir=str(kept), conversation_id=id)

    llm = make_llm(server, "resume")
    first = begin(make_agent(llm, store, tools=()))
    first.send_message("Do it.")
    first.run()
    first.close()
    with pytest.raises(ValueError, match="RLAgent"):
        begin(Agent(llm=llm, tools=[]))
    second = begin(make_agent(llm, store, tools=(), rl={"rollout_strategy": "BestOfN", "strategy": {"n": 1}}))
    second.send_message("That one.")
    second.run()
    second.close()
    one, two = await stored(store)
    assert [one.stop, two.stop] == [StopReason.NO_ACTION, StopReason.TERMINATED]
    assert one.group_id == two.group_id == str(id) and two.strategy.name == "BestOfN"
    assert [node.message.role for node in two.nodes] == ["system", "user", "assistant", "user", "assistant"]
    assert [node.sampled for node in two.nodes] == [False, False, False, False, True]


@needs_bubblewrap
@pytest.mark.parametrize("sandboxed", [False, True])
async def test_the_tools_of_a_conversation_that_is_resumed_with_other_settings_work_in_its_folder(
    sandboxed: bool, server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    place = "/workspace" if sandboxed else str(workspace)
    looks = reply(None, call(EDITOR, {"command": "view", "path": f"{place}/calc.py"}, "call-1"))
    server.script("resume-one", [reply("Which one?")])
    server.script("resume-two", [looks, finish()])
    kept, id = str(tmp_path / "kept"), uuid.uuid4()
    before, after = ("none", "bubblewrap") if sandboxed else ("bubblewrap", "none")
    for model, isolation in (("resume-one", before), ("resume-two", after)):
        llm, rl = make_llm(server, model, usage_id="agent"), {"workspace": {"isolation": isolation}}
        agent = make_agent(llm, tmp_path / "store", tools=[EDITOR], rl=rl)
        run_task(agent, workspace, persistence_dir=kept, conversation_id=id, task="Do it.")
    one, two = await stored(tmp_path / "store")
    assert [one.stop, two.stop] == [StopReason.NO_ACTION, StopReason.TERMINATED] and two.failure is None
    heard = [message.content or "" for message in two.messages() if message.role == "tool"]
    assert "return a - b" in heard[0]


async def test_the_server_of_the_settings_is_asked_without_the_sdks_llm(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.script("served", [think("a", "call-1"), finish()])
    rl = {"serving": {"base_url": server.url, "model": "served"}}
    llm = LLM(model="openai/elsewhere", base_url="http://127.0.0.1:9/v1", api_key="key", num_retries=0)
    conversation = run_task(make_agent(llm, tmp_path / "store", rl=rl), workspace, task="Think.")
    counted = conversation.conversation_stats.get_combined_metrics().accumulated_token_usage
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED
    assert [node.tokens.extends for node in episode.nodes if node.tokens] == [False, True]
    assert counted is not None and counted.prompt_tokens == episode.usage.prompt_tokens > 0


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@st.composite
def written(draw: st.DrawFn, value: st.SearchStrategy[Any]) -> str:
    """A value as some model or other writes it."""
    spaced = draw(st.sampled_from([None, (",", ":"), (" , ", " : ")]))
    text = json.dumps(
        draw(value), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])), separators=spaced
    )
    return draw(st.sampled_from(["", " ", "\n"])) + text + draw(st.sampled_from(["", " ", "\n\n"]))


THOUGHTS = written(
    st.fixed_dictionaries({"thought": TEXT | st.lists(TEXT).map(json.dumps)}, optional={"summary": TEXT})
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(THOUGHTS, min_size=1, max_size=8))
def test_the_prompts_of_a_conversation_extend_each_other(server: ScriptedModel, sampled: list[str]) -> None:
    name = "forms"
    answers = [reply(None, call("think", arguments, f"call-{at}")) for at, arguments in enumerate(sampled)]
    server.script(name, [*answers, finish()])
    with tempfile.TemporaryDirectory() as made:
        store, workspace = Path(made) / "store", Path(made) / "w"
        workspace.mkdir()
        run_task(make_agent(make_llm(server, name), store, tools=()), workspace, task="Think.")
        [episode] = asyncio.run(stored(store))
    acted = [node for node in episode.nodes if node.sampled]
    assert [node.message.tool_calls[0].arguments for node in acted[:-1]] == sampled
    assert [node.tokens.extends for node in acted if node.tokens] == [False, *(True for _ in sampled)]
    last = server.requests[name][-1]["messages"]
    replayed = [message["tool_calls"][0] for message in last if message.get("tool_calls")]
    assert [one["function"]["arguments"] for one in replayed] == sampled

"""What else a conversation of the SDK can do works as with the stock agent, and is recorded as what it is."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import ClassVar

import pytest
from needs import needs_bubblewrap
from openhands.sdk import LLM, Agent, AgentBase
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.conversation import ConversationExecutionStatus, LocalConversation
from openhands.sdk.event import Condensation, ObservationEvent
from openhands.sdk.security.confirmation_policy import AlwaysConfirm
from pydantic import ValidationError
from scripted_model import ScriptedModel, call, says
from sdk_play import EDITOR, TERMINAL, converse, finish, make_agent, make_llm, stored, think

from openhands_rl_plugin.core.types import (
    CONDENSATION,
    TURN,
    Completion,
    JsonObject,
    Message,
    SamplingParams,
    StopReason,
    Tokens,
    kind_of,
)
from openhands_rl_plugin.hosts.v1 import RLAgent
from openhands_rl_plugin.session.session import sampling_from
from openhands_rl_plugin.training.data.batch import samples_of


@pytest.mark.shows("condensers, summaries recorded")
async def test_a_condensed_conversation_trains_all_that_was_sampled(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    said = iter(range(1000))

    def policy(body: dict) -> dict:
        number = next(said)
        if not body.get("tools"):
            return says(f"summary {number}")
        return finish() if number > 12 else think(f"hm {number}", f"call-{number}")

    server.policies["condensed"] = policy
    llm = make_llm(server, "condensed")
    condenser = LLMSummarizingCondenser(llm=make_llm(server, "condensed", usage_id="condenser"), max_size=10)
    conversation = converse(make_agent(llm, tmp_path / "store", tools=(), condenser=condenser), workspace)
    conversation.send_message("Think.")
    conversation.run()
    condensations = [event for event in conversation.state.events if isinstance(event, Condensation)]
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    turns = [node for node in episode.nodes if node.sampled and kind_of(node) == TURN]
    summaries = [node for node in episode.nodes if node.sampled and kind_of(node) == CONDENSATION]
    assert len(summaries) == len(condensations) > 0
    assert all((node.message.content or "").startswith("summary") for node in summaries)
    assert len(episode.ends()) == len(summaries) + 1
    trained = sum(sum(sample.mask) for sample in samples_of(episode))
    assert trained == sum(len(node.tokens.sampled_ids) for node in turns if node.tokens) > 0
    assert episode.usage.calls == len(server.requests["condensed"])


async def test_actions_wait_for_their_confirmation(server: ScriptedModel, workspace: Path, tmp_path: Path) -> None:
    look = says(None, call(TERMINAL, {"command": "echo looked"}, "call-1"))
    server.script("confirm", [look, finish()])
    conversation = converse(make_agent(make_llm(server, "confirm"), tmp_path / "store"), workspace)
    conversation.set_confirmation_policy(AlwaysConfirm())
    conversation.send_message("Look.")
    conversation.run()
    assert conversation.state.execution_status == ConversationExecutionStatus.WAITING_FOR_CONFIRMATION
    assert not [event for event in conversation.state.events if isinstance(event, ObservationEvent)]
    [before] = await stored(tmp_path / "store")
    assert len([node for node in before.nodes if node.sampled]) == 1, "stored before it was acted on"
    while conversation.state.execution_status == ConversationExecutionStatus.WAITING_FOR_CONFIRMATION:
        conversation.run()
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED and len(server.requests["confirm"]) == 2


async def test_streams_reach_their_callbacks_and_ids_the_store(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.script("stream", [says("I say this.")])
    chunks: list[str] = []

    def on_token(chunk) -> None:
        chunks.extend(choice.delta.content or "" for choice in chunk.choices)

    agent = make_agent(make_llm(server, "stream", stream=True), tmp_path / "store", tools=())
    conversation = converse(agent, workspace, token_callbacks=[on_token])
    conversation.send_message("Say it.")
    conversation.run()
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert "".join(chunks) == "I say this."
    assert [node.tokens is not None for node in episode.nodes if node.sampled] == [True]


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
    server.script("resume", [says("Which one?"), finish()])
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
async def test_the_tools_of_a_conversation_that_is_resumed_with_other_settings_work_where_they_say(
    sandboxed: bool, server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    place = "/workspace" if sandboxed else str(workspace)
    looks = says(None, call(EDITOR, {"command": "view", "path": f"{place}/calc.py"}, "call-1"))
    server.script("resume-one", [says("Which one?")])
    server.script("resume-two", [looks, finish()])
    kept, id = str(tmp_path / "kept"), uuid.uuid4()
    before, after = ("none", "bubblewrap") if sandboxed else ("bubblewrap", "none")
    for model, isolation in (("resume-one", before), ("resume-two", after)):
        llm, rl = make_llm(server, model, usage_id="agent"), {"workspace": {"isolation": isolation}}
        agent = make_agent(llm, tmp_path / "store", tools=[EDITOR], rl=rl)
        conversation = converse(agent, workspace, persistence_dir=kept, conversation_id=id)
        conversation.send_message("Do it.")
        conversation.run()
        conversation.close()
    one, two = await stored(tmp_path / "store")
    assert [one.stop, two.stop] == [StopReason.NO_ACTION, StopReason.TERMINATED] and two.failure is None
    heard = [message.content or "" for message in two.messages() if message.role == "tool"]
    assert "return a - b" in heard[0]


def test_an_agent_survives_serialisation_as_what_it_is(server: ScriptedModel, tmp_path: Path) -> None:
    agent = make_agent(make_llm(server, "dump"), tmp_path, rl={"rollout_strategy": "BestOfN", "strategy": {"n": 2}})
    again = AgentBase.model_validate(agent.model_dump(mode="json"))
    assert isinstance(again, RLAgent) and again.kind == "RLAgent" and again.rl == agent.rl
    assert type(again.llm) is LLM
    assert [type(llm) for llm in agent.get_all_llms()] == [LLM]


def test_a_wrong_setting_is_said_in_one_line(server: ScriptedModel) -> None:
    with pytest.raises(ValidationError, match=r"\[rl\] max_turn: .*max_turns"):
        RLAgent(llm=make_llm(server, "wrong"), tools=[], rl={"max_turn": 3})


class WatchedAgent(RLAgent):
    """Not local to a test: the SDK refuses to read any agent then."""

    seen: ClassVar[list[tuple[dict, dict]]] = []

    def model_copy(self, **changes):
        copied = super().model_copy(**changes)
        self.seen.append((copied.__pydantic_private__ or {}, dict(copied.__pydantic_private__ or {})))
        return copied


def test_a_step_assigns_nothing_to_the_agent_that_a_copy_would_lose(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.script("private", [think("a", "call-1"), finish()])
    source = make_agent(make_llm(server, "private"), tmp_path / "store")
    agent = WatchedAgent(llm=source.llm, tools=source.tools, rl=source.rl)
    seen = WatchedAgent.seen
    conversation = converse(agent, workspace)
    conversation.send_message("Think.")
    conversation.run()
    conversation.close()
    assert len(seen) >= 2
    for now, before in seen[-2:]:
        assert {name: id(value) for name, value in now.items()} == {name: id(value) for name, value in before.items()}


class CallingEngine:
    """An engine in this process: thinks once, then finishes; its tokens are characters."""

    def __init__(self) -> None:
        self.tools: list[JsonObject] = []

    async def complete(self, messages, *, tools=(), n=1, sampling: SamplingParams | None = None) -> list[Completion]:
        self.tools = list(tools)
        thought = any(message.role == "tool" for message in messages)
        name, arguments = ("finish", '{"message": "done"}') if thought else ("think", '{"thought":"hm" }')
        prompt = tuple("".join(f"{each.role}{each.content}{_calls(each)}" for each in messages).encode())
        answer = Message.model_validate(
            {"role": "assistant", "tool_calls": [{"id": f"call-{thought}", "name": name, "arguments": arguments}]}
        )
        sampled = tuple(f"assistant{answer.content}{_calls(answer)}".encode())
        tokens = Tokens(prompt_ids=prompt, sampled_ids=sampled, logprobs=(-1.0,) * len(sampled))
        return [Completion(message=answer, tokens=tokens, sampling=sampling) for _ in range(n)]


def _calls(message: Message) -> str:
    return "".join(f"{call.name}{call.arguments}" for call in message.tool_calls)


async def test_an_engine_of_the_project_can_sample_instead_of_the_sdks_llm(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    engine = CallingEngine()
    conversation = converse(make_agent(make_llm(server, "unasked"), tmp_path / "store"), workspace)
    conversation.send_message("Think.")
    with sampling_from(engine):
        conversation.run()
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED and not server.requests["unasked"]
    assert [node.tokens.extends for node in episode.nodes if node.tokens] == [False, True]
    assert list(episode.tools) == engine.tools


async def test_the_server_of_the_settings_is_asked_without_the_sdks_llm(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    server.script("served", [think("a", "call-1"), finish()])
    rl = {"serving": {"base_url": server.url, "model": "served"}}
    llm = LLM(model="openai/elsewhere", base_url="http://127.0.0.1:9/v1", api_key="key", num_retries=0)
    conversation = converse(make_agent(llm, tmp_path / "store", rl=rl), workspace)
    conversation.send_message("Think.")
    conversation.run()
    counted = conversation.conversation_stats.get_combined_metrics().accumulated_token_usage
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED
    assert [node.tokens.extends for node in episode.nodes if node.tokens] == [False, True]
    assert counted is not None and counted.prompt_tokens == episode.usage.prompt_tokens > 0

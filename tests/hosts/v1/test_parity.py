"""RLAgent beside the stock agent: the same script gives the same events, requests, files and costs."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openhands.sdk.context.condenser import LLMSummarizingCondenser
from openhands.sdk.conversation import ConversationExecutionStatus as Status
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.hooks import HookConfig, HookDefinition, HookMatcher
from openhands.sdk.llm import ImageContent, Message, TextContent
from openhands.sdk.security.confirmation_policy import AlwaysConfirm, ConfirmRisky, NeverConfirm
from openhands.sdk.security.llm_analyzer import LLMSecurityAnalyzer
from scripted_model import ScriptedModel, call, reply
from sdk_play import EDITOR, finish, make_llm, think
from side_by_side import same, side_by_side

from openhands_rl_plugin.core.messages import reasoning_of
from openhands_rl_plugin.core.types import CONDENSATION, StopReason, kind_of
from openhands_rl_plugin.hosts.v1 import RLAgent

pytestmark = pytest.mark.contract


def create(file: Path, id: str, **more: str) -> dict[str, Any]:
    """A call that makes a file. No command: the stock terminal's output is not always the same."""
    return call(EDITOR, {"command": "create", "path": str(file), "file_text": f"{file.name}\n", **more}, id)


@pytest.mark.shows("parallel tool calls")
async def test_calls_in_one_answer(server: ScriptedModel, workspace: Path) -> None:
    file = str(workspace / "calc.py")
    edit = {"command": "str_replace", "path": file, "old_str": "a - b", "new_str": "a + b"}
    answers = [
        reply(
            "All at once.",
            call("think", {"thought": "hm"}, "call-1"),
            call(EDITOR, edit, "call-2"),
            create(workspace / "one", "call-3"),
            call("no_such_tool", {"a": 1}, "call-4"),
        ),
        finish(),
    ]
    stock, ours, [episode] = await side_by_side(server, workspace, answers)
    same(stock, ours)
    assert ours.files == {"calc.py": "def add(a, b):\n    return a + b\n", "one": "one\n"}
    assert "no_such_tool" in stock.texts()
    first, second = episode.acted()
    assert len(episode.nodes[first].message.tool_calls) == 4
    assert [node.message.role for node in episode.nodes[first + 1 : second]] == ["tool"] * 4
    assert [node.tokens.extends for node in episode.nodes if node.tokens] == [False, True]


@pytest.mark.parametrize("way", ["run", "arun"])
@pytest.mark.shows("streaming")
async def test_streams(server: ScriptedModel, workspace: Path, way: str) -> None:
    if not hasattr(LocalConversation, way):
        pytest.skip("the SDK before 1.23 has no arun")
    answers = [
        {**reply("I say what I do.", call("think", {"thought": "hm"})), "reasoning_content": "Let me think of it."},
        {**finish(), "reasoning_content": "It is done."},
    ]

    def callbacks(heard: list[Any]) -> dict[str, Any]:
        def on_token(chunk: Any) -> None:
            for choice in chunk.choices:
                for name in ("reasoning_content", "content"):
                    if text := getattr(choice.delta, name, None):
                        known = heard and heard[-1][0] == name
                        heard[-1:] = [(name, heard[-1][1] + text)] if known else [*heard[-1:], (name, text)]
                for one in choice.delta.tool_calls or ():
                    heard.append((one.id, one.function.name, one.function.arguments))
                if choice.finish_reason:
                    heard.append(choice.finish_reason)

        return {"token_callbacks": [on_token]}

    def drive(conversation: LocalConversation) -> None:
        conversation.send_message("Think.")
        if way == "run":
            conversation.run()
        else:
            asyncio.run(conversation.arun())

    def drive_apart(conversation: LocalConversation) -> None:
        thread = threading.Thread(target=drive, args=(conversation,))
        thread.start()
        thread.join()

    stock, ours, [episode] = await side_by_side(
        server, workspace, answers, drive_apart, tools=(), llm={"stream": True}, conversation=callbacks
    )
    assert ("reasoning_content", "Let me think of it.") in stock.heard
    same(stock, ours, streamed=True)
    assert [node.tokens is not None for node in episode.nodes if node.sampled] == [True, True]


@pytest.mark.shows("security analyzer")
async def test_risks_that_the_model_names_are_asked_about(server: ScriptedModel, workspace: Path) -> None:
    risky = create(workspace / "risky", "call-1", security_risk="HIGH")
    safe = create(workspace / "safe", "call-2", security_risk="LOW")
    seen: list[Status] = []

    def drive(conversation: LocalConversation) -> None:
        conversation.set_security_analyzer(LLMSecurityAnalyzer())
        conversation.set_confirmation_policy(ConfirmRisky())
        conversation.send_message("Touch.")
        conversation.run()
        seen.append(conversation.state.execution_status)
        conversation.reject_pending_actions("Too risky.")
        conversation.run()

    answers = [reply(None, risky), reply(None, safe), finish()]
    stock, ours, [episode] = await side_by_side(server, workspace, answers, drive)
    same(stock, ours)
    assert seen == [Status.WAITING_FOR_CONFIRMATION] * 2 and "Too risky." in ours.texts()
    assert sorted(ours.files) == ["calc.py", "safe"]
    # The model was asked to name risks, and its prompt is recorded.
    assert "security_risk" in str(episode.tools)
    assert any("Too risky." in (node.message.content or "") for node in episode.nodes)


@pytest.mark.parametrize("confirmed", [True, False])
@pytest.mark.shows("confirmations and rejections")
async def test_actions_are_confirmed_or_rejected(server: ScriptedModel, workspace: Path, confirmed: bool) -> None:
    def drive(conversation: LocalConversation) -> None:
        conversation.set_confirmation_policy(AlwaysConfirm())
        conversation.send_message("Touch.")
        for _ in range(8):
            conversation.run()
            if conversation.state.execution_status != Status.WAITING_FOR_CONFIRMATION:
                break
            if not confirmed:
                conversation.reject_pending_actions("No.")
                conversation.set_confirmation_policy(NeverConfirm())

    two = [create(workspace / name, f"call-{name}") for name in ("one", "two")]
    stock, ours, [episode] = await side_by_side(server, workspace, [reply(None, *two), finish()], drive)
    same(stock, ours)
    assert ours.status == Status.FINISHED and ("one" in ours.files) is ("two" in ours.files) is confirmed
    first, _ = episode.acted()
    answers = [node.message.content or "" for node in episode.nodes if node.message.role == "tool"]
    assert len(answers) >= 2 and all("No." in text for text in answers[:2]) is not confirmed
    assert len(episode.nodes[first].message.tool_calls) == 2


def hooks(**commands: str) -> Callable[[list[Any]], dict[str, Any]]:
    made = {
        name: [HookMatcher(matcher="*", hooks=[HookDefinition(command=command, timeout=20)])]
        for name, command in commands.items()
    }
    return lambda heard: {"hook_config": HookConfig(**made)}


@pytest.mark.shows("hooks")
async def test_hooks(server: ScriptedModel, workspace: Path) -> None:
    config = hooks(
        user_prompt_submit="""echo '{"additionalContext": "Today is Monday."}'""",
        pre_tool_use="""grep -q forbidden && { echo "not allowed" >&2; exit 2; } || exit 0""",
        post_tool_use=f"echo after >> {workspace}/hooked",
        stop=f"""test -e {workspace}/stopped || {{ touch {workspace}/stopped; echo '{{"decision": "deny", """
        """"reason": "Run the tests first."}'; exit 2; }""",
    )
    answers = [
        reply(None, create(workspace / "forbidden", "call-1")),
        reply(None, create(workspace / "allowed", "call-2")),
        finish(id="call-3"),
        reply("I run them.", create(workspace / "tested", "call-4")),
        finish("Now it is done.", id="call-5"),
    ]
    stock, ours, episodes = await side_by_side(server, workspace, answers, conversation=config)
    same(stock, ours)
    assert sorted(ours.files) == ["allowed", "calc.py", "hooked", "stopped", "tested"]
    for word in ("Today is Monday.", "not allowed", "Run the tests first."):
        assert word in ours.texts()
    # A hook's objection is no next task: one episode.
    [episode] = episodes
    heard = "\n".join(node.message.content or "" for node in episode.nodes if not node.sampled)
    for word in ("Today is Monday.", "not allowed", "Run the tests first."):
        assert word in heard
    assert len(episode.acted()) == 5 and episode.stop is StopReason.TERMINATED


MCP_SERVER = """
from mcp.server.fastmcp import FastMCP
server = FastMCP("weather")
@server.tool()
def sky(city: str) -> str:
    "The colour of the sky."
    if city == "Atlantis":
        raise ValueError("there is no such city")
    return f"{city}: blue"
server.run()
"""


@pytest.mark.shows("MCP tools")
async def test_tools_of_an_mcp_server(server: ScriptedModel, workspace: Path) -> None:
    script = workspace.parent / "weather.py"
    script.write_text(MCP_SERVER)
    servers = {"weather": {"command": sys.executable, "args": [str(script)]}}
    wrapped = RLAgent.model_fields["mcp_config"].annotation == dict[str, Any]

    # The SDK names a tool with its server's name or without, by release.
    named: list[str] = []

    def drive(conversation: LocalConversation) -> None:
        conversation.send_message("How is the sky?")
        conversation.run()
        named.extend(name for name in conversation.agent.tools_map if name.endswith("sky"))

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        [name] = [tool["function"]["name"] for tool in body["tools"] if tool["function"]["name"].endswith("sky")]
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        cities = ["Rome", "Atlantis"]
        return reply(None, call(name, {"city": cities[turn]}, f"call-{turn}")) if turn < 2 else finish()

    server.policies["side"] = policy
    try:
        stock, ours, [episode] = await side_by_side(
            server,
            workspace,
            [],
            drive,
            tools=(),
            agent=lambda model: {"mcp_config": {"mcpServers": servers} if wrapped else servers},
        )
    finally:
        del server.policies["side"]
    same(stock, ours)
    assert "Rome: blue" in ours.texts() and "there is no such city" in ours.texts()
    tools: Any = list(episode.tools)
    assert named[0] in [tool["function"]["name"] for tool in tools]
    heard = [node.message.content or "" for node in episode.nodes if node.message.role == "tool"]
    assert "Rome: blue" in heard[0] and "there is no such city" in heard[1]
    assert [node.tokens.extends for node in episode.nodes if node.tokens] == [False, True, True]


PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.shows("images")
async def test_images(server: ScriptedModel, workspace: Path, sees: bool) -> None:
    def drive(conversation: LocalConversation) -> None:
        parts = [TextContent(text="What is it?"), ImageContent(image_urls=[PIXEL])]
        conversation.send_message(Message(role="user", content=parts))
        conversation.run()

    llm = {"disable_vision": not sees}
    if sees:
        # The SDK knows by its name which model sees.
        llm["model_canonical_name"] = "gpt-4o"
    stock, ours, episodes = await side_by_side(server, workspace, [finish("a pixel")], drive, tools=(), llm=llm)
    same(stock, ours)
    if not sees:
        return
    assert "image_url" in str(ours.requests)
    [episode] = episodes
    assert "What is it?" in (episode.nodes[1].message.content or "") and PIXEL not in str(episode)


@pytest.mark.shows("condensation on request (/compact)")
async def test_condensation_on_request(server: ScriptedModel, workspace: Path) -> None:
    """What ``/compact`` of a client asks for."""
    if not hasattr(LocalConversation, "condense"):
        pytest.skip("an SDK without it")

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        if not body.get("tools"):
            return reply("summary of it")
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        return think(f"hm {turn}", f"call-{turn}") if turn % 5 < 4 else finish(id=f"call-{turn}")

    def drive(conversation: LocalConversation) -> None:
        conversation.send_message("Think.")
        conversation.run()
        conversation.condense()
        conversation.send_message("Go on.")
        conversation.run()

    def condenser(model: str) -> dict[str, Any]:
        own = make_llm(server, model, usage_id="condenser")
        return {"condenser": LLMSummarizingCondenser(llm=own, max_size=100, keep_first=2)}

    server.policies["side"] = policy
    try:
        stock, ours, episodes = await side_by_side(server, workspace, [], drive, tools=(), agent=condenser)
    finally:
        del server.policies["side"]
    same(stock, ours)
    assert {"CondensationRequest", "Condensation"} <= set(ours.kinds())
    summaries = [node for each in episodes for node in each.nodes if node.sampled and kind_of(node) == CONDENSATION]
    assert [node.message.content for node in summaries] == ["summary of it"]
    assert sum(each.usage.calls for each in episodes) == len(ours.requests)
    assert [each.stop for each in episodes] == [StopReason.TERMINATED] * len(episodes)


def of_the_project(server: ScriptedModel, model: str) -> dict[str, Any]:
    """An agent that is sampled from by the project's engine, not by the SDK's LLM."""
    return {"rl": {"serving": {"base_url": server.url, "model": model}}}


@pytest.mark.parametrize("own", [False, True])
async def test_answers_that_the_sdk_cannot_read(server: ScriptedModel, workspace: Path, own: bool) -> None:
    """The SDK replays a call whose arguments are no JSON in another form, because servers refuse such a request."""
    answers = [
        reply(None, call("think", '{"thought": ', "call-1")),
        reply(None, call("think", {"no": "thought"}, "call-2")),
        reply(""),
        {**finish(), "reasoning_content": "At last."},
    ]
    agent = partial(of_the_project, server) if own else lambda model: {}
    stock, ours, [episode] = await side_by_side(server, workspace, answers, tools=(), agent=agent)
    same(stock, ours, texts_only=own)
    sampled = [call.arguments for node in episode.sampled() for call in node.message.tool_calls]
    assert sampled[:2] == ['{"thought": ', '{"no": "thought"}']
    assert reasoning_of(list(episode.sampled())[-1]) == "At last."


@pytest.mark.parametrize("native", [True, False])
async def test_calls_that_are_written_as_text(server: ScriptedModel, workspace: Path, native: bool) -> None:
    written = "<function=think>\n<parameter=thought>hm</parameter>\n</function>"
    broken = "<function=think>\n<parameter=nothing>hm</parameter>\n</function>"
    done = "<function=finish>\n<parameter=message>done</parameter>\n</function>"
    answers = [reply(written), reply(broken), reply(done)] if not native else [finish()]
    stock, ours, [episode] = await side_by_side(
        server, workspace, answers, tools=(), llm={"native_tool_calling": native}
    )
    same(stock, ours)
    assert ours.status == Status.FINISHED and all(node.tokens for node in episode.sampled())

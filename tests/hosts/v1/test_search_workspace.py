"""Search in real conversations of the SDK, in copies of a real workspace: what is executed, sent, recorded and left."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs_bubblewrap
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.event import LLMConvertibleEvent
from scripted_model import ScriptedModel, call, says
from sdk_play import EDITOR, TERMINAL, converse, finish, make_agent, make_llm, stored, think

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.messages import to_message, to_wire
from openhands_rl_plugin.core.types import Message, Observation, Score, StopReason, ToolCall, Trajectory
from openhands_rl_plugin.hosts.shared.sessions import runtime_of
from openhands_rl_plugin.hosts.v1.agent import ConversationBranch, log_of
from openhands_rl_plugin.hosts.v1.session_llm import Prompts
from openhands_rl_plugin.hosts.v1.workspace import ConversationWorkspace
from openhands_rl_plugin.session.session import BranchWorld, Turn

pytestmark = [pytest.mark.contract, needs_bubblewrap]

BY_PATCH = {"value": "reward", "value_options": {"reward": f"{__name__}:PatchReward"}}


class PatchReward:
    """1 when the workspace holds the right line, by the evidence of where the episode stands."""

    version = "patch-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        patch = str(trajectory.evidence.get("git_patch"))
        return Score(trajectory_id=trajectory.id, reward=float("+right" in patch), reward_version=self.version)


@pytest.fixture(autouse=True)
def no_folder_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    left = [path.name for path in folder.glob("*/*")]
    assert [name for name in left if name.startswith(("openhands-rl-fork-", "openhands-rl-workspace-"))] == []


def depth(body: dict[str, Any]) -> int:
    return sum(message["role"] == "assistant" for message in body["messages"])


def writer(body: dict[str, Any]) -> dict[str, Any]:
    """Looks, then writes the right line or a wrong one, then finishes; which one, and with what id, is the seed's.

    One call needs the SDK's repair, and one is of a tool that does not exist.
    """
    seed, turn = body["seed"], depth(body)
    if turn == 0:
        look = {"command": "pwd; cat answer.txt 2>&1; echo note >> /tmp/notes; wc -l < /tmp/notes"}
        return says("I look.", call(TERMINAL, look, f"look{seed % 2}"))
    if turn == 1:
        return says(None, call(EDITOR, '{"command":"view","path":"/workspace/calc.py","view_range":"[1, 1]"}', "view"))
    if turn == 2:
        return says("Hm.", call("no_such_tool", {"a": 1}, f"none{seed % 2}"))
    if turn == 3:
        word = "right" if seed % 3 == 0 else f"wrong{seed % 3}"
        write = {"command": "create", "path": "/workspace/answer.txt", "file_text": f"{word}\n"}
        return says(None, call(EDITOR, write, f"write{seed}"))
    return finish("done", f"end{seed}")


def opened(server: ScriptedModel, name: str, folder: Path, **rl: Any) -> LocalConversation:
    rl = {"workspace": {"isolation": "bubblewrap"}, "max_turns": 8, **rl}
    return converse(make_agent(make_llm(server, name), folder.parent / "store", rl=rl), folder)


async def play(
    server: ScriptedModel, name: str, folder: Path, policy: Callable[[dict], dict], **rl: Any
) -> tuple[Trajectory, int]:
    """The episode, and the prompt tokens that the SDK counted."""
    server.policies[name] = policy
    conversation = opened(server, name, folder, **rl)
    conversation.send_message("Write it.")
    conversation.run()
    counted = conversation.conversation_stats.get_combined_metrics().accumulated_token_usage
    conversation.close()
    [episode] = await stored(folder.parent / "store")
    return episode, counted.prompt_tokens if counted is not None else 0


@pytest.mark.shows("search in forks: MCTS, ToT")
async def test_mcts_finds_what_is_right_and_plays_it(server: ScriptedModel, workspace: Path) -> None:
    options = {"num_simulations": 8, "first_branches": 2, "num_branches": 3, "depth": 5, **BY_PATCH}
    episode, counted = await play(
        server, "mcts", workspace, writer, rollout_strategy="MCTS", strategy=options, max_turns=6
    )
    assert episode.failure is None and episode.stop is StopReason.TERMINATED
    assert (workspace / "answer.txt").read_text() == "right\n"
    assert "+right" in str(episode.evidence["git_patch"])
    assert episode.evidence["changed_files"] == {"answer.txt": "added"}
    tried = str([node.message.tool_calls for node in episode.nodes if node.sampled and node.simulated])
    assert "wrong1" in tried or "wrong2" in tried
    # Simulated steps that the live conversation then took are its own now: nothing was rewritten.
    assert [node for node in episode.nodes if node.metadata.get("history_rewritten")] == []
    assert counted == episode.usage.prompt_tokens > 0


async def test_a_command_in_the_forks_says_what_is_right(server: ScriptedModel, workspace: Path) -> None:
    tests = "test ! -e answer.txt || grep -qx right answer.txt && touch ran"
    value = {"value": "reward", "value_options": {"reward": "command", "reward_options": {"command": tests}}}
    episode, _ = await play(
        server, "tested-in-forks", workspace, writer, rollout_strategy="BestOfN", strategy={"n": 6, **value}
    )
    assert episode.failure is None and (workspace / "answer.txt").read_text() == "right\n"
    assert episode.evidence["changed_files"] == {"answer.txt": "added"}, "what it writes is no part of the work"
    assert {0.0, 1.0} <= {node.value for node in episode.nodes if node.sampled and node.value is not None}


async def test_best_of_n_acts_on_the_best_of_its_candidates(server: ScriptedModel, workspace: Path) -> None:
    seeds = itertools.count()

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        if depth(body):
            return finish("done", f"end{body['seed']}")
        word = "right" if next(seeds) % 4 == 2 else "wrong"
        return says(None, call(TERMINAL, {"command": f"echo {word} > answer.txt"}, f"write{body['seed']}"))

    episode, _ = await play(
        server, "best", workspace, policy, rollout_strategy="BestOfN", strategy={"n": 4, **BY_PATCH}
    )
    assert episode.failure is None and episode.stop is StopReason.TERMINATED
    assert (workspace / "answer.txt").read_text() == "right\n"
    first = [node for node in episode.nodes if node.sampled and node.parent == 1]
    # Equal ones are one node.
    assert sorted("right" in str(node.message.tool_calls) for node in first) == [False, True]


async def test_a_branchs_prompt_is_the_one_that_comes_later(server: ScriptedModel, workspace: Path) -> None:
    """The same conversations are sent from branches and from the live one, to the letter and the token."""
    options = {"num_simulations": 6, "first_branches": 2, "num_branches": 2, "depth": 5, **BY_PATCH}
    episode, _ = await play(
        server, "prompts", workspace, writer, rollout_strategy="MCTS", strategy=options, max_turns=6
    )
    acted = [episode.nodes[at] for at in episode.path() if episode.nodes[at].sampled]
    assert [node.tokens.extends for node in acted if node.tokens] == [False, True, True, True, True]
    asked = server.requests["prompts"]
    live = {json.dumps(body["messages"]) for body in asked if depth(body) == 0}
    assert len(live) == 1
    # A conversation with the same answers, hence with the same ids, is the same in every branch and in the live one.
    by_calls: dict[str, set[str]] = {}
    for body in asked:
        ids = [each["id"] for message in body["messages"] for each in message.get("tool_calls") or ()]
        by_calls.setdefault(json.dumps(ids), set()).add(json.dumps(body["messages"]))
    assert len(by_calls) > 5 and max(len(prompts) for prompts in by_calls.values()) == 1
    assert {json.dumps(body["tools"]) for body in asked} == {json.dumps(list(episode.tools))}
    later = [body for body in asked if depth(body) == 2]
    assert '"view_range\\":\\"[1, 1]\\"' in json.dumps(later[0]["messages"]).replace("\\\\", "\\")


def world_of(conversation: LocalConversation) -> BranchWorld:
    """The world at the conversation's end, with a session that answers what it is asked to execute."""
    workspace = runtime_of(str(conversation.state.id))
    assert isinstance(workspace, ConversationWorkspace)

    class Documents(dict[Message, Any]):
        def __missing__(self, message: Message) -> Any:
            choice = {"index": 0, "finish_reason": "stop", "message": to_wire(message)}
            return {"id": "given", "model": "given", "choices": [choice]}

    class Given:
        calls, documents = None, Documents()

        def __init__(self, turn: Turn) -> None:
            self.turn = turn

        def expect(self, turn: Any) -> None:
            """Nobody asks."""

    agent: Any = conversation.agent
    told = [event for event in conversation.state.events if isinstance(event, LLMConvertibleEvent)]
    prompts = Prompts(compact=False)
    wire = prompts.write(agent.llm, LLMConvertibleEvent.events_to_messages(told))
    live = ConversationBranch(agent, log_of(conversation.state), workspace, prompts)
    turn = Turn({"messages": wire}, wire, tuple(to_message(each) for each in wire))
    return BranchWorld(live, Given(turn))  # type: ignore[arg-type]


def action(command: str, id: str) -> Message:
    return Message(
        role="assistant", tool_calls=(ToolCall(id=id, name=TERMINAL, arguments=json.dumps({"command": command})),)
    )


def said(observation: Observation) -> str:
    return "\n".join(message.content or "" for message in observation.messages)


async def test_64_branches_do_not_see_each_other(server: ScriptedModel, workspace: Path) -> None:
    """Each writes to files, to /tmp, to variables and to its history; in between it is forked again."""
    conversation = opened(server, "cross", workspace)
    server.script("cross", [think("begin", "begin"), finish()])
    conversation.send_message("Begin.")
    conversation.run()
    world = world_of(conversation)
    limit = asyncio.Semaphore(4)

    async def branch(number: int) -> str:
        async with limit:
            first = await world.fork()
            await first.step(
                action(f"echo {number} > mine.txt; echo {number} > /tmp/mine; export MINE={number}", f"w{number}")
            )
            second = await first.fork()
            await first.step(action("echo other > mine.txt; echo other > /tmp/mine; export MINE=other", f"o{number}"))
            await first.close()
            told = said(await second.step(action("cat mine.txt /tmp/mine; echo $MINE; ls", f"r{number}")))
            await second.close()
            return told

    async def all_branches() -> list[str]:
        try:
            return await asyncio.gather(*(branch(number) for number in range(32)))
        finally:
            await world.close()

    told = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(all_branches(), background().loop))
    wrong = [
        number
        for number, text in enumerate(told)
        if text.split("\n")[:5] != [str(number)] * 3 + ["calc.py", "mine.txt"]
    ]
    left = sorted(path.name for path in workspace.iterdir())
    conversation.close()
    assert wrong == [] and left == ["calc.py"]


async def test_what_cannot_be_copied_is_said(server: ScriptedModel, workspace: Path) -> None:
    conversation = opened(server, "processes", workspace)
    server.script("processes", [says(None, call(TERMINAL, {"command": "sleep 60 &"}, "c1")), finish()])
    conversation.send_message("Begin.")
    conversation.run()
    world = world_of(conversation)
    with pytest.raises(BadEnvironmentError, match=r"while processes run in it \(sleep\)"):
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(world.fork(), background().loop))
    conversation.close()

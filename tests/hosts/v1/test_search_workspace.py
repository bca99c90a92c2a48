"""Search in real conversations of the SDK, in copies of a real workspace: what is executed, sent, recorded and left."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs_bubblewrap
from openhands.sdk.conversation import LocalConversation
from scripted_model import ScriptedModel, call, reply
from sdk_play import EDITOR, TERMINAL, converse, finish, make_agent, make_llm, stored

from openhands_rl_plugin.core.types import Score, StopReason, Trajectory

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
        return reply("I look.", call(TERMINAL, look, f"look{seed % 2}"))
    if turn == 1:
        return reply(None, call(EDITOR, '{"command":"view","path":"/workspace/calc.py","view_range":"[1, 1]"}', "view"))
    if turn == 2:
        return reply("Hm.", call("no_such_tool", {"a": 1}, f"none{seed % 2}"))
    if turn == 3:
        word = "right" if seed % 3 == 0 else f"wrong{seed % 3}"
        write = {"command": "create", "path": "/workspace/answer.txt", "file_text": f"{word}\n"}
        return reply(None, call(EDITOR, write, f"write{seed}"))
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
async def test_mcts_finds_what_is_right_and_executes_it(server: ScriptedModel, workspace: Path) -> None:
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


async def test_a_command_in_the_forks_shows_what_is_right(server: ScriptedModel, workspace: Path) -> None:
    tests = "test ! -e answer.txt || grep -qx right answer.txt && touch ran"
    value = {"value": "reward", "value_options": {"reward": "command", "reward_options": {"command": tests}}}
    episode, _ = await play(
        server, "tested-in-forks", workspace, writer, rollout_strategy="BestOfN", strategy={"n": 6, **value}
    )
    assert episode.failure is None and (workspace / "answer.txt").read_text() == "right\n"
    assert episode.evidence["changed_files"] == {"answer.txt": "added"}, "what it writes is no part of the work"
    assert {0.0, 1.0} <= {node.value for node in episode.nodes if node.sampled and node.value is not None}


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

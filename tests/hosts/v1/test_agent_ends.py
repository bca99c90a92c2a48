"""How conversations end that the SDK ends, and which episode a completion belongs to."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from openhands.sdk.conversation import ConversationExecutionStatus, LocalConversation
from scripted_model import ScriptedModel, refusal, says
from sdk_play import converse, finish, make_agent, make_llm, stored, think

from openhands_rl_plugin.core.types import FailureKind, StopReason
from openhands_rl_plugin.hosts.v1 import agent as recorder

pytestmark = pytest.mark.contract

Play = Callable[..., LocalConversation]


@pytest.fixture
def play(server: ScriptedModel, workspace: Path, request: pytest.FixtureRequest) -> Play:
    """Begin a conversation over a script, in a store of this test."""

    def begin(answers: list[dict], **changes) -> LocalConversation:
        name = request.node.name
        server.script(name, answers)
        conversation = converse(
            make_agent(make_llm(server, name), workspace.parent / "store", tools=()), workspace, **changes
        )
        conversation.send_message("Think.")
        return conversation

    return begin


async def test_the_sdks_limit_of_iterations_is_a_limit(play: Play, tmp_path: Path) -> None:
    conversation = play([think(str(at), f"call-{at}") for at in range(5)], max_iteration_per_run=2)
    conversation.run()
    assert conversation.state.execution_status == ConversationExecutionStatus.ERROR
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.MAX_TURNS and episode.failure is None and len(episode.acted()) == 2


async def test_a_stuck_agent_is_truncated(play: Play, tmp_path: Path) -> None:
    conversation = play([think("the same", f"call-{at}") for at in range(9)], stuck_detection=True)
    conversation.run()
    assert conversation.state.execution_status == ConversationExecutionStatus.STUCK
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TRUNCATED and episode.failure is None


async def test_a_conversation_that_is_closed_in_the_middle_is_a_failure(play: Play, tmp_path: Path) -> None:
    stop: list[LocalConversation] = []
    conversation = play(
        [think("a", "call-1"), think("b", "call-2")], callbacks=[lambda event: stop and stop[0].pause()]
    )
    stop.append(conversation)
    conversation.run()
    assert conversation.state.execution_status == ConversationExecutionStatus.PAUSED
    assert [episode.stop for episode in await stored(tmp_path / "store")] == [StopReason.UNFINISHED]
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.failure is not None and episode.failure.kind is FailureKind.INFRASTRUCTURE
    assert "before the agent had finished (paused)" in episode.failure.message


async def test_an_error_of_the_model_server_is_raised_and_noted(play: Play, tmp_path: Path) -> None:
    conversation = play([think("a"), refusal(418, "I am a teapot")])
    with pytest.raises(Exception, match="teapot"):
        conversation.run()
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.failure is not None and episode.failure.kind is FailureKind.MODEL
    assert "teapot" in episode.failure.message and len(episode.acted()) == 1


async def test_a_full_context_ends_an_episode_like_a_limit(play: Play, tmp_path: Path) -> None:
    # Twice: a request that failed is sent again without the fields that a server might not know.
    full = [refusal(400, "This model's maximum context length is 8 tokens.")] * 2
    conversation = play([think("a"), *full])
    with pytest.raises(Exception, match="context"):
        conversation.run()
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.MAX_TOKENS and episode.failure is None


def test_a_first_prompt_that_the_context_has_no_room_for_is_said_with_the_remedy(play: Play) -> None:
    conversation = play([refusal(400, "This model's maximum context length is 8 tokens.")] * 2)
    with pytest.raises(Exception, match=r'context of 16,384 or more .* or set \[rl.workspace\] prompt = "compact"'):
        conversation.run()
    conversation.close()


async def test_an_error_that_the_conversation_went_on_after_is_none_of_the_episode(play: Play, tmp_path: Path) -> None:
    conversation = play([think("a"), refusal(418, "I am a teapot"), finish()])
    with pytest.raises(Exception, match="teapot"):
        conversation.run()
    conversation.run()
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED and episode.failure is None


async def test_a_reply_ends_the_episode_and_the_next_message_begins_another(play: Play, tmp_path: Path) -> None:
    conversation = play([says("Which file?"), finish()])
    conversation.run()
    conversation.send_message("calc.py")
    conversation.run()
    conversation.close()
    first, second = await stored(tmp_path / "store")
    assert [each.stop for each in (first, second)] == [StopReason.NO_ACTION, StopReason.TERMINATED]
    assert first.group_id == second.group_id == str(conversation.state.id)
    assert [node.message.role for node in second.nodes] == ["system", "user", "assistant", "user", "assistant"]
    assert [len(each.acted()) for each in (first, second)] == [1, 1], "no completion is in both"


async def test_what_follows_an_end_is_another_episode_of_the_same_group(play: Play, tmp_path: Path) -> None:
    conversation = play([finish(id="call-1"), finish(id="call-2")])
    conversation.run()
    conversation.send_message("And now the other file.")
    conversation.run()
    conversation.close()
    first, second = await stored(tmp_path / "store")
    assert first.group_id == second.group_id == str(conversation.state.id)
    assert second.task.instruction == "And now the other file."
    assert [len(each.acted()) for each in (first, second)] == [1, 1]
    assert first.stop is second.stop is StopReason.TERMINATED


@pytest.mark.parametrize(
    ("answers", "stop"),
    [
        ([finish()], StopReason.TERMINATED),
        ([says("Which file?")], StopReason.NO_ACTION),
        ([think(str(at), f"call-{at}") for at in range(3)], StopReason.MAX_TURNS),
    ],
)
async def test_where_nobody_closes_a_conversation_its_end_is_seen(
    play: Play, tmp_path: Path, answers: list[dict], stop: StopReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an agent server, which keeps conversations open."""
    monkeypatch.setattr(recorder, "WATCH_SECONDS", 0.05)
    conversation = play(answers, max_iteration_per_run=2)
    conversation.run()
    until = time.monotonic() + 30
    while (found := await stored(tmp_path / "store"))[0].stop is StopReason.UNFINISHED and time.monotonic() < until:
        time.sleep(0.1)
    assert found[0].stop is stop
    conversation.close()
    assert len(await stored(tmp_path / "store")) == 1


async def test_closing_one_of_two_conversations_of_an_agent_leaves_the_other_open(
    server: ScriptedModel, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "WATCH_SECONDS", 3.0)
    server.script("two", [says("One?"), says("Two?")])
    agent = make_agent(make_llm(server, "two"), tmp_path / "store", tools=())
    pair = [converse(agent, workspace) for _ in range(2)]
    for conversation in pair:
        conversation.send_message("Go.")
        conversation.run()
    pair[0].close()
    assert {each.stop for each in await stored(tmp_path / "store")} == {StopReason.NO_ACTION, StopReason.UNFINISHED}
    pair[1].close()


PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = ["tests/helpers/sdk", "tests/helpers/servers"]
from scripted_model import serve
from sdk_play import converse, finish, make_agent, make_llm
with serve() as server:
    server.cached = None
    server.script("exit", [finish()])
    folder = Path(sys.argv[1])
    conversation = converse(make_agent(make_llm(server, "exit"), folder / "store", tools=()), folder)
    conversation.send_message("Go.")
    conversation.run()
"""


async def test_a_process_that_ends_without_closing_stores_why_it_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED and "Traceback" not in done.stderr

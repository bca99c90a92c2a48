"""Real conversations of the SDK with RLAgent: what is stored, how they end, and what follows where the plugin fails."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from openhands.sdk.conversation import ConversationExecutionStatus, LocalConversation
from scripted_model import ScriptedModel, call, refusal, reply
from sdk_play import EDITOR, converse, finish, make_agent, make_llm, repair, run_task, stored, think

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import EpisodeGrowth
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import FailureKind, StopReason, Trajectory
from openhands_rl_plugin.hosts.v1 import RLAgent
from openhands_rl_plugin.hosts.v1 import agent as recorder
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract


async def recorded(server: ScriptedModel, name: str, workspace: Path, answers: list[dict], **changes) -> Trajectory:
    """One task, closed; the only episode of the store."""
    server.script(name, answers)
    store = workspace.parent / "store"
    run_task(make_agent(make_llm(server, name), store, **changes), workspace, task="Correct calc.py.")
    [episode] = await stored(store)
    return episode


@pytest.mark.shows("every completion with token ids and logprobs")
@pytest.mark.shows("each prompt extends the one before")
async def test_an_episode_is_stored_with_everything_that_was_sampled(server: ScriptedModel, workspace: Path) -> None:
    episode = await recorded(server, "repair", workspace, repair(workspace))
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
    # Every prompt extends the one before, although the SDK repairs calls.
    assert [node.tokens.extends for node in sampled if node.tokens] == [False, True, True, True]
    asked = server.requests["repair"][1]["messages"]
    [replayed] = [message for message in asked if message["role"] == "assistant"]
    assert replayed["tool_calls"][0]["function"]["arguments"] == sampled[0].message.tool_calls[0].arguments
    assert not [node for node in episode.nodes if "replayed_as" in node.metadata]


async def test_ids_that_a_server_uses_again_are_distinguished(server: ScriptedModel, workspace: Path) -> None:
    answers = [
        reply(None, call("think", '{"thought":"one" }', "same")),
        reply(None, call("think", '{ "thought": "two"}', "same")),
        finish(id="same"),
    ]
    episode = await recorded(server, "same-ids", workspace, answers)
    assert [node.tokens.extends for node in episode.nodes if node.tokens] == [False, True, True]


@pytest.mark.shows("BestOfN")
async def test_best_of_n_samples_side_by_side_and_is_logged_and_counted_as_one_completion(
    server: ScriptedModel, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without forks a candidate is judged as it was sampled, by the model."""
    numbers = iter(range(1000))
    monkeypatch.setattr(server, "delay", 0.3)
    server.most_at_once = 0

    def policy(body: dict) -> dict:
        if not body.get("tools"):
            return reply("0.9" if "thought 1" in str(body["messages"]) else "0.1")
        done = any(message["role"] == "tool" for message in body["messages"])
        return finish() if done else think(f"thought {next(numbers)}", f"call-{next(numbers)}")

    server.policies["best"] = policy
    store = workspace.parent / "store"
    rl = {"rollout_strategy": "BestOfN", "strategy": {"n": 3, "value": "model"}}
    logging = {"log_completions": True, "log_completions_folder": str(workspace.parent / "log")}
    conversation = converse(make_agent(make_llm(server, "best", **logging), store, rl=rl), workspace)
    conversation.send_message("Think.")
    telemetry = conversation.agent.llm.telemetry
    assert telemetry is not None
    logged: list[str] = []
    telemetry.set_log_completions_callback(lambda _, data: logged.append(json.loads(data)["response"]["id"]))
    conversation.run()
    counted = conversation.conversation_stats.get_combined_metrics().accumulated_token_usage
    conversation.close()
    [episode] = await stored(store)
    assert episode.stop is StopReason.TERMINATED and server.most_at_once == 3
    first = [node for node in episode.nodes if node.sampled and node.parent == 1]
    assert len(first) == 3 and len(logged) == len(episode.acted()) == 2
    assert counted is not None and counted.prompt_tokens == episode.usage.prompt_tokens


async def test_the_turn_limit_of_the_settings_ends_the_episode(server: ScriptedModel, workspace: Path) -> None:
    answers = [think(str(number), f"call-{number}") for number in range(5)]
    episode = await recorded(server, "limit", workspace, answers, rl={"max_turns": 2})
    assert (episode.stop, episode.failure, len(episode.acted())) == (StopReason.MAX_TURNS, None, 2)


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


@pytest.mark.parametrize(
    ("thoughts", "options", "status", "stop"),
    [
        ("01234", {"max_iteration_per_run": 2}, ConversationExecutionStatus.ERROR, StopReason.MAX_TURNS),
        ("000000000", {"stuck_detection": True}, ConversationExecutionStatus.STUCK, StopReason.TRUNCATED),
    ],
)
async def test_an_end_that_the_sdk_chooses_is_no_failure(
    play: Play, tmp_path: Path, thoughts: str, options: dict, status: ConversationExecutionStatus, stop: StopReason
) -> None:
    conversation = play([think(each, f"call-{at}") for at, each in enumerate(thoughts)], **options)
    conversation.run()
    assert conversation.state.execution_status == status
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is stop and episode.failure is None


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


@pytest.mark.parametrize(
    ("before", "message"),
    [([], r'context of 16,384 or more .* or set \[rl.workspace\] prompt = "compact"'), ([think("a")], "context")],
    ids=["first prompt", "later"],
)
async def test_a_full_context_ends_an_episode_like_a_limit(
    play: Play, tmp_path: Path, before: list[dict], message: str
) -> None:
    # Twice: a request that failed is sent again without the fields that a server might not know.
    conversation = play([*before, *[refusal(400, "This model's maximum context length is 8 tokens.")] * 2])
    with pytest.raises(Exception, match=message):
        conversation.run()
    conversation.close()
    [episode] = await stored(tmp_path / "store")
    assert not before or (episode.stop, episode.failure) == (StopReason.MAX_TOKENS, None)


async def test_a_reply_ends_the_episode_and_the_next_message_begins_another(play: Play, tmp_path: Path) -> None:
    conversation = play([reply("Which file?"), finish()])
    conversation.run()
    conversation.send_message("calc.py")
    conversation.run()
    conversation.close()
    first, second = await stored(tmp_path / "store")
    assert [each.stop for each in (first, second)] == [StopReason.NO_ACTION, StopReason.TERMINATED]
    assert first.group_id == second.group_id == str(conversation.state.id)
    assert [node.message.role for node in second.nodes] == ["system", "user", "assistant", "user", "assistant"]
    assert [len(each.acted()) for each in (first, second)] == [1, 1], "no completion is in both"


async def test_closing_one_of_two_conversations_of_an_agent_leaves_the_other_open(
    server: ScriptedModel, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "WATCH_SECONDS", 3.0)
    server.script("two", [reply("One?"), reply("Two?")])
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
import openhands.sdk.logger
print(*(name for name in sys.modules if name.startswith("openhands_rl_plugin")))
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


@pytest.mark.slow
async def test_a_process_that_ends_without_closing_stores_why_it_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    [episode] = await stored(tmp_path / "store")
    assert episode.stop is StopReason.TERMINATED and "Traceback" not in done.stderr
    waiting = ("", ".hosts", ".hosts.v0", ".hosts.v0.autoload")  # the SDK alone loads no more than the line for V0
    assert {*done.stdout.splitlines()[0].split()} <= {f"openhands_rl_plugin{each}" for each in waiting}


@pytest.fixture(autouse=True)
def warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A runner of the same process makes OpenHands' logger quiet."""
    caplog.set_level(logging.WARNING, logger="openhands")


class BrokenStrategy:
    """Fails at its second turn."""

    async def decide(self, tree: EpisodeTree, engine, world) -> int:
        if tree.turns:
            raise ZeroDivisionError("a mistake in a strategy")
        [completion] = await engine.complete(tree.messages(), tools=tree.tools)
        return tree.propose(completion)


class FullStorage(FileTrajectoryStorage):
    """The disk is full at the second turn."""

    async def grow(self, growth: EpisodeGrowth) -> None:
        if growth.first > 3:
            raise StorageError("no space left on device")
        await super().grow(growth)


def repaired(agent: RLAgent, workspace: Path) -> None:
    conversation = converse(agent, workspace)
    conversation.send_message("Correct calc.py.")
    conversation.run()
    assert conversation.state.execution_status == ConversationExecutionStatus.FINISHED
    conversation.close()
    assert "a + b" in (workspace / "calc.py").read_text()


def warned(records: Sequence[logging.LogRecord]) -> list[str]:
    return [each.getMessage() for each in records if each.levelno == logging.WARNING and each.name == "openhands"]


async def test_a_strategy_that_fails(
    server: ScriptedModel, workspace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("broken", repair(workspace))
    rl = {"rollout_strategy": f"{__name__}:BrokenStrategy"}
    repaired(make_agent(make_llm(server, "broken"), tmp_path / "store", rl=rl), workspace)
    [line] = warned(caplog.records)
    assert "a mistake in a strategy" in line and "goes on without it" in line
    [episode] = await stored(tmp_path / "store")
    assert episode.failure is not None and "a mistake in a strategy" in episode.failure.message
    assert len(episode.acted()) == 1
    assert len(server.requests["broken"]) == 4


async def test_a_storage_that_fails(
    server: ScriptedModel, workspace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = repair(workspace)
    server.policies["full"] = lambda body: answers[sum(each["role"] == "assistant" for each in body["messages"])]
    agent = make_agent(make_llm(server, "full"), tmp_path / "store")
    rl = {**agent.rl, "storage_backend": f"{__name__}:FullStorage"}
    rl["storage"] = {"options": {"path": str(tmp_path / "store")}}
    repaired(RLAgent(llm=agent.llm, tools=agent.tools, rl=rl), workspace)
    [line] = warned(caplog.records)
    assert "no space left on device" in line and "goes on without it" in line
    assert len(server.requests["full"]) in (4, 5), "an answer that was there already may have been asked for again"

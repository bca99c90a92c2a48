"""Rewards as critics of real conversations: scores on events, episodes and in the store; what fails costs nobody."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from needs import needs_bubblewrap
from openhands.sdk.conversation import ConversationExecutionStatus as Status
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.critic import CriticBase
from openhands.sdk.critic.base import IterativeRefinementConfig
from openhands.sdk.event import ActionEvent, MessageEvent
from scripted_model import ScriptedModel, call, reply
from sdk_play import EDITOR, converse, finish, make_agent, make_llm, run_task, think

from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Score, StopReason, Trajectory
from openhands_rl_plugin.hosts.v1.critic import CRITIC, RewardCritic
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

THIRDS = "critic_rewards:ShareOfThree"


def driven(
    server: ScriptedModel, workspace: Path, name: str, answers: list[dict], critic: CriticBase, **changes: Any
) -> LocalConversation:
    server.script(name, answers)
    settings = {"tools": (), **changes}
    agent = make_agent(make_llm(server, name), workspace.parent / "store", critic=critic, **settings)
    conversation = run_task(agent, workspace, task="Think.")
    return conversation


def scores_on(conversation: LocalConversation) -> list[float | None]:
    """Of the agent's actions and messages, in order."""
    answers = (each for each in conversation.state.events if isinstance(each, ActionEvent | MessageEvent))
    results = [each.critic_result for each in answers if each.source == "agent"]
    return [result.score if result is not None else None for result in results]


async def judged(workspace: Path) -> tuple[Trajectory, tuple[Score, ...]]:
    async with FileTrajectoryStorage(workspace.parent / "store") as storage:
        [found] = [each async for each in storage.find(TrajectoryFilter(finished=None))]
    return found


def on_nodes(episode: Trajectory) -> list[Any]:
    return [node.metadata[CRITIC]["score"] if CRITIC in node.metadata else None for node in episode.sampled()]


@pytest.mark.shows("rewards as critics")
async def test_every_action_is_scored_on_its_event_its_node_and_in_the_store(
    server: ScriptedModel, workspace: Path
) -> None:
    critic = RewardCritic(reward=THIRDS, options={"name": "think"}, mode="all_actions")
    answers = [think("a", "call-1"), think("b", "call-2"), finish()]
    conversation = driven(server, workspace, "all-actions", answers, critic)
    assert scores_on(conversation) == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    episode, scores = await judged(workspace)
    assert episode.stop is StopReason.TERMINATED
    assert on_nodes(episode) == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    [score] = scores
    assert score.reward == pytest.approx(2 / 3) and score.reward_version == "verifier-critic@thirds-1@think"
    assert newest_outcome(scores) is None, "an opinion is no outcome"


async def test_refinement_goes_on_until_the_score_is_high_enough(server: ScriptedModel, workspace: Path) -> None:
    critic = RewardCritic(
        reward=THIRDS, iterative_refinement=IterativeRefinementConfig(success_threshold=0.9, max_iterations=5)
    )
    answers = [finish("one", "call-1"), finish("two", "call-2"), finish("three", "call-3"), finish("four", "call-4")]
    conversation = driven(server, workspace, "refine", answers, critic)
    assert scores_on(conversation) == pytest.approx([1 / 3, 2 / 3, 1.0])
    asked = [event for event in conversation.state.events if isinstance(event, MessageEvent) and event.source == "user"]
    assert len(asked) == 3 and conversation.state.execution_status == Status.FINISHED
    episode, [score] = await judged(workspace)
    assert score.reward == 1.0 and len(episode.acted()) == 3
    assert [node.tokens.extends for node in episode.sampled() if node.tokens] == [False, True, True]


async def test_a_slow_judgement_is_given_up_and_a_pause_waits_no_longer(server: ScriptedModel, workspace: Path) -> None:
    server.script("slow", [think(str(at), f"call-{at}") for at in range(50)])
    critic = RewardCritic(reward="critic_rewards:Slow", mode="all_actions", timeout=1.0)
    agent = make_agent(make_llm(server, "slow"), workspace.parent / "store", tools=(), critic=critic)
    conversation = converse(agent, workspace)
    conversation.send_message("Think.")
    running = threading.Thread(target=conversation.run, daemon=True)
    running.start()
    while not server.requests["slow"]:
        time.sleep(0.01)
    time.sleep(0.3)
    begun = time.monotonic()
    conversation.pause()
    running.join(30.0)
    assert time.monotonic() - begun < 5.0
    assert not running.is_alive() and conversation.state.execution_status == Status.PAUSED
    assert set(scores_on(conversation)) == {None}
    conversation.close()
    _, scores = await judged(workspace)
    assert scores == ()


FAILURES = [
    ({"reward": "critic_rewards:Broken", "options": {"error": "no such file\nand more"}}, "ValueError: no such file"),
    ({"reward": "critic_rewards:Broken"}, "there is nothing to judge yet"),
    ({"reward": "critic_rewards:Broken", "options": {"reward": 3.0}}, "3 is no score from 0 to 1"),
    ({"reward": "critic_rewards:Broken", "options": {"wrong": 1}}, "reward 'critic_rewards:Broken': wrong"),
    ({"reward": "command", "options": {"command": "true"}}, "needs the workspace of an RLAgent in a sandbox"),
    pytest.param(
        {"reward": "command", "options": {"command": "sleep 30"}, "timeout": 2.0},
        "than 2 s; raise the critic's timeout",
        marks=needs_bubblewrap,
    ),
]


@pytest.mark.parametrize(("critic", "cause"), FAILURES)
async def test_an_error_is_one_line_and_no_score(
    server: ScriptedModel, workspace: Path, caplog: pytest.LogCaptureFixture, critic: dict[str, Any], cause: str
) -> None:
    sdk = logging.getLogger("openhands.sdk.agent.critic_mixin")
    sdk.addHandler(caplog.handler)
    rl = {"workspace": {"isolation": "bubblewrap" if "timeout" in critic else "none"}}
    try:
        begun = time.monotonic()
        conversation = driven(server, workspace, "broken", [finish()], RewardCritic(**critic), rl=rl, tools=(EDITOR,))
    finally:
        sdk.removeHandler(caplog.handler)
    assert time.monotonic() - begun < 25 and scores_on(conversation) == [None]
    [line] = {each.getMessage() for each in caplog.records if "Critic evaluation" in each.getMessage()}
    assert cause in line and "\n" not in line
    assert not [each for each in caplog.records if each.exc_info]
    episode, scores = await judged(workspace)
    assert scores == () and episode.stop is StopReason.TERMINATED and on_nodes(episode) == [None]


def edit(change: tuple[str, str], id: str) -> dict:
    arguments = {"command": "str_replace", "path": "/workspace/calc.py", "old_str": change[0], "new_str": change[1]}
    return reply(None, call(EDITOR, arguments, id))


ADDS = "echo more > left; python3 -c 'from calc import add; assert add(2, 1) == 3'"


@needs_bubblewrap
@pytest.mark.shows("rewards by a command")
async def test_a_command_judges_a_copy_of_the_workspace_after_every_action(
    server: ScriptedModel, workspace: Path
) -> None:
    critic = RewardCritic(reward="command", options={"command": ADDS}, mode="all_actions", timeout=60.0)
    answers = [think("a", "call-1"), edit(("a - b", "a + b"), "call-2"), think("b", "call-3"), finish()]
    rl = {"workspace": {"isolation": "bubblewrap"}}
    conversation = driven(server, workspace, "judged", answers, critic, rl=rl, tools=(EDITOR,))
    # An action is judged before it is executed, so the change counts from the next one on.
    assert scores_on(conversation) == [0.0, 0.0, 1.0, 1.0]
    episode, [score] = await judged(workspace)
    assert on_nodes(episode) == [0.0, 0.0, 1.0, 1.0]
    assert score.reward == 1.0 and score.reward_version.startswith("verifier-critic@command-")
    assert sorted(file.name for file in workspace.iterdir()) == ["calc.py"], "what the command wrote is gone"
    assert list(episode.evidence["changed_files"]) == ["calc.py"]


@pytest.mark.parametrize("last", ["The answer is 42.", "41"])
async def test_the_last_words_are_compared_with_the_label(server: ScriptedModel, workspace: Path, last: str) -> None:
    critic = RewardCritic(reward="matching", options={"mode": "number"}, evidence={"label": 42})
    name = f"matching-{len(last)}"
    conversation = driven(server, workspace, name, [think("a"), finish(last)], critic)
    assert scores_on(conversation) == [None, float("42" in last)]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_trained_verifier_is_a_critic(server: ScriptedModel, workspace: Path, verifier: Path) -> None:
    critic = RewardCritic(options={"adapter": str(verifier)}, mode="all_actions", timeout=120.0)
    conversation = driven(server, workspace, "verifier", [think("tests pass", "call-1"), finish()], critic)
    scores = scores_on(conversation)
    assert len(scores) == 2 and all(score is not None and 0.0 <= score <= 1.0 for score in scores)
    episode, [score] = await judged(workspace)
    assert on_nodes(episode) == scores and score.reward == scores[-1]
    assert score.reward_version.startswith("verifier-critic@verifier-1@")

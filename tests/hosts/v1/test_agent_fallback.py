"""The plugin's own failure never costs the user's conversation: it goes on as with the stock agent, with one line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from openhands.sdk.conversation import ConversationExecutionStatus
from scripted_model import ScriptedModel
from sdk_play import converse, make_agent, make_llm, repair, stored

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import EpisodeGrowth
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.hosts.v1 import RLAgent
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


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


def run(agent: RLAgent, workspace: Path) -> None:
    conversation = converse(agent, workspace)
    conversation.send_message("Correct calc.py.")
    conversation.run()
    assert conversation.state.execution_status == ConversationExecutionStatus.FINISHED
    conversation.close()
    assert "a + b" in (workspace / "calc.py").read_text()


def said(records: Sequence[logging.LogRecord]) -> list[str]:
    return [each.getMessage() for each in records if each.levelno == logging.WARNING and each.name == "openhands"]


async def test_a_strategy_that_fails(
    server: ScriptedModel, workspace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("broken", repair(workspace))
    rl = {"rollout_strategy": f"{__name__}:BrokenStrategy"}
    run(make_agent(make_llm(server, "broken"), tmp_path / "store", rl=rl), workspace)
    [line] = said(caplog.records)
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
    run(RLAgent(llm=agent.llm, tools=agent.tools, rl=rl), workspace)
    [line] = said(caplog.records)
    assert "no space left on device" in line and "goes on without it" in line
    assert len(server.requests["full"]) in (4, 5), "an answer that was there already may have been asked for again"


async def test_a_store_that_cannot_be_opened(
    server: ScriptedModel, workspace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("unopened", repair(workspace))
    (tmp_path / "store").write_text("a file")
    run(make_agent(make_llm(server, "unopened"), tmp_path / "store"), workspace)
    lines = said(caplog.records)
    assert len(lines) == 1 and str(tmp_path / "store") in lines[0]


async def test_a_strategy_that_needs_forks_where_there_are_none(
    server: ScriptedModel, workspace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("forks", repair(workspace))
    rl = {"rollout_strategy": "MCTS"}
    run(make_agent(make_llm(server, "forks"), tmp_path / "store", rl=rl), workspace)
    [line] = said(caplog.records)
    assert "fork" in line
    [episode] = await stored(tmp_path / "store")
    assert episode.failure is not None and episode.failure.kind is FailureKind.ENVIRONMENT

"""Conversations of the real SDK with ``RLAgent``, a scripted model server and a store in a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openhands.sdk import LLM, Conversation, Tool
from openhands.sdk.conversation import LocalConversation
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
from scripted_model import ScriptedModel, call, reply

from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.hosts.v1.agent import RLAgent
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

TERMINAL, EDITOR = TerminalTool.name, FileEditorTool.name


def make_llm(server: ScriptedModel, model: str, **changes: Any) -> LLM:
    """The SDK's LLM for a model of the scripted server, without retries."""
    settings = {"num_retries": 0, "reasoning_effort": None, "caching_prompt": False, "usage_id": model, **changes}
    return LLM(model=f"openai/{model}", base_url=server.url, api_key="key", **settings)  # type: ignore[arg-type]


def make_agent(llm: LLM, store: Path, *, tools: Sequence[str] = (TERMINAL, EDITOR), **changes: Any) -> RLAgent:
    """With the SDK's own tools. ``rl`` is merged with a file storage in ``store``."""
    own = {"max_turns": 50, "workspace": {"isolation": "none"}}
    rl = {**own, **changes.pop("rl", {}), "storage": {"path": str(store), "durable": False}}
    return RLAgent(llm=llm, tools=[Tool(name=name) for name in tools], rl=rl, **changes)


def converse(agent: Any, workspace: Path, **changes: Any) -> LocalConversation:
    """A conversation that shows nothing."""
    settings = {"visualizer": None, "stuck_detection": False, **changes}
    conversation = Conversation(agent=agent, workspace=str(workspace), **settings)
    assert isinstance(conversation, LocalConversation)
    return conversation


def run_task(agent: Any, workspace: Path, *, task: str, **changes: Any) -> LocalConversation:
    """A conversation with one task, after its end; closed."""
    conversation = converse(agent, workspace, **changes)
    conversation.send_message(task)
    conversation.run()
    conversation.close()
    return conversation


def think(thought: str, id: str = "call-1") -> dict[str, Any]:
    """A call of the SDK's ``think`` tool."""
    return reply(None, call("think", {"thought": thought}, id))


def finish(message: str = "done", id: str = "call-f") -> dict[str, Any]:
    """A call of the SDK's ``finish`` tool."""
    return reply(None, call("finish", {"message": message}, id))


def repair(workspace: Path) -> list[dict[str, Any]]:
    """Look, correct the file, see that it is right, finish; one call needs the SDK's repair of its arguments."""
    file = str(workspace / "calc.py")
    edit = {"command": "str_replace", "path": file, "old_str": "a - b", "new_str": "a + b"}
    return [
        reply(
            "I look.", call(EDITOR, f'{{"command":"view","path":{json.dumps(file)},"view_range":"[1, 2]"}}', "call-1")
        ),
        reply("I correct it.", call(EDITOR, edit, "call-2")),
        reply(None, call(TERMINAL, {"command": f"cd {workspace} && cat calc.py"}, "call-3")),
        finish(id="call-4"),
    ]


async def stored(store: Path) -> list[Trajectory]:
    """All episodes of a store, unfinished ones too, oldest first."""
    storage = FileTrajectoryStorage(store)
    try:
        found = storage.find(TrajectoryFilter(finished=None))
        return sorted([trajectory async for trajectory, _ in found], key=lambda each: each.times.started)
    finally:
        await storage.close()

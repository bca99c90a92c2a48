"""A branch of a conversation with its workspace, for search.

It is a conversation of its own, kept in memory, over copies of the events and of the workspace. The SDK itself executes
an answer there and writes the next prompt, so both are what the live conversation would have. In a branch there are no
condenser, critic, hooks or confirmations, and of the tools only those that work on the copy.
"""

from __future__ import annotations

import atexit
import os
import threading
import uuid
from dataclasses import dataclass, replace
from typing import Any

import openhands.sdk.agent.agent as stock
from openhands.sdk.agent import Agent
from openhands.sdk.conversation import ConversationCallbackType, ConversationTokenCallbackType, LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.tool.builtins import FinishTool, ThinkTool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
from pydantic import PrivateAttr

from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace
from openhands_rl_plugin.hosts.shared.sessions import register_runtime
from openhands_rl_plugin.hosts.v1.session_llm import Prompts, SessionLLM
from openhands_rl_plugin.hosts.v1.workspace import ConversationWorkspace
from openhands_rl_plugin.session.branches import Complete

_ON_THE_COPY = frozenset({TerminalTool.name, FileEditorTool.name})
_EXECUTED = _ON_THE_COPY | {FinishTool.name, ThinkTool.name}
# What a branch does without: it would act outside of it, or cost calls of a model.
_LEFT_OUT: dict[str, object] = {"condenser": None, "critic": None, "agent_context": None, "mcp_config": {}}


@dataclass
class ConversationBranch:
    """A ``Branch`` of a conversation of ``agent``; the live one where ``tools`` are the live one's.

    ``log``: as of ``log_of``. ``prompts``: the live conversation's.
    """

    agent: Agent
    log: tuple[list[Any], Any]
    tools: ConversationWorkspace
    prompts: Prompts
    stop: threading.Event
    conversation: LocalConversation | None = None

    @property
    def workspace(self) -> SandboxedWorkspace:
        """As ``Branch.workspace``."""
        assert isinstance(self.tools.sandboxed, SandboxedWorkspace), "a container cannot be forked"
        return self.tools.sandboxed

    def fork(self) -> ConversationBranch:
        """As ``Branch.fork``."""
        if self.conversation is not None:
            self.log = log_of(self.conversation.state)
        return replace(self, tools=self.tools.fork(self.stop), conversation=None)

    def run(self, complete: Complete) -> None:
        """As ``Branch.run``. Raises ``BadEnvironmentError`` for a tool that a fork cannot execute."""
        live, session = self.agent, uuid.uuid4()
        register_runtime(str(session), self.tools)
        kept: dict[str, Any] = {name: getattr(live, name) for name in Agent.model_fields if name != "kind"}
        left_out = {name: value for name, value in _LEFT_OUT.items() if name in kept}
        tools = [tool for tool in live.tools if tool.name in _ON_THE_COPY]
        agent = BranchAgent(**{**kept, **left_out, "tools": tools})
        # In metrics of its own: the session counts the tokens.
        own = live.llm.model_copy()
        own.reset_metrics()
        agent._llm = SessionLLM.over(own, complete, self.prompts.forked(frozenset(live.tools_map) - _EXECUTED))
        conversation = LocalConversation(
            agent=agent,
            conversation_id=session,
            workspace=str(self.workspace.private),
            persistence_dir=None,
            visualizer=None,
            stuck_detection=False,
        )
        # Newer releases of the SDK would keep it until the program's end.
        atexit.unregister(conversation.close)
        state: Any = conversation.state
        events, leaf = self.log
        for event in events:
            state.events.append(event.model_copy())
        if hasattr(state, "active_branch"):
            state.leaf_event_id = leaf
            state.rebuild_view()
        state.execution_status = Status.IDLE
        self.conversation = conversation
        conversation.run()
        if agent._error is not None:
            raise agent._error


def log_of(state: Any) -> tuple[list[Any], Any]:
    """The events of a conversation's state, and from 1.31 on, where they are a tree, the one at which it stands."""
    events = state.active_branch() if hasattr(state, "active_branch") else state.events
    return [*events], getattr(state, "leaf_event_id", None)


class BranchAgent(Agent):
    """The agent of a branch: the stock one with an LLM that is never stored."""

    _llm: Any = PrivateAttr(default=None)
    _error: RLError | None = PrivateAttr(default=None)

    @property
    def prompt_dir(self) -> str:
        """The stock agent's."""
        return os.path.join(os.path.dirname(stock.__file__), "prompts")

    def step(
        self,
        conversation: LocalConversation,
        on_event: ConversationCallbackType,
        on_token: ConversationTokenCallbackType | None = None,
    ) -> None:
        """As the stock agent's. An error ends the branch; the SDK would raise another one for it."""
        try:
            Agent.step(self.model_copy(update={"llm": self._llm}), conversation, on_event, on_token)
        except RLError as error:
            self._error = error
            conversation.state.execution_status = Status.FINISHED

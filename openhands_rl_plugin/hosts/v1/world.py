"""Forks of a conversation with its workspace, for search.

A branch is a conversation of its own, kept in memory, over copies of the events and of the workspace. The SDK itself
executes an answer there and writes the next prompt, so both are what the live conversation would have. In a branch
there are no condenser, critic, hooks or confirmations, and of the tools only those that work on the copy.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import openhands.sdk.agent.agent as stock
from openhands.sdk.agent import Agent
from openhands.sdk.conversation import ConversationCallbackType, ConversationTokenCallbackType, LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.conversation.state import ConversationState
from openhands.sdk.llm import LLM, LLMResponse, MessageToolCall
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.tool import ToolDefinition
from openhands.sdk.tool.builtins import FinishTool, ThinkTool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
from pydantic import PrivateAttr

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import JsonObject, Message, Observation, Task, ToolCall
from openhands_rl_plugin.hosts.shared.sessions import register_runtime
from openhands_rl_plugin.hosts.v1.engine import ConversationEngine, ConversationTurn
from openhands_rl_plugin.hosts.v1.policy_llm import PolicyLLM
from openhands_rl_plugin.hosts.v1.values import SampledCalls
from openhands_rl_plugin.hosts.v1.workspace import ConversationWorkspace
from openhands_rl_plugin.hosts.v1.written_prompts import as_sent
from openhands_rl_plugin.session.branches import OpenForks

_ON_THE_COPY = frozenset({TerminalTool.name, FileEditorTool.name})
_EXECUTED = _ON_THE_COPY | {FinishTool.name, ThinkTool.name}
# What a branch does without: it would act outside of it, or cost calls of a model.
_LEFT_OUT: dict[str, object] = {"condenser": None, "critic": None, "agent_context": None, "mcp_config": {}}
# Seconds beside a command's own limit: to copy a workspace and start its shell.
_SLACK = 30.0


class ConversationWorld:
    """A ``SessionWorld``: the live conversation at one decision. Neither its events nor its files are changed here."""

    def __init__(
        self,
        conversation: LocalConversation,
        workspace: ConversationWorkspace,
        turn: ConversationTurn,
        engine: ConversationEngine,
        calls: SampledCalls,
    ) -> None:
        self.engine = engine
        self.agent = cast(Agent, conversation.agent)
        self._conversation = conversation
        self._workspace = workspace
        self._turn = turn
        self._calls = calls
        self._branches = OpenForks()
        self._stop = threading.Event()

    @property
    def info(self) -> EnvInfo:
        """Its steps have no rewards, and time limits of their own."""
        return EnvInfo(emits_rewards=False, step_timeout=self._step_seconds)

    def _step_seconds(self, action: Message) -> float:
        """Seconds for the answer's commands: more than their own limits, so that a branch reports timeouts, too."""
        calls = [call for call in self.calls_of(action) if call.name not in _EXECUTED - _ON_THE_COPY]
        limits = [_limit_of(call.arguments) for call in calls]
        return sum((self._workspace.terminal.seconds if each is None else each) + _SLACK for each in limits)

    def calls_of(self, answer: Message) -> Sequence[ToolCall | MessageToolCall]:
        """The answer's calls; where they are text, as the SDK read them."""
        return answer.tool_calls or self.engine.answers.of(answer).message.tool_calls or ()

    async def fork(self) -> ConversationBranch:
        """A copy of the live conversation. Raises ``BadEnvironmentError`` or ``InfrastructureError``."""
        return await self.branch(self._conversation.state, self._workspace, self._turn, self._calls)

    async def branch(
        self, state: ConversationState, workspace: ConversationWorkspace, turn: ConversationTurn, calls: SampledCalls
    ) -> ConversationBranch:
        """A branch that goes on from the end of ``state``."""
        return await self._branches.add(self._fork(state, workspace, turn, calls))

    def closed(self, branch: ConversationBranch) -> None:
        """A branch was closed by its user."""
        self._branches.closed(branch)

    async def close(self) -> None:
        """Close all branches; forks that are not finished are abandoned."""
        self._stop.set()
        await self._branches.close()

    async def _fork(
        self, state: ConversationState, workspace: ConversationWorkspace, turn: ConversationTurn, calls: SampledCalls
    ) -> ConversationBranch:
        def make() -> ConversationBranch:
            forked = workspace.fork(self._stop)
            try:
                return ConversationBranch(self, state, forked, turn, calls.copied())
            except BaseException:
                forked.close()
                raise

        return await background().blocking(make)


class ConversationBranch:
    """An ``Environment`` over one forked conversation, in the middle of an episode."""

    def __init__(
        self,
        world: ConversationWorld,
        state: ConversationState,
        workspace: ConversationWorkspace,
        turn: ConversationTurn,
        calls: SampledCalls,
    ) -> None:
        self._world = world
        self._workspace = workspace
        self._turn = turn
        self._calls = calls
        self._agent = _branch_agent(world.agent)
        session = uuid.uuid4()
        register_runtime(str(session), workspace)
        self._conversation = LocalConversation(
            agent=self._agent,
            conversation_id=session,
            workspace=str(workspace.sandboxed.private),
            persistence_dir=None,
            visualizer=None,
            stuck_detection=False,
        )
        _copy_events(state, self._conversation.state)

    async def reset(self, task: Task) -> Observation:
        """Not supported: a branch begins in the middle of an episode."""
        raise RuntimeError("a branch cannot be reset: it continues an episode")

    async def step(self, action: Message) -> Observation:
        """Execute an answer that the conversation's engine sampled; returns what the model would see.

        Raises ``BadEnvironmentError`` for a tool that a fork cannot execute.
        """
        return await background().blocking(partial(self._act, action))

    async def fork(self) -> ConversationBranch:
        """A copy of this branch."""
        return await self._world.branch(self._conversation.state, self._workspace, self._turn, self._calls)

    async def evidence(self) -> JsonObject:
        """The changes to the workspace since the episode began."""
        return await background().blocking(self._workspace.changes)

    async def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Run a command over the workspace as it stands, in a fresh sandbox."""
        return await background().blocking(partial(self._workspace.check, asked))

    async def close(self) -> None:
        """End the branch's processes and remove its files."""
        self._world.closed(self)
        await background().blocking(self._end)

    def _end(self) -> None:
        self._conversation.close()
        self._workspace.close()

    def _act(self, answer: Message) -> Observation:
        for name in {call.name for call in self._world.calls_of(answer)} & self._world.agent.tools_map.keys():
            if name not in _EXECUTED:
                raise BadEnvironmentError(f"the tool {name!r} cannot be executed in a fork of the conversation")
        state = self._conversation.state
        state.execution_status = Status.IDLE
        heard = self._agent.play(self._world.engine.answers.of(answer), self._conversation)
        if heard is None:
            return Observation(terminated=True)
        self._calls.add(answer)
        before, self._turn = self._turn, self._continued(answer, heard)
        self._world.engine.answers.expect(self._turn)
        return Observation(messages=self._turn.path[len(before.path) + 1 :])

    def _continued(self, answer: Message, heard: Sequence[SdkMessage]) -> ConversationTurn:
        before, prompt = self._turn, self._calls.put_back(heard)
        wire, known = (_wire(before.llm, messages) for messages in (prompt, before.prompt))
        if wire[: len(known)] != known:
            raise BadEnvironmentError(
                "the branch cannot continue the conversation: OpenHands rewrites its earlier messages here"
            )
        # The prompt repeats the answer first, except for one that the SDK could not read.
        replayed = len(wire) > len(known) and wire[len(known)]["role"] == "assistant"
        sent = as_sent(before.llm, wire, before.offered, before.arguments, compact=self._world.engine.compact)
        new = tuple(to_message(message) for message in sent[len(known) + replayed :])
        return replace(before, path=(*before.path, answer, *new), prompt=prompt, written=wire, rewritten=False)


class _Heard(Exception):
    """Ends a step at its next request."""


class _Play:
    """Gives one answer, and hears the request that follows it."""

    def __init__(self, answer: LLMResponse) -> None:
        self._answer: LLMResponse | None = answer
        self.heard: list[SdkMessage] | None = None

    def complete(
        self, llm: LLM, messages: list[SdkMessage], tools: Sequence[ToolDefinition], arguments: dict[str, Any]
    ) -> LLMResponse:
        if self._answer is None:
            self.heard = messages
            raise _Heard
        answer, self._answer = self._answer, None
        return answer

    def cancel(self) -> None:
        """Nothing waits."""


class BranchAgent(Agent):
    """The agent of a branch: the stock one, whose next answer is given."""

    _play: _Play | None = PrivateAttr(default=None)

    @property
    def prompt_dir(self) -> str:
        """The stock agent's."""
        return os.path.join(os.path.dirname(stock.__file__), "prompts")

    def play(self, answer: LLMResponse, conversation: LocalConversation) -> list[SdkMessage] | None:
        """Let the SDK execute an answer; returns the messages of the next request, ``None`` after the end."""
        self._play = _Play(answer)
        conversation.run()
        return self._play.heard

    def step(
        self,
        conversation: LocalConversation,
        on_event: ConversationCallbackType,
        on_token: ConversationTokenCallbackType | None = None,
    ) -> None:
        """As the stock agent's, until the next request."""
        assert self._play is not None
        try:
            Agent.step(
                self.model_copy(update={"llm": PolicyLLM.over(self.llm, self._play)}), conversation, on_event, on_token
            )
        except _Heard:
            conversation.state.execution_status = Status.PAUSED


def _branch_agent(live: Agent) -> BranchAgent:
    kept: dict[str, Any] = {name: getattr(live, name) for name in Agent.model_fields if name != "kind"}
    left_out = {name: value for name, value in _LEFT_OUT.items() if name in kept}
    tools = [tool for tool in live.tools if tool.name in _ON_THE_COPY]
    return BranchAgent(**{**kept, **left_out, "tools": tools})


def _copy_events(source: ConversationState, target: ConversationState) -> None:
    # Before 1.31 a conversation is a list of events, later the branch of a tree of them: names that the former lacks.
    old: Any = source
    new: Any = target
    branching = hasattr(source, "active_branch")
    for event in old.active_branch() if branching else source.events:
        target.events.append(event.model_copy())
    if branching:
        new.leaf_event_id = old.leaf_event_id
        new.rebuild_view()


def _wire(llm: LLM, messages: Sequence[SdkMessage]) -> list[dict[str, Any]]:
    # Copies: the SDK marks messages for the prompt cache while it writes them.
    return llm.format_messages_for_llm([each.model_copy() for each in messages])


def _limit_of(arguments: str) -> float | None:
    try:
        limit = json.loads(arguments).get("timeout")
        return float(limit)
    except (ValueError, TypeError, AttributeError):
        return None

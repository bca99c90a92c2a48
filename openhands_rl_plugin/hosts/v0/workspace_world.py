"""Forks of an OpenHands session that works in a workspace, for search.

A branch is a forked runtime and a list of events, not a second session with a controller and event files. That is
enough, because a prompt depends on events only: the agent's own ``_get_messages`` formats it from the live history and
the branch's events, which are serialized to JSON and back as in the live stream. A controller would not change the
prompt, but cost a quarter of a second and several threads per branch. No event of a branch reaches the live stream.

Not simulated in a branch: knowledge that microagents add to the continuing message when the model calls no tool,
condensation of the branch's own events, and OpenHands' own limits of a session. Where the real prompt then differs from
the simulated one, a new branch of the tree begins.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Protocol, runtime_checkable

from openhands.core.config import OpenHandsConfig
from openhands.core.exceptions import (
    FunctionCallNotExistsError,
    FunctionCallValidationError,
    LLMMalformedActionError,
    LLMNoActionError,
    LLMResponseError,
)
from openhands.events import EventSource
from openhands.events.action import (
    Action,
    AgentFinishAction,
    AgentRejectAction,
    AgentThinkAction,
    CmdRunAction,
    MessageAction,
    TaskTrackingAction,
)
from openhands.events.action.mcp import MCPAction
from openhands.events.event import Event
from openhands.events.observation import ErrorObservation, NullObservation
from openhands.events.observation import Observation as HostObservation
from openhands.events.serialization.event import event_from_dict, event_to_dict

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import BadEnvironmentError, ModelError, describe
from openhands_rl_plugin.core.messages import WireMessage, to_message
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import JsonObject, Message, Observation, Task
from openhands_rl_plugin.hosts.shared.hosted_environment import OpenForks
from openhands_rl_plugin.hosts.v0.engine import ControllerEngine, HostOutcome, HostTurn

Write = Callable[[Sequence[Event]], tuple[Sequence[WireMessage], Sequence[WireMessage]]]
"""Events -> the prompt as OpenHands passes it to its LLM, and as the LLM sends it."""

ANSWERED = (
    LLMMalformedActionError,
    LLMNoActionError,
    LLMResponseError,
    FunctionCallValidationError,
    FunctionCallNotExistsError,
)
"""Errors of an answer that OpenHands' controller reports to the model; others end the session."""

_ENDS = (AgentFinishAction, AgentRejectAction)
_NOT_RUN = (AgentThinkAction, TaskTrackingAction)
# Seconds beside the command's own limit: to copy a workspace, start its shell and end a command that timed out.
_SLACK = 30.0


@runtime_checkable
class ForkableRuntime(Protocol):
    """A workspace runtime with copies for search: what it has beside OpenHands' own interface."""

    config: OpenHandsConfig
    event_stream: Any

    @property
    def forkable(self) -> bool:
        """Whether ``fork`` is possible for this runtime."""
        ...

    def fork(self, stop: threading.Event) -> ForkableRuntime:
        """A runtime with copies of the session's files and state. Blocks; stops early when ``stop`` is set."""
        ...

    def changes(self) -> JsonObject:
        """The changes to the workspace since the session began. Blocks."""
        ...

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Run a command over the workspace as it stands, in a fresh sandbox. Blocks."""
        ...

    def run_action(self, action: Action) -> HostObservation:
        """As in OpenHands."""
        ...

    async def call_tool_mcp(self, action: MCPAction) -> HostObservation:
        """As in OpenHands."""
        ...

    def close(self) -> None:
        """As in OpenHands."""
        ...


@dataclass(frozen=True)
class Position:
    """The state of a session: its events as the agent sees them, and the next request."""

    events: tuple[Event, ...]
    turn: HostTurn


class WorkspaceWorld:
    """The live session at one decision. It can only be forked: its workspace and events are never changed here."""

    def __init__(self, runtime: ForkableRuntime, position: Position, engine: ControllerEngine, write: Write) -> None:
        self.engine = engine
        self.write = write
        self._runtime = runtime
        self._position = position
        self._branches = OpenForks()
        self._stop = threading.Event()

    @property
    def info(self) -> EnvInfo:
        """Its steps have no rewards, and time limits of their own."""
        return EnvInfo(emits_rewards=False, step_timeout=self._step_seconds)

    def _step_seconds(self, action: Message) -> float:
        """Seconds for the answer's commands: more than their own limits, so that a branch reports timeouts, too."""
        default = self._runtime.config.sandbox.timeout
        commands = [done for done in self.engine.answers.of(action).actions if isinstance(done, CmdRunAction)]
        return sum((default if each.timeout is None else each.timeout) + _SLACK for each in commands)

    async def fork(self) -> WorkspaceBranch:
        """A copy of the live session. Raises ``BadEnvironmentError`` or ``InfrastructureError``."""
        return await self.branch(self._runtime, self._position)

    async def branch(self, runtime: ForkableRuntime, position: Position) -> WorkspaceBranch:
        """A branch that continues from ``position`` with a fork of ``runtime``."""
        return await self._branches.add(self._fork(runtime, position))

    def recorded(self, event: Event, source: EventSource, number: int) -> Event:
        """The event as the live stream would return it, without adding it there."""
        # OpenHands declares these as properties without setters, and sets them like this itself.
        holder: Any = event
        holder._id, holder._source, holder._timestamp = number, source, datetime.now().isoformat()
        return event_from_dict(self._runtime.event_stream._replace_secrets(event_to_dict(event)))

    def closed(self, branch: WorkspaceBranch) -> None:
        """A branch was closed by its user."""
        self._branches.closed(branch)

    async def close(self) -> None:
        """Close all branches; forks that are not finished are abandoned."""
        self._stop.set()
        await self._branches.close()

    async def _fork(self, runtime: ForkableRuntime, position: Position) -> WorkspaceBranch:
        return WorkspaceBranch(self, await background().blocking(partial(runtime.fork, self._stop)), position)


class WorkspaceBranch:
    """An ``Environment`` over one forked runtime, in the middle of an episode."""

    def __init__(self, world: WorkspaceWorld, runtime: ForkableRuntime, position: Position) -> None:
        self._world = world
        self._runtime = runtime
        self._position = position

    async def reset(self, task: Task) -> Observation:
        """Not supported: a branch begins in the middle of an episode."""
        raise RuntimeError("a branch cannot be reset: it continues an episode")

    async def step(self, action: Message) -> Observation:
        """Execute the actions of an answer that the session's engine sampled; returns what the model would see.

        Raises ``BadEnvironmentError`` for an action that a fork cannot execute.
        """
        position, observation = await background().blocking(partial(self._act, action))
        self._position = position
        return observation

    async def fork(self) -> WorkspaceBranch:
        """A copy of this branch."""
        return await self._world.branch(self._runtime, self._position)

    async def evidence(self) -> JsonObject:
        """The changes to the workspace since the session began."""
        return await background().blocking(self._runtime.changes)

    async def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Run a command over the workspace as it stands, in a fresh sandbox."""
        return await background().blocking(partial(self._runtime.check, asked))

    async def close(self) -> None:
        """End the branch's processes and remove its files."""
        self._world.closed(self)
        await background().blocking(self._runtime.close)

    def _act(self, answer: Message) -> tuple[Position, Observation]:
        events = list(self._position.events)
        if self._execute(self._world.engine.answers.of(answer), events):
            return self._position, Observation(terminated=True)
        prompt, wire = self._world.write(events)
        turn = _continued(self._position.turn, answer, prompt, wire)
        self._world.engine.answers.expect(turn)
        new = turn.path[len(self._position.turn.path) + 1 :]
        return Position(tuple(events), turn), Observation(messages=new)

    def _execute(self, outcome: HostOutcome, events: list[Event]) -> bool:
        """Append the events of an answer; true when it ends the episode."""
        if outcome.error is not None:
            if not isinstance(outcome.error, ANSWERED):
                raise ModelError(f"OpenHands ends a session for this answer: {describe(outcome.error)}")
            self._record(ErrorObservation(str(outcome.error)), EventSource.AGENT, events)
        for action in outcome.fresh_actions():
            done = self._record(action, EventSource.AGENT, events)
            if isinstance(done, _ENDS):
                return True
            if isinstance(done, MessageAction):
                self._record(MessageAction(content=_continuing_message()), EventSource.USER, events)
            elif not isinstance(observation := self._observe(done), NullObservation):
                self._record(observation, EventSource.AGENT, events)
        return False

    def _record(self, event: Event, source: EventSource, events: list[Event]) -> Any:
        recorded = self._world.recorded(event, source, (events[-1].id if events else 0) + 1)
        events.append(recorded)
        return recorded

    def _observe(self, action: Action) -> HostObservation:
        """The observation of an action, as when OpenHands' runtime gets it from the event stream."""
        if not (action.runnable or isinstance(action, _NOT_RUN)):
            raise BadEnvironmentError(f"{type(action).__name__} cannot be executed in a fork of the workspace")
        if action.timeout is None:
            action.set_hard_timeout(self._runtime.config.sandbox.timeout, blocking=False)
        try:
            if isinstance(action, MCPAction):
                observation = asyncio.run(self._runtime.call_tool_mcp(action))
            else:
                observation = self._runtime.run_action(action)
        except PermissionError as error:
            observation = ErrorObservation(str(error))
        holder: Any = observation
        holder._cause, holder.tool_call_metadata = action.id, action.tool_call_metadata
        return observation


def _continued(
    before: HostTurn, answer: Message, prompt: Sequence[WireMessage], wire: Sequence[WireMessage]
) -> HostTurn:
    """The turn after ``answer``. It shares the earlier messages, because a search holds very many turns."""
    known = len(before.wire)
    if list(wire[:known]) != list(before.wire):
        raise BadEnvironmentError(
            "the branch cannot continue the conversation: OpenHands rewrites its earlier messages here"
        )
    # The prompt repeats the answer first, in OpenHands' own form, except for one that OpenHands could not parse.
    replayed = len(wire) > known and wire[known]["role"] == "assistant"
    new = tuple(to_message(message) for message in wire[known + replayed :])
    return replace(
        before,
        path=(*before.path, answer, *new),
        prompt=[*before.prompt, *prompt[len(before.prompt) :]],
        wire=[*before.wire, *wire[known:]],
        rewritten=False,
    )


def _continuing_message() -> str:
    """The user message of headless sessions for a model that called no tool."""
    # Not at the top: OpenHands' own main module may be importing this package right now.
    from openhands.controller.state.state import State
    from openhands.core.main import auto_continue_response

    return auto_continue_response(State())

"""The environment runtime: puts an ``Environment`` behind OpenHands' ``Runtime``.

Chosen by class path, ``runtime = "openhands_rl_plugin.hosts.v0.environment_runtime.EnvironmentRuntime"``. The agent
sends ``MCPAction``s: ``RESET_TOOL`` first, which costs no completion, then ``STEP_TOOL`` with each of the policy's
answers. The observation is the ``EnvironmentReply`` as JSON, so that OpenHands' event log holds rewards and ends of
episodes, too. A failure of the environment is such a reply: after an exception here the controller would wait forever.
"""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

from openhands.core.config import OpenHandsConfig
from openhands.core.exceptions import AgentRuntimeError
from openhands.events import EventSource
from openhands.events.action import CmdRunAction, MessageAction
from openhands.events.action.mcp import MCPAction
from openhands.events.event import Event
from openhands.events.observation import ErrorObservation, Observation
from openhands.events.observation.mcp import MCPObservation
from openhands.microagent import BaseMicroagent
from openhands.runtime.runtime_status import RuntimeStatus

from openhands_rl_plugin.config.build import make_environment, make_strategy
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import CaughtFailure
from openhands_rl_plugin.core.protocols import info_of
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject, Message
from openhands_rl_plugin.core.types import Observation as Answer
from openhands_rl_plugin.environments.workspace.sandbox import INSIDE
from openhands_rl_plugin.hosts.shared.standalone_run import task_from_environment_variable
from openhands_rl_plugin.hosts.v0.session_state import SessionRuntime
from openhands_rl_plugin.hosts.v0.settings import host_settings
from openhands_rl_plugin.rollout.session import LiveEnvironment
from openhands_rl_plugin.session.session import current_episode

RESET_TOOL = "environment_reset"
STEP_TOOL = "environment_step"

_WANTS_CALLS = (
    "OpenHands' controller passes the text of an answer only, and this environment wants its tools called: set "
    "react_format = true in [rl] (tools of your own: template in [rl.environment])"
)


class EnvironmentReply(Answer):
    """One reply of the environment; ``messages`` open the conversation after a reset and continue it after a step.

    ``failure`` is set when the environment could not answer; the agent then ends the episode.
    """

    evidence: JsonObject | None = None
    failure: Failure | None = None


class EnvironmentRuntime(SessionRuntime):
    """One episode behind OpenHands' runtime interface. The task is the bound episode's; without one it is that of
    ``[rl] env_name`` with the number in ``OPENHANDS_RL_TASK_INDEX``. Raises ``ConfigError`` from the constructor."""

    def __init__(self, config: OpenHandsConfig, *args, **kwargs) -> None:
        episode = current_episode()
        if episode is None:
            settings = host_settings(config.get_agent_config("RLAgent"), config)
            task, strategy = task_from_environment_variable(settings), make_strategy(settings)
        else:
            settings, task, strategy = episode.settings, episode.request.task, episode.strategy
        self._instructed_by_user = episode is None and not task.instruction
        self._task = task
        # Before OpenHands' constructor, which leaves threads and an exit handler behind if a later line fails.
        self.live = LiveEnvironment(make_environment(settings), forks=getattr(strategy, "forks", 0))
        self.reply: EnvironmentReply | None = None
        super().__init__(config, *args, **kwargs)

    def take_reply(self) -> EnvironmentReply:
        """The environment's reply to the last action, once; without one, a failure."""
        reply, self.reply = self.reply, None
        return reply or _failed("the runtime did not answer")

    def unsupported(self, what: str) -> ErrorObservation:
        """The observation for an action that needs ``what``."""
        return ErrorObservation(
            f"This runtime is an environment and has no {what}: only {RESET_TOOL} and {STEP_TOOL} work."
        )

    def on_event(self, event: Event) -> None:
        """Also takes the user's first message (``-t``) as the instruction of a task that no runner provided."""
        if self._instructed_by_user and isinstance(event, MessageAction) and event.source == EventSource.USER:
            self._task = self._task.model_copy(update={"instruction": event.content})
            self._instructed_by_user = False
        super().on_event(event)

    async def connect(self) -> None:
        """Starts nothing: the episode begins with the agent's first action."""
        self._runtime_initialized = True
        self.set_runtime_status(RuntimeStatus.RUNTIME_STARTED)

    def conclude(self) -> tuple[JsonObject | None, Failure | None]:
        """Evidence (``None`` when the episode never began) and failure, if any; closes the environment. Blocks."""
        background().wait_for(self.live.conclude())
        return self.live.evidence, self.live.failure

    def close(self) -> None:
        """Close the environment, once. Blocks."""
        atexit.unregister(self.close)
        self._runtime_initialized = False
        self.conclude()
        super().close()

    async def call_tool_mcp(self, action: MCPAction) -> Observation:
        """Reset or step the environment."""
        if action.name not in (RESET_TOOL, STEP_TOOL):
            return ErrorObservation(f"There is no tool {action.name!r}; the environment has {RESET_TOOL}, {STEP_TOOL}.")
        # Connections belong to one event loop, and OpenHands closes the current one before it closes the runtime.
        # Blocking is fine: this thread serves only this session.
        reply = self.reply = background().wait_for(self._reply_to(action))
        return MCPObservation(content=reply.model_dump_json(), name=action.name, arguments=action.arguments)

    async def _reply_to(self, action: MCPAction) -> EnvironmentReply:
        live, content = self.live, action.arguments.get("content")
        try:
            if action.name == RESET_TOOL:
                answer = await live.reset(self._task)
                if info_of(live.environment).tools:
                    return _failed(_WANTS_CALLS)
            elif isinstance(content, str):
                answer = await live.step(Message(role="assistant", content=content))
            else:
                return _failed(f"{STEP_TOOL} needs the policy's answer as text in 'content'")
        except CaughtFailure as caught:
            return EnvironmentReply(failure=caught.failure)
        if answer.terminated or answer.truncated:
            await live.gather()
        return EnvironmentReply(**dict(answer), evidence=live.evidence, failure=live.failure)

    def get_microagents_from_selected_repo(self, selected_repository: str | None) -> list[BaseMicroagent]:
        """None: an environment has no files."""
        return []

    @property
    def workspace_root(self) -> Path:
        """Required by OpenHands; there is no workspace."""
        return Path(INSIDE)

    def run(self, action: CmdRunAction) -> Observation:
        """Not supported."""
        return self.unsupported("shell")

    def read(self, action: Any) -> Observation:
        """Not supported."""
        return self.unsupported("files")

    write = edit = read

    def copy_to(self, host_src: str, sandbox_dest: str, recursive: bool = False) -> None:
        """Raises ``AgentRuntimeError``: an environment has no files."""
        raise AgentRuntimeError("an environment has no files to copy to")

    def copy_from(self, path: str) -> Path:
        """Raises ``AgentRuntimeError``: an environment has no files."""
        raise AgentRuntimeError("an environment has no files to copy from")

    def list_files(self, path: str | None = None) -> list[str]:
        """Nothing: an environment has no files."""
        return []


def _failed(message: str) -> EnvironmentReply:
    failure = Failure(kind=FailureKind.ENVIRONMENT, message=message[:500], boundary="openhands.runtime")
    return EnvironmentReply(failure=failure)

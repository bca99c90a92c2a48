"""One conversation of the SDK, run to its end for one episode of a runner."""

from __future__ import annotations

import asyncio
import threading
import uuid

from openhands.sdk import LLM
from openhands.sdk.context.condenser import CondenserBase, LLMSummarizingCondenser
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import MessageEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from pydantic import SecretStr, ValidationError

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary, describe
from openhands_rl_plugin.core.records import LAST_ERROR
from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason, Trajectory
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions
from openhands_rl_plugin.hosts.shared.sessions import end_evidence, register_runtime, runtime_of
from openhands_rl_plugin.hosts.v1.agent import RecordedAgent, RLAgent
from openhands_rl_plugin.hosts.v1.endings import BOUNDARY, said_finish
from openhands_rl_plugin.hosts.v1.tools import SessionTools, session_tools
from openhands_rl_plugin.hosts.v1.values import price_of
from openhands_rl_plugin.session.session import Session, bind_episode

_CONTINUE = (
    "Please go on in the way that you think is right. If you think that the task is solved, finish. Nobody will answer "
    "a question."
)
_LONGEST_ERROR = 2000
# The SDK says it with a status only; these are V0's words.
_STUCK = "Agent got stuck in a loop"
# Seconds for the conversation's thread after its tools were closed.
_PATIENCE = 30.0
# A turn takes one iteration; one with a summary or without a call more.
_ITERATIONS_A_TURN = 4


class ConversationSession:
    """A ``HostSession``: the conversation runs in a thread of its own."""

    def __init__(self, settings: RLSettings, options: HostOptions, episode: Session) -> None:
        self._settings = settings
        self._options = options
        self._episode = episode
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._opening = threading.Lock()
        self._agent: RLAgent | None = None
        self._conversation: LocalConversation | None = None
        self._tools: SessionTools | None = None
        self._thread: threading.Thread | None = None
        self._failure: Failure | None = None
        self._error: RLError | None = None

    def open(self) -> None:
        """Create the conversation, send the task as the user's message, and let it run."""
        with self._opening, boundary(FailureKind.INFRASTRUCTURE, "openhands.start"):
            tools = self._tools = session_tools(self._settings, self._options, self._episode)
            agent = self._agent = self._make_agent(tools)
            session = uuid.uuid4()
            if tools.workspace is not None:
                register_runtime(str(session), tools.workspace)
            conversation = self._conversation = LocalConversation(
                agent=agent,
                conversation_id=session,
                workspace=str(tools.folder),
                visualizer=None,
                stuck_detection=self._options.stuck_detection,
                max_iteration_per_run=self._episode.limits.max_turns * _ITERATIONS_A_TURN + 2,
            )
            task = self._episode.request.task
            conversation.send_message(task.instruction or task.id)
            self._thread = threading.Thread(
                target=self._play, args=(conversation,), name="rl-conversation", daemon=True
            )
            self._thread.start()

    async def ended(self) -> None:
        """Wait until the conversation has ended."""
        await self._ended.wait()

    def conclude(self, *, timed_out: bool = False, failure: Failure | None = None) -> Trajectory:
        """The episode's trajectory. Raises the ``RLError`` that must stop the run."""
        episode, agent, conversation = self._episode, self._agent, self._conversation
        played = agent.episode_of(conversation) if agent is not None and conversation is not None else None
        if played is not None:
            played.cancel()
        if (error := episode.error or self._error) is not None:
            raise error
        if played is not None:
            played.end(StopReason.TIMEOUT if timed_out else None)
        elif not timed_out:
            episode.failure = (
                failure
                or self._failure
                or Failure(kind=FailureKind.INFRASTRUCTURE, message="the conversation took no step", boundary=BOUNDARY)
            )
        runtime = runtime_of(str(conversation.state.id)) if conversation is not None else None
        evidence, failure = end_evidence(runtime, episode, episode.failure)
        if conversation is not None and (said := _last_error(conversation)):
            evidence = {**(evidence or episode.evidence or {}), LAST_ERROR: said}
        return episode.freeze(stop=StopReason.TIMEOUT if timed_out else None, failure=failure, evidence=evidence)

    def close(self) -> None:
        """Close the conversation with its tools, and wait for its thread."""
        with self._opening:
            conversation, agent = self._conversation, self._agent
            played = agent.episode_of(conversation) if agent is not None and conversation is not None else None
            if played is not None:
                played.cancel()
            if conversation is not None:
                conversation.close()
            if played is not None:
                played.release()
            if self._thread is not None:
                self._thread.join(_PATIENCE)
            if self._tools is not None:
                self._tools.close()

    def _play(self, conversation: LocalConversation) -> None:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, BOUNDARY), bind_episode(self._episode):
                self._run(conversation)
        except CaughtFailure as caught:
            self._failure = caught.failure
        except RLError as error:
            self._error = error
        except asyncio.CancelledError:
            pass  # the episode was ended at its limit, or closed, while a request was under way
        finally:
            self._loop.call_soon_threadsafe(self._ended.set)

    def _run(self, conversation: LocalConversation) -> None:
        replies = self._options.replies
        said = 0
        while True:
            conversation.run()
            events = conversation.state.events
            over = self._episode.stop is not None or not any(isinstance(event, MessageEvent) for event in events)
            if conversation.state.execution_status != Status.FINISHED or over or said_finish(events):
                return
            later = replies.later if replies is not None and said else ""
            conversation.send_message((replies.first + later) if replies is not None else _CONTINUE)
            said += 1

    def _make_agent(self, tools: SessionTools) -> RLAgent:
        llm = self._llm("agent")
        kind = RLAgent if self._options.agent == RL_AGENT else RecordedAgent
        return kind(llm=llm, tools=list(tools.tools), condenser=self._condenser(), rl=tools.rl)

    def _llm(self, usage: str) -> LLM:
        serving, options = self._settings.serving, self._options
        model = f"openai/{self._episode.request.served_model or serving.model}"
        price = price_of(model)
        return LLM(
            model=model,
            base_url=serving.base_url,
            api_key=SecretStr(serving.api_key() or "none"),
            usage_id=usage,
            native_tool_calling=options.native_tool_calling,
            timeout=max(1, round(serving.request_timeout)),
            num_retries=options.llm_retries,
            retry_min_wait=1,
            retry_max_wait=2,
            max_output_tokens=self._episode.limits.max_response_length,
            caching_prompt=False,
            disable_vision=True,
            reasoning_effort=None,
            input_cost_per_token=price,
            output_cost_per_token=price,
        )

    def _condenser(self) -> CondenserBase | None:
        wanted = dict(self._options.condenser)
        kind = wanted.pop("type", "noop")
        if kind == "noop":
            return None
        if kind != "llm":
            raise ConfigError(f'condenser {kind!r}: OpenHands V1 has "llm" and "noop"')
        try:
            return LLMSummarizingCondenser.model_validate({**wanted, "llm": self._llm("condenser")})
        except ValidationError as error:
            raise ConfigError(f"condenser {self._options.condenser}: {describe(error)}") from error


def _last_error(conversation: LocalConversation) -> str:
    if conversation.state.execution_status == Status.STUCK:
        return _STUCK
    errors = (event for event in reversed(conversation.state.events) if isinstance(event, ConversationErrorEvent))
    last = next(errors, None)
    return f"{last.code}: {last.detail}"[:_LONGEST_ERROR] if last is not None else ""

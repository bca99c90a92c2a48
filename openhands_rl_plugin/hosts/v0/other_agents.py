"""Records the episode of an OpenHands agent other than ``RLAgent``, without changing its behaviour."""

from __future__ import annotations

from litellm.exceptions import ContextWindowExceededError
from openai import OpenAIError
from openhands.controller.agent import Agent
from openhands.controller.state.state import State
from openhands.core.exceptions import LLMNoResponseError
from openhands.events.action import Action, AgentFinishAction
from openhands.memory.condenser.condenser import Condenser

from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.tree import HostConversation
from openhands_rl_plugin.core.types import TURN, Failure, StopReason
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.litellm_calls import model_server_error
from openhands_rl_plugin.hosts.v0.condensation import keep_condensations, record_condenser
from openhands_rl_plugin.hosts.v0.engine import MALFORMED
from openhands_rl_plugin.hosts.v0.recorder import Attempt, CallLog, record_completions, recording


class AgentRecorder:
    """Wraps the ``step`` of one agent. Its prompts and completions become the tree of ``episode``.

    Of a step with several completions only the last is kept. An answer that OpenHands cannot parse is kept off the
    executed path, as with ``RLAgent``.
    """

    def __init__(self, agent: Agent, episode: HostEpisode) -> None:
        self._agent = agent
        self._episode = episode
        self._conversation = HostConversation(episode.tree)
        self._step = agent.step
        record_completions(agent.llm)
        if isinstance(condenser := getattr(agent, "condenser", None), Condenser):
            record_condenser(condenser)

    def step(self, state: State) -> Action:
        """The agent's own step. A prompt that exceeds the context window ends the episode; other errors are raised."""
        episode = self._episode
        episode.failure = None
        log = CallLog(
            state.session_id, state.iteration_flag.current_value, episode.base_model, ask_tokens=episode.token_ids
        )
        malformed: Exception | None = None
        try:
            with recording(log):
                action = self._step(state)
        except ContextWindowExceededError:
            return self._end(StopReason.MAX_TOKENS, AgentFinishAction(final_thought="The context window is full."))
        except MALFORMED as error:
            malformed = error
            raise
        except (OpenAIError, LLMNoResponseError) as error:
            kind = model_server_error(error).kind
            episode.failure = Failure(kind=kind, message=describe(error), boundary="openhands.llm")
            raise
        finally:
            self._keep(log, malformed)
        return self._end(StopReason.TERMINATED, action) if isinstance(action, AgentFinishAction) else action

    def _end(self, stop: StopReason, action: Action) -> Action:
        self._episode.end_here(stop)
        return action

    def _keep(self, log: CallLog, malformed: Exception | None) -> None:
        own = [attempt for attempt in log.attempts if attempt.kind == TURN]
        keep_condensations(self._episode, [attempt for attempt in log.attempts if attempt.kind != TURN])
        answered = [attempt for attempt in own if attempt.completion is not None]
        if answered:
            self._keep_answer(log, answered[-1], malformed)
        self._episode.keep()

    def _keep_answer(self, log: CallLog, attempt: Attempt, malformed: Exception | None) -> None:
        assert attempt.completion is not None
        tree = self._episode.tree
        rewritten = self._conversation.follow(attempt.messages)
        tree.tools = tree.tools or tuple(attempt.tools)
        metadata = {
            "session": log.session,
            "step": log.step,
            "attempts": [each.summary() for each in log.attempts if each.kind == TURN],
            **attempt.completion.metadata,
            **({"history_rewritten": True} if rewritten else {}),
            **({"malformed": describe(malformed)} if malformed else {}),
        }
        node = tree.propose(attempt.completion.model_copy(update={"metadata": metadata}))
        self._episode.turns += 1
        if malformed is None:
            self._conversation.acted(node)


def record_agent(agent: Agent, episode: HostEpisode) -> None:
    """Record all further steps of ``agent``."""
    agent.step = AgentRecorder(agent, episode).step

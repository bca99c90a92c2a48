"""Records the episode of an OpenHands agent other than ``RLAgent``, without changing its behaviour."""

from __future__ import annotations

from litellm.exceptions import ContextWindowExceededError
from openhands.controller.agent import Agent
from openhands.controller.state.state import State
from openhands.events.action import Action, AgentFinishAction
from openhands.memory.condenser.condenser import Condenser

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.hosts.v0.completion import MALFORMED, ask, connect
from openhands_rl_plugin.hosts.v0.condensation import record_condenser
from openhands_rl_plugin.session.session import Session


def record_agent(agent: Agent, session: Session) -> None:
    """Record all further steps of ``agent``, whose own sampling and limits hold.

    An answer that OpenHands cannot parse is kept off the executed path, and a prompt that exceeds the context window
    ends the episode.
    """
    own_step = agent.step
    session.samples = False
    connect(session, agent.llm)
    if isinstance(condenser := getattr(agent, "condenser", None), Condenser):
        record_condenser(condenser, session)
    ask(agent.llm, lambda body: background().wait_for(session.complete(body)))

    def step(state: State) -> Action:
        session.note = {"session": state.session_id, "step": state.iteration_flag.current_value}
        turns = session.turns
        try:
            action = own_step(state)
        except ContextWindowExceededError:
            session.failure = None
            session.end_here(StopReason.MAX_TOKENS)
            return AgentFinishAction(final_thought="The context window is full.")
        except MALFORMED as error:
            if session.turns > turns:
                session.unread(describe(error))
            raise
        if isinstance(action, AgentFinishAction):
            session.end_here(StopReason.TERMINATED)
        return action

    agent.step = step

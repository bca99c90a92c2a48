"""``RLAgent`` of OpenHands V1: the SDK's agent, with a strategy for every completion, fully recorded.

Importing this module registers it: the SDK finds an agent's class by its name (``kind``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import openhands.sdk.agent.agent as stock
from openhands.sdk.agent import Agent, AgentBase
from openhands.sdk.context.condenser import CondenserBase
from openhands.sdk.conversation import ConversationCallbackType, ConversationTokenCallbackType, LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.llm import LLM
from openhands.sdk.llm.exceptions import LLMContextWindowExceedError
from pydantic import Field, PrivateAttr, field_validator

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import settings_from_sections
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.hosts.compact_prompt import SYSTEM, system_prompt
from openhands_rl_plugin.hosts.shared.run_checks import too_long
from openhands_rl_plugin.hosts.v1 import conversations
from openhands_rl_plugin.hosts.v1.conversations import ConversationEpisode, adopting
from openhands_rl_plugin.hosts.v1.critic import judged_in
from openhands_rl_plugin.hosts.v1.session_llm import Prompts, SessionLLM
from openhands_rl_plugin.session.session import EpisodeOver, Session, current_episode

log = logging.getLogger("openhands")

# Absent before 1.23, whose conversations have no ``arun``.
_stock_astep: Callable[..., Awaitable[None]] | None = getattr(Agent, "astep", None)


class RLAgent(Agent):
    """The SDK's agent whose completions a strategy decides and a storage records.

    ``rl`` is the ``[rl]`` section of a config.toml. Under a runner of the project (``bind_episode``) the runner's
    settings count. A step is the stock agent's, on a copy whose ``llm`` is a ``SessionLLM``; what is serialised is this
    agent with its plain LLM.
    """

    rl: dict[str, Any] = Field(default_factory=dict, description="The [rl] section of openhands_rl_plugin.")

    replays_sampled: ClassVar[bool] = True
    """Calls that the SDK repaired are replayed to the model as they were sampled, so that prompts extend each other."""

    _parent: tuple[ConversationEpisode, str] | None = PrivateAttr(default=None)

    @field_validator("rl")
    @classmethod
    def _is_valid(cls, rl: dict[str, Any]) -> dict[str, Any]:
        try:
            settings_from_sections({"rl": rl})
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return rl

    @property
    def prompt_dir(self) -> str:
        """The stock agent's prompts; by default the SDK looks beside the module of a subclass."""
        return os.path.join(os.path.dirname(stock.__file__), "prompts")

    @property
    def static_system_message(self) -> str:
        """The stock agent's, or the compact one."""
        if not self.settings().workspace.is_compact:
            return super().static_system_message
        stock_prompt = getattr(self, "system_prompt", None) is None and (
            self.system_prompt_filename == Agent.model_fields["system_prompt_filename"].default
        )
        return system_prompt(summary=True, instructions=SYSTEM if stock_prompt else super().static_system_message)

    def step(
        self,
        conversation: LocalConversation,
        on_event: ConversationCallbackType,
        on_token: ConversationTokenCallbackType | None = None,
    ) -> None:
        """As the stock agent's."""
        with self._playing(conversation) as agent:
            Agent.step(agent, conversation, on_event, on_token)

    async def astep(
        self,
        conversation: LocalConversation,
        on_event: ConversationCallbackType,
        on_token: ConversationTokenCallbackType | None = None,
    ) -> None:
        """As the stock agent's. The SDK asks for it since 1.23."""
        with self._playing(conversation) as agent:
            assert _stock_astep is not None
            await _stock_astep(agent, conversation, on_event, on_token)

    def close(self) -> None:
        """End the episodes of the conversation that is being closed."""
        conversations.close()
        super().close()

    def episode_of(self, conversation: LocalConversation) -> ConversationEpisode | None:
        """The newest episode of a conversation; ``None`` before its first step and where the plugin failed."""
        return conversations.episode_of(conversation)

    @property
    def parent(self) -> tuple[ConversationEpisode, str] | None:
        """The episode in which this agent was made as a sub-agent, and its registered kind."""
        return self._parent

    @property
    def delegated_by(self) -> Session | None:
        """The episode in which this agent was made, as a sub-agent."""
        return self._parent[0].episode if self._parent is not None else None

    def _adopt(self, by: ConversationEpisode, made: AgentBase, kind: str) -> AgentBase:
        """The same agent, recorded as a sub-agent."""
        if type(made) is Agent:
            fields = {name: getattr(made, name) for name in Agent.model_fields if name != "kind"}
            made = type(self).model_validate({**fields, "rl": self.rl})
        if not isinstance(made, RLAgent):
            log.warning("openhands_rl_plugin: a sub-agent is not recorded: %s is no Agent of the SDK", type(made))
            return made
        made = made.model_copy()
        made._parent = (by, kind)
        return made

    def settings(self) -> RLSettings:
        """Those of the episode that it is made for, or else its own."""
        bound = self.delegated_by or current_episode()
        return bound.settings if bound is not None else settings_from_sections({"rl": self.rl})

    @contextmanager
    def _playing(self, conversation: LocalConversation) -> Iterator[Agent]:
        """The agent for one step."""
        episode = conversations.begin_step(self, conversation)
        if episode is None:
            yield self
            return
        answer = partial(episode.answer, self.llm)
        llm = SessionLLM.over(self.llm, answer, episode.prompts, episode.cancel, episode.unread)
        try:
            with judged_in(episode.episode, episode.session), adopting(partial(self._adopt, episode)):
                yield self.model_copy(update={"llm": llm, "condenser": _recorded(self.condenser, episode)})
        except EpisodeOver as over:
            conversation.state.execution_status = Status.FINISHED
            episode.end(over.stop)
        except LLMContextWindowExceedError as error:
            episode.full = bool(episode.episode.turns)
            if episode.standalone and not episode.full:
                raise LLMContextWindowExceedError(too_long(episode.episode.settings)) from error
            raise
        finally:
            conversations.end_step(episode, conversation)


class RecordedAgent(RLAgent):
    """The stock agent with what it sends, recorded: to compare with."""

    replays_sampled: ClassVar[bool] = False


def _recorded(condenser: CondenserBase | None, episode: ConversationEpisode) -> CondenserBase | None:
    """The condenser with recorded LLMs; condensers of condensers too."""
    if condenser is None:
        return None
    changed: dict[str, object] = {}
    llm, inner = getattr(condenser, "llm", None), getattr(condenser, "condensers", None)
    if isinstance(llm, LLM):
        changed["llm"] = SessionLLM.over(llm, partial(episode.summarize, llm), Prompts(compact=False))
    if isinstance(inner, list):
        changed["condensers"] = [_recorded(each, episode) for each in inner]
    return condenser.model_copy(update=changed) if changed else condenser

"""The episodes of an agent's conversations: when one begins, and who ends it when the SDK does not say so."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any, Self

from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import MessageEvent
from openhands.sdk.llm import LLM
from pydantic import SecretStr

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import ConfigError, RLError, boundary
from openhands_rl_plugin.core.types import FailureKind, StopReason
from openhands_rl_plugin.hosts.shared.litellm_calls import split_provider
from openhands_rl_plugin.hosts.shared.standalone_run import (
    RunBeside,
    StandaloneRun,
    adapter_in_use,
    listed_models,
    standalone_episode,
)
from openhands_rl_plugin.hosts.v1.conversation_episode import ConversationEpisode, note_failure, note_recording
from openhands_rl_plugin.hosts.v1.endings import ENDED, conversation_end, last_instruction, said_finish
from openhands_rl_plugin.hosts.v1.sub_agents import sub_agent_episode
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.session.sampled_texts import SampledCalls
from openhands_rl_plugin.session.session import Session, current_episode
from openhands_rl_plugin.session.upstream import Upstream, upstream_in

log = logging.getLogger("openhands")

WATCH_SECONDS = 1.0
"""How often open conversations are looked at; one that has ended is seen twice before its episode ends."""


class _Played:
    """A conversation, with the episode that it is in."""

    def __init__(self, calls: SampledCalls, episode: ConversationEpisode | None) -> None:
        self.calls = calls
        self.episode = episode
        self.stepping = False
        self.steps = 0
        self.finished_at: int | None = None
        self.stop: StopReason | None = None
        self.seen: tuple[Status, int] | None = None


class Conversations:
    """Shared by all copies of one agent, which the SDK makes freely. Thread-safe."""

    def __init__(self) -> None:
        self._played: dict[str, _Played] = {}
        self._lock = threading.Lock()
        self._watching = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def begin_step(
        self,
        conversation: LocalConversation,
        llm: LLM,
        settings: Callable[[], RLSettings],
        *,
        exact: bool,
        parent: tuple[ConversationEpisode, str] | None = None,
    ) -> ConversationEpisode | None:
        """The episode of the agent's next step; ``None`` when the step is to be the stock agent's.

        ``parent``: the episode whose sub-agent it is, and the registered kind of the agent.

        When the user says something after an end, or the watch saw the end, a new episode begins. A reply is an end as
        well, but in an episode of a runner, which answers by itself.
        """
        session = str(conversation.state.id)
        with self._lock:
            played = self._played.get(session)
        if played is not None and played.episode is None:
            return None
        if played is not None and played.episode is not None and _answered(played, conversation):
            played.episode.end(played.stop)
        if played is None or played.episode is None or played.episode.over:
            calls = played.calls if played else SampledCalls()
            played = self._begin(conversation, llm, settings(), calls, exact, parent)
            with self._lock:
                self._played[session] = played
            self._watch()
        played.stepping, played.finished_at = True, None
        return played.episode

    def end_step(self, conversation: LocalConversation) -> None:
        """The step has ended; the conversation may have, too."""
        played = self._played[str(conversation.state.id)]
        state = conversation.state
        alone = played.episode is not None and played.episode.standalone
        if state.execution_status == Status.FINISHED and (alone or said_finish(state.events)):
            played.finished_at = len(state.events)
            played.stop, _ = conversation_end(Status.FINISHED, state.events)
        played.steps += 1
        played.stepping = False
        if played.episode is not None and played.episode.failed:
            played.episode = None

    def episode_of(self, conversation: LocalConversation) -> ConversationEpisode | None:
        """The conversation's newest episode; ``None`` before its first step and without the plugin."""
        with self._lock:
            played = self._played.get(str(conversation.state.id))
        return played.episode if played is not None else None

    def close(self) -> None:
        """End the episodes of the conversations that are being closed. Blocks."""
        for session, played in self._all():
            conversation = played.episode.conversation if played.episode is not None else None
            # The SDK closes an agent without saying for which of its conversations.
            if conversation is None or getattr(conversation, "_cleanup_initiated", True):
                self._end(session, played)

    def look(self) -> None:
        """End the episodes of conversations that have ended by themselves. Blocks."""
        for session, played in self._all():
            episode = played.episode
            if episode is None or episode.over or played.stepping or not episode.standalone:
                continue
            status = episode.status
            settled = played.seen == (status, played.steps)
            played.seen = (status, played.steps)
            if episode.conversation is None:
                self._end(session, played)
            elif settled and status in ENDED:
                episode.end()

    def _all(self) -> list[tuple[str, _Played]]:
        with self._lock:
            return list(self._played.items())

    def _end(self, session: str, played: _Played) -> None:
        if played.episode is not None:
            played.episode.end()
        with self._lock:
            self._played.pop(session, None)

    def _begin(
        self,
        conversation: LocalConversation,
        llm: LLM,
        settings: RLSettings,
        calls: SampledCalls,
        exact: bool,
        parent: tuple[ConversationEpisode, str] | None,
    ) -> _Played:
        bound = current_episode() if parent is None else None
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rl.begin"):
                if parent is not None:
                    return _Played(calls, _sub_agents(parent, conversation, llm, calls, exact))
                begun = _episode(conversation, llm, settings, calls, exact)
                if begun.standalone:
                    note_recording(conversation, begun.episode, forks=begun.sandboxed)
                return _Played(calls, begun)
        except RLError as error:
            if bound is not None:
                raise
            log.warning("openhands_rl_plugin: %s; the conversation runs without it", str(error).splitlines()[0])
            note_failure(conversation, str(error))
            return _Played(calls, None)

    def _watch(self) -> None:
        with self._lock:
            if self._watching:
                return
            self._watching = True
        atexit.register(self._end_at_exit)
        background().start(self._watched())

    async def _watched(self) -> None:
        while self._is_open():
            await asyncio.sleep(WATCH_SECONDS)
            await background().blocking(self.look)
        atexit.unregister(self._end_at_exit)

    def _is_open(self) -> bool:
        with self._lock:
            played = self._played.values()
            self._watching = any(each.episode is not None and not each.episode.over for each in played)
            return self._watching

    def _end_at_exit(self) -> None:
        for _, played in self._all():
            if played.episode is not None:
                played.episode.end_at_exit()


def _answered(played: _Played, conversation: LocalConversation) -> bool:
    """Whether the user said something after the agent had finished: the next task, not a hook's objection."""
    if played.finished_at is None:
        return False
    events = conversation.state.events
    later = (events[index] for index in range(played.finished_at, len(events)))
    return any(isinstance(event, MessageEvent) and event.source == "user" for event in later)


def _published(settings: RLSettings, base_model: str, llm: LLM) -> str | None:
    """The adapter version in use, if the server of ``[rl.serving]``, or else of the LLM, has it."""
    serving = settings.serving
    url = serving.base_url or llm.base_url
    if not url or AdapterStore(serving.adapters_directory).current(serving.adapter) is None:
        return None
    own = llm.api_key.get_secret_value() if isinstance(llm.api_key, SecretStr) else llm.api_key
    listed = listed_models(url, serving.api_key() if serving.base_url else own)
    return adapter_in_use(serving, listed, model=base_model, url=url)


def _episode(
    conversation: LocalConversation, llm: LLM, settings: RLSettings, calls: SampledCalls, exact: bool
) -> ConversationEpisode:
    episode = current_episode()
    standalone = None
    own_name = split_provider(llm.model)[1]
    base_model = settings.serving.model or own_name
    if episode is None:
        episode = standalone_episode(
            settings,
            session=str(conversation.state.id),
            instruction=last_instruction(conversation.state.events),
            base_model=base_model,
            environment_mode=False,
            served_model=_published(settings, base_model, llm),
            workspace=str(conversation.workspace.working_dir),
        )
        standalone = StandaloneRun(episode)
    own = _own_upstream(episode) if exact else None
    _check_llm(llm, own)
    return ConversationEpisode(episode, conversation, llm, calls=calls, own=own, standalone=standalone, exact=exact)


def _sub_agents(
    parent: tuple[ConversationEpisode, str], conversation: LocalConversation, llm: LLM, calls: SampledCalls, exact: bool
) -> ConversationEpisode:
    """The episode of a sub-agent, which ends with its parent's at the latest."""
    by, kind = parent
    live, spec = by.conversation, by.episode.strategy_spec
    other = split_provider(llm.model)[1] if live is not None and live.agent.llm.model != llm.model else None
    strategy = registry.build("strategies", spec.name, spec.options) if exact else type(by.episode.strategy)()
    instruction = last_instruction(conversation.state.events)
    episode = sub_agent_episode(by.episode, kind, str(conversation.state.id), instruction, strategy, other)
    own = _own_upstream(episode) if exact and other is None else None
    _check_llm(llm, own)
    run = StandaloneRun(episode) if by.standalone else RunBeside(episode, by.episode)
    made = ConversationEpisode(episode, conversation, llm, calls=calls, own=own, standalone=run, exact=exact)
    by.delegated.add(made)
    return made


def _own_upstream(episode: Session) -> Upstream | None:
    served = episode.request.served_model or episode.base_model
    return upstream_in(episode.settings, model=served, base_model=episode.base_model)


def _check_llm(llm: LLM, own: Upstream | None) -> None:
    if own is None and type(llm).completion is not LLM.completion:
        raise ConfigError(f"RLAgent needs one model for a whole episode, not a router: {type(llm).__name__}")
    if own is None and llm.uses_responses_api():
        raise ConfigError(f"{llm.model} is asked through the Responses API, which has no token ids: use another model")

"""The episodes of an agent's conversations: when one begins, and who ends it when the SDK does not say so.

What the SDK's tools for delegation make during a step of an ``RLAgent`` is an ``RLAgent``, too. Each such sub-agent has
an episode of its own, whose task names the parent's in ``data["sub_agent"]``. The tools ask ``get_agent_factory`` for a
kind of agent; what it makes is passed to ``adopt``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from openhands.sdk import AgentBase
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import MessageEvent
from openhands.sdk.llm import LLM
from openhands.sdk.subagent import get_agent_factory
from pydantic import SecretStr

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import background, bound
from openhands_rl_plugin.core.errors import ConfigError, RLError, boundary
from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.records import SUB_AGENT, sub_agents_run, trajectory_id
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.hosts.shared.litellm_calls import split_provider
from openhands_rl_plugin.hosts.shared.run_checks import adapter_in_use
from openhands_rl_plugin.hosts.shared.standalone_run import (
    RunBeside,
    StandaloneRun,
    standalone_episode,
    workspace_task,
)
from openhands_rl_plugin.hosts.v1.conversation_episode import (
    ENDED,
    ConversationEpisode,
    conversation_end,
    last_instruction,
    note_failure,
    note_recording,
    said_finish,
)
from openhands_rl_plugin.session.sampled_texts import SampledCalls
from openhands_rl_plugin.session.session import Session, current_episode
from openhands_rl_plugin.session.upstream import Upstream, upstream_in

if TYPE_CHECKING:
    from openhands_rl_plugin.hosts.v1.agent import RLAgent


_adopting: ContextVar[Callable[[AgentBase, str], AgentBase] | None] = ContextVar("rl_sub_agents", default=None)


def adopting(adopt: Callable[[AgentBase, str], AgentBase]) -> AbstractContextManager[object]:
    """Sub-agents that are made in this context are adopted: ``adopt`` makes the agent of a registered kind one whose
    completions are recorded, where it can."""
    return bound(_adopting, adopt)


def _factory_of(name: str | None = None) -> Any:
    """As ``get_agent_factory``."""
    found, adopt = get_agent_factory(name), _adopting.get()
    make, kind = found.factory_func, found.definition.name
    return found if adopt is None else found._replace(factory_func=lambda llm: adopt(make(llm), kind))


for _name in ("openhands.tools.delegate.impl", "openhands.tools.task.manager"):  # not every release has both
    with suppress(ModuleNotFoundError):
        if hasattr(_module := import_module(_name), "get_agent_factory"):
            _module.get_agent_factory = _factory_of  # type: ignore[attr-defined]


def sub_agent_episode(
    parent: Session, kind: str, session: str, instruction: str, strategy: Strategy, model: str | None
) -> Session:
    """The episode of a sub-agent, stored where the parent's is. ``model``: the served name where it is another one.

    Its run and its group are its own, because it is no sample of the parent's task. Its split is the parent's.
    """
    asked, data = parent.request, {SUB_AGENT: {"parent": trajectory_id(parent.request), "kind": kind}}
    identity = workspace_task(instruction, asked.task.id).id
    task = asked.task.model_copy(update={"id": identity, "instruction": instruction, "data": data})
    seed = zlib.crc32("\0".join((str(asked.seed), kind, instruction)).encode())
    own = {"task": task, "run_id": sub_agents_run(asked.run_id), "group_id": session, "seed": seed}
    served = asked.served_model if model is None else None
    request = asked.model_copy(update={"sample": 0, "attempt": 0, "served_model": served, **own})
    same = {name: getattr(parent, name) for name in ("strategy_spec", "environment_mode", "workspace", "token_ids")}
    return Session(request, parent.settings, strategy=strategy, base_model=model or parent.base_model, **same)


log = logging.getLogger("openhands")

WATCH_SECONDS = 1.0
"""How often open conversations are looked at; one that has ended is seen twice before its episode ends."""

_episodes: dict[str, ConversationEpisode] = {}
"""The newest of each conversation."""
_unrecorded: WeakSet[LocalConversation] = WeakSet()
"""Conversations that go on without the plugin, which failed."""
_watching = False
_lock = threading.Lock()


def begin_step(agent: RLAgent, conversation: LocalConversation) -> ConversationEpisode | None:
    """The episode of the agent's next step; ``None`` when the step is to be the stock agent's.

    When the user says something after an end, or the watch saw the end, a new episode begins. A reply is an end as
    well, but in an episode of a runner, which answers by itself.
    """
    if conversation in _unrecorded:
        return None
    session = str(conversation.state.id)
    episode, calls = _episodes.get(session), SampledCalls()
    if episode is not None:
        calls = episode.calls
        if episode.conversation is not conversation or _answered(episode, conversation):
            episode.end(episode.finished[1])
    if episode is None or episode.over:
        episode = _begin(agent, conversation, calls)
        if episode is None:
            return None
        _episodes[session] = episode
        _watch()
    episode.stepping, episode.finished = True, (None, None)
    return episode


def end_step(episode: ConversationEpisode, conversation: LocalConversation) -> None:
    """The step has ended; the conversation may have, too."""
    state = conversation.state
    if state.execution_status == Status.FINISHED and (episode.standalone or said_finish(state.events)):
        stop, _ = conversation_end(Status.FINISHED, state.events)
        episode.finished = len(state.events), stop
    episode.steps += 1
    episode.stepping = False
    if episode.failed:
        _unrecorded.add(conversation)


def episode_of(conversation: LocalConversation) -> ConversationEpisode | None:
    """The conversation's newest episode; ``None`` before its first step and without the plugin."""
    return None if conversation in _unrecorded else _episodes.get(str(conversation.state.id))


def close() -> None:
    """End the episodes of the conversations that are being closed. Blocks."""
    for session, episode in list(_episodes.items()):
        # The SDK closes an agent without saying for which of its conversations.
        if episode.conversation is None or getattr(episode.conversation, "_cleanup_initiated", True):
            episode.end()
            _episodes.pop(session, None)


def look() -> None:
    """End the episodes of conversations that have ended by themselves. Blocks."""
    for session, episode in list(_episodes.items()):
        if episode.conversation is None:
            episode.end()
            _episodes.pop(session, None)
        elif episode.standalone and not (episode.over or episode.stepping):
            now = episode.status, episode.steps
            settled, episode.seen = episode.seen == now, now
            if settled and now[0] in ENDED:
                episode.end()


def _begin(agent: RLAgent, conversation: LocalConversation, calls: SampledCalls) -> ConversationEpisode | None:
    bound = current_episode() if agent.parent is None else None
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "rl.begin"):
            begun = _episode(agent, conversation, calls)
            if begun.standalone and agent.parent is None:
                note_recording(conversation, begun.episode, forks=begun.forkable is not None)
            return begun
    except RLError as error:
        if bound is not None:
            raise
        log.warning("openhands_rl_plugin: %s; the conversation runs without it", str(error).splitlines()[0])
        note_failure(conversation, str(error))
        _unrecorded.add(conversation)
        return None


def _watch() -> None:
    global _watching
    with _lock:
        if not _watching:
            _watching = True
            background().start(_watched())


async def _watched() -> None:
    while _is_open():
        await asyncio.sleep(WATCH_SECONDS)
        await background().blocking(look)


def _is_open() -> bool:
    global _watching
    with _lock:
        _watching = any(not each.over for each in list(_episodes.values()))
        return _watching


def _answered(episode: ConversationEpisode, conversation: LocalConversation) -> bool:
    """Whether the user said something after the agent had finished: the next task, not a hook's objection."""
    at, events = episode.finished[0], conversation.state.events
    later = (events[index] for index in range(len(events) if at is None else at, len(events)))
    return any(isinstance(event, MessageEvent) and event.source == "user" for event in later)


def _published(settings: RLSettings, base_model: str, llm: LLM) -> str | None:
    """The adapter version in use, if the server of ``[rl.serving]``, or else of the LLM, has it."""
    serving = settings.serving
    own = llm.api_key.get_secret_value() if isinstance(llm.api_key, SecretStr) else llm.api_key
    url, key = (serving.base_url, serving.api_key()) if serving.base_url else (llm.base_url, own)
    return adapter_in_use(serving, model=base_model, url=url, key=key) if url else None


def _episode(agent: RLAgent, conversation: LocalConversation, calls: SampledCalls) -> ConversationEpisode:
    """The bound episode, one of its own, or that of a sub-agent, which ends with its parent's at the latest."""
    llm, exact, session, run = agent.llm, agent.replays_sampled, str(conversation.state.id), None
    named, own = split_provider(llm.model)[1], exact
    instruction = last_instruction(conversation.state.events)
    if agent.parent is not None:
        by, kind = agent.parent
        live, spec = by.conversation, by.episode.strategy_spec
        other = named if live is not None and live.agent.llm.model != llm.model else None
        own = exact and other is None
        strategy = registry.build("strategies", spec.name, spec.options) if exact else type(by.episode.strategy)()
        episode = sub_agent_episode(by.episode, kind, session, instruction, strategy, other)
        run = StandaloneRun(episode) if by.standalone else RunBeside(episode, by.episode)
    elif (episode := current_episode()) is None:
        settings = agent.settings()
        base_model = settings.serving.model or named
        episode = standalone_episode(
            settings,
            session=session,
            instruction=instruction,
            base_model=base_model,
            environment_mode=False,
            served_model=_published(settings, base_model, llm),
            workspace=str(conversation.workspace.working_dir),
        )
        run = StandaloneRun(episode)
    served = episode.request.served_model or episode.base_model
    upstream = upstream_in(episode.settings, model=served, base_model=episode.base_model) if own else None
    _check_llm(llm, upstream)
    made = ConversationEpisode(episode, conversation, llm, calls=calls, own=upstream, standalone=run, exact=exact)
    if agent.parent is not None:
        agent.parent[0].delegated.add(made)
    return made


def _check_llm(llm: LLM, own: Upstream | None) -> None:
    if own is None and type(llm).completion is not LLM.completion:
        raise ConfigError(f"RLAgent needs one model for a whole episode, not a router: {type(llm).__name__}")
    if own is None and llm.uses_responses_api():
        raise ConfigError(f"{llm.model} is asked through the Responses API, which has no token ids: use another model")

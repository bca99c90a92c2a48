"""Sub-agents of an ``RLAgent``: what the SDK's tools for delegation make of a registered kind is an ``RLAgent``, too.

The tools ask ``get_agent_factory`` for the kind. While a step of an ``RLAgent`` executes them, what the factory gives
is adopted: the same agent, with the strategy, the store and the sandbox of the one that delegates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from openhands.sdk import LLM, AgentBase
from openhands.sdk.subagent import get_agent_factory

from openhands_rl_plugin.core.concurrency import bound
from openhands_rl_plugin.hosts.v1.conversation_episode import ConversationEpisode

log = logging.getLogger("openhands")

Adopt = Callable[[AgentBase, str], AgentBase]
"""Makes the agent of a kind one whose completions are recorded, where it can."""

_ASKING = ("openhands.tools.delegate.impl", "openhands.tools.task.manager")
"""Modules that make sub-agents; not every release has both."""

_adopting: ContextVar[Adopt | None] = ContextVar("rl_sub_agents", default=None)


@dataclass(frozen=True)
class Delegation:
    """An agent is the sub-agent, of the kind ``kind``, of the one whose episode is ``by``."""

    by: ConversationEpisode
    kind: str


def adopting(adopt: Adopt) -> AbstractContextManager[object]:
    """Sub-agents that are made in this context are adopted."""
    return bound(_adopting, adopt)


def _factory_of(name: str | None = None) -> Any:
    """As ``get_agent_factory``."""
    factory, adopt = get_agent_factory(name), _adopting.get()
    if adopt is None:
        return factory

    def make(llm: LLM) -> AgentBase:
        return adopt(factory.factory_func(llm), factory.definition.name)

    return factory._replace(factory_func=make)


def _install() -> None:
    for name in _ASKING:
        try:
            module = import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "get_agent_factory"):
            module.get_agent_factory = _factory_of  # type: ignore[attr-defined]


_install()

"""Sub-agents: what the SDK's tools for delegation make during a step of an ``RLAgent`` is an ``RLAgent``, too.

Each has an episode of its own, whose task names the parent's in ``data["sub_agent"]``. The tools ask
``get_agent_factory`` for a kind of agent; what it makes is passed to ``adopt``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from openhands.sdk import AgentBase
from openhands.sdk.subagent import get_agent_factory

from openhands_rl_plugin.core.concurrency import bound
from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.records import SUB_AGENT, sub_agents_run, trajectory_id
from openhands_rl_plugin.hosts.shared.standalone_run import workspace_task
from openhands_rl_plugin.session.session import Session

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

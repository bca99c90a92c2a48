"""OpenHands' CLI 1.16 with ``RLAgent`` as its agent.

The CLI builds its agent in ``AgentStore.load_or_create`` and knows the SDK's own only; what it builds becomes an
``RLAgent`` with the same model, tools and settings.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from openhands.sdk import Agent

from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.v1.agent import as_rl_agent


def run_cli(words: Sequence[str], rl: JsonObject) -> int:
    """The CLI with the arguments ``words``; the exit code. ``rl``: the ``[rl]`` section."""
    # No dependency: the CLI pins an SDK of its own.
    store_class: Any = import_module("openhands_cli.stores").AgentStore
    build = store_class.load_or_create

    def load_or_create(store: object, *given: object, **named: object) -> Agent | None:
        agent = build(store, *given, **named)
        return None if agent is None else as_rl_agent(agent, rl)

    store_class.load_or_create = load_or_create
    sys.argv = ["openhands", *words]
    try:
        import_module("openhands_cli.entrypoint").main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0

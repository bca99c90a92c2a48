"""``RLAgent`` with the tools and the model of a user's own settings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from openhands.sdk import LLM, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool
from pydantic import ValidationError

from openhands_rl_plugin.config.work import OwnWork
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.core.validation import problems
from openhands_rl_plugin.hosts.v1.agent import RLAgent
from openhands_rl_plugin.hosts.v1.prices import price_of

log = logging.getLogger("openhands")

TERMINAL, EDITOR = TerminalTool.name, FileEditorTool.name

# What the SDK would ask of a model that it does not know, and servers of open models refuse or ignore.
_DEFAULTS: JsonObject = {"reasoning_effort": None, "usage_id": "agent"}


def make_agent(work: OwnWork, *, mcp_servers: JsonObject | None = None) -> RLAgent:
    """The agent of ``work``. ``mcp_servers``: name -> what the SDK's ``mcp_config`` says of it.

    Raises ``ConfigError`` for an ``[llm]`` that the SDK refuses.
    """
    # Early releases take any table, and read this form of it; later ones have a model of a server.
    wrapped = RLAgent.model_fields["mcp_config"].annotation == dict[str, Any]
    mcp = {"mcp_config": {"mcpServers": mcp_servers} if wrapped else mcp_servers} if mcp_servers else {}
    return RLAgent.model_validate({"llm": make_llm(work.llm), "tools": list(offered()), "rl": work.rl, **mcp})


def offered() -> Sequence[Tool]:
    """The SDK's own tools for a folder."""
    return [Tool(name=name) for name in (TERMINAL, EDITOR, TaskTrackerTool.name)]


def make_llm(section: JsonObject) -> LLM:
    """The SDK's LLM for ``[llm]``. Keys that only OpenHands V0 knows are left out, with a warning.

    Raises ``ConfigError`` for a value that the SDK refuses.
    """
    known = {key: value for key, value in section.items() if key in LLM.model_fields}
    if unknown := sorted(set(section) - set(known)):
        log.warning("openhands_rl_plugin: [llm] %s: not a setting of this OpenHands, ignored", ", ".join(unknown))
    try:
        price = price_of(str(known.get("model", "")))
        costs = {"input_cost_per_token": price, "output_cost_per_token": price}
        return LLM.model_validate({**_DEFAULTS, **costs, **known})
    except ValidationError as error:
        # Never the value: it may be a key.
        lines = (f"[llm] {at[-1] if at else ''}: {what.partition(', got ')[0]}" for at, what in problems(error, LLM))
        raise ConfigError("\n".join(lines)) from None

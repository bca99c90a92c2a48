"""The settings of an OpenHands process that no runner drives.

OpenHands drops a top-level ``[rl]`` with a warning, so the file is read once more; the warning is suppressed. The
plugin is imported before OpenHands checks the sections, with autoload as well as with a ``classpath`` line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openhands.core.config import AgentConfig, OpenHandsConfig
from openhands.core.config.arg_utils import get_headless_parser
from openhands.core.logger import openhands_logger
from pydantic import Field

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import has_settings, load_settings, settings_from_sections
from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.types import JsonObject

_MAIN_SPEC = getattr(sys.modules["__main__"], "__spec__", None)
_IN_HEADLESS_MAIN = _MAIN_SPEC is not None and _MAIN_SPEC.name == "openhands.core.main"

# The file that OpenHands reads. Absolute at once: some runtimes change the working directory of the process.
_FILE = Path(get_headless_parser().parse_known_args(None if _IN_HEADLESS_MAIN else [])[0].config_file).absolute()

openhands_logger.addFilter(lambda record: "Unknown section [rl]" not in record.getMessage())


class RLAgentHostConfig(AgentConfig):
    """``[agent.RLAgent]`` with an ``[agent.RLAgent.rl]`` table in it.

    OpenHands uses this model only where the section has a ``classpath`` line; without one it refuses the table. The
    table is checked when the agent is created: after an error here OpenHands would skip the whole section.
    """

    rl: JsonObject = Field(default_factory=dict)


def host_settings(agent_config: AgentConfig, config: OpenHandsConfig) -> RLSettings:
    """The settings of this process: ``[rl]``, overridden by ``[extended.rl]``, overridden by ``[agent.RLAgent.rl]``.

    All three are read from the file if it has any, else the latter two from OpenHands' configuration objects.
    Raises ``ConfigError``.
    """
    if _FILE.is_file() and has_settings(_FILE):
        return load_settings(_FILE)
    own = agent_config.rl if isinstance(agent_config, RLAgentHostConfig) else {}
    return settings_from_sections({"extended": config.extended.model_dump(), "agent": {"RLAgent": {"rl": own}}})


@contextmanager
def refusing() -> Iterator[None]:
    """End ``openhands.core.main``, which would print a traceback, with one line; other hosts get the error itself."""
    try:
        yield
    except RLError as error:
        if _IN_HEADLESS_MAIN:
            raise SystemExit("\n".join(f"error: {line}" for line in str(error).splitlines())) from error
        raise

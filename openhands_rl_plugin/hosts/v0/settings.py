"""The sources of the settings in an OpenHands process.

OpenHands keeps ``[extended]`` and the agent's own section, but drops a top-level ``[rl]`` with a warning that names the
file. A filter on OpenHands' logger gets the file's name from that warning. It is installed when the plugin is imported,
which is before the check, with autoload as well as with a ``classpath`` line.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import NoReturn

from openhands.core.config import AgentConfig, OpenHandsConfig
from openhands.core.config.arg_utils import get_headless_parser
from openhands.core.logger import openhands_logger
from openhands.runtime import get_runtime_cls
from pydantic import Field

from openhands_rl_plugin.config.rl import RewardSettings, RLSettings
from openhands_rl_plugin.config.toml import load_settings, settings_from_sections
from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.shared.sessions import workspace_command

_UNKNOWN_RL = re.compile(r"Unknown section \[rl\] in (?P<file>.+)")
_HEADLESS_MAIN = "openhands.core.main"
_OWN_RUNTIME = "openhands_rl_plugin.hosts.v0.runtime.WorkspaceRuntime"


class RLAgentHostConfig(AgentConfig):
    """``[agent.RLAgent]`` with an ``[agent.RLAgent.rl]`` table in it.

    OpenHands uses this model only where the section has a ``classpath`` line; without one it refuses the table. The
    table is checked when the agent is created: after an error here OpenHands would skip the whole section.
    """

    rl: JsonObject = Field(default_factory=dict)


class RLSectionFilter(logging.Filter):
    """Suppresses OpenHands' warning about ``[rl]`` and keeps the name of the file with the section."""

    def __init__(self) -> None:
        super().__init__()
        self.file: Path | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """False for that one warning."""
        if record.levelno != logging.WARNING or (match := _UNKNOWN_RL.fullmatch(record.getMessage())) is None:
            return True
        # Absolute at once: some runtimes change the working directory of the process.
        self.file = Path(match["file"]).absolute()
        return False


_seen = RLSectionFilter()


def watch_for_rl_section() -> None:
    """Install the filter. Idempotent."""
    openhands_logger.addFilter(_seen)


def host_settings(agent_config: AgentConfig, config: OpenHandsConfig) -> RLSettings:
    """The settings of this process: ``[rl]``, overridden by ``[extended.rl]``, overridden by ``[agent.RLAgent.rl]``.

    All three are read from the file when it is known, else the latter two from OpenHands' configuration objects.
    Raises ``ConfigError``.
    """
    if (file := _seen.file or _file_of_headless_main()) is not None:
        return load_settings(file)
    own = agent_config.rl if isinstance(agent_config, RLAgentHostConfig) else {}
    return settings_from_sections({"extended": config.extended.model_dump(), "agent": {"RLAgent": {"rl": own}}})


def under_headless_main() -> bool:
    """Whether this process is ``python -m openhands.core.main``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == _HEADLESS_MAIN


def _file_of_headless_main() -> Path | None:
    """The configuration file of ``python -m openhands.core.main``.

    Needed with ``LOG_LEVEL=ERROR``, when OpenHands logs no warning.
    """
    if not under_headless_main():
        return None
    arguments, _ = get_headless_parser().parse_known_args()
    file = Path(arguments.config_file).absolute()
    return file if file.is_file() else None


def refuse(error: RLError) -> NoReturn:
    """End ``openhands.core.main``, which would print a traceback, with one line; other hosts get the error itself."""
    if under_headless_main():
        raise SystemExit("\n".join(f"error: {line}" for line in str(error).splitlines())) from error
    raise error


def check_reward(reward: RewardSettings, runtime: str | None) -> None:
    """Raises ``ConfigError`` when the reward needs a command's result that this runtime cannot give.

    ``runtime``: its name or class path, as in ``[core] runtime``; ``None`` when it is not known.
    """
    asked = workspace_command(reward)
    if asked is None or not runtime or hasattr(get_runtime_cls(runtime), "check"):
        return
    raise ConfigError(
        f"[rl.reward]: `{asked.command}` judges a workspace at the end of an episode, and runtime = {runtime!r} cannot "
        f"run it there: set runtime = {_OWN_RUNTIME!r} in [core], or choose another reward"
    )

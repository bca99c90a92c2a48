"""Runs episodes with OpenHands' own controller: many sessions in one process.

Importing this module does not import OpenHands (seconds and hundreds of megabytes); a ``ControllerRunner`` does.
"""

from __future__ import annotations

import logging
import os
import uuid

from openhands_rl_plugin.core.errors import ConfigError, unknown_name
from openhands_rl_plugin.hosts.shared.host_session import HostSession
from openhands_rl_plugin.hosts.shared.options import RL_AGENT
from openhands_rl_plugin.hosts.shared.session_runner import SessionHostRunner
from openhands_rl_plugin.session.session import Session


class ControllerRunner(SessionHostRunner):
    """An ``EpisodeRunner`` over real OpenHands sessions in this process."""

    def _prepare(self) -> None:
        _quieten()
        agent = self._options.agent
        if agent == RL_AGENT:
            return
        from openhands.agenthub import Agent

        if self._options.environment_mode:
            raise ConfigError(f"{agent} works in workspaces only; environment mode needs {RL_AGENT}")
        if agent not in Agent.list_agents():
            raise ConfigError(unknown_name("agent", agent, Agent.list_agents()))

    def _session(self, episode: Session) -> HostSession:
        from openhands_rl_plugin.hosts.v0.controller_session import ControllerSession, controller_config

        config = controller_config(
            self._settings,
            self._options,
            model=episode.request.served_model,
            limits=episode.limits,
            sampling=episode.sampling_for(None, 0),
        )
        return ControllerSession(episode, self._options, f"rl-{uuid.uuid4().hex[:24]}", config)


def _quieten() -> None:
    """Prevent OpenHands' download of model prices and its log line for every step."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from openhands.core.logger import openhands_logger

    import openhands_rl_plugin.hosts.v0.agent  # registers RLAgent
    import openhands_rl_plugin.hosts.v0.controller_session  # noqa: F401  # what sessions need, in one go

    if "LOG_LEVEL" not in os.environ:
        openhands_logger.setLevel(logging.ERROR)

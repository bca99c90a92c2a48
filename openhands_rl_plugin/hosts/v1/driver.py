"""Runs episodes in conversations of the SDK: many in one process.

Importing this module does not import the SDK (seconds and hundreds of megabytes); a ``ConversationRunner`` does.
"""

from __future__ import annotations

import logging
import os

from openhands_rl_plugin.core.errors import ConfigError, unknown_name
from openhands_rl_plugin.environments.workspace.sandbox import check_bubblewrap
from openhands_rl_plugin.hosts.shared.options import RL_AGENT
from openhands_rl_plugin.hosts.shared.session_runner import HostSession, SessionHostRunner
from openhands_rl_plugin.session.session import Session

STOCK_AGENT = "Agent"


class ConversationRunner(SessionHostRunner):
    """An ``EpisodeRunner`` over real conversations of the SDK in this process, which work in workspaces."""

    def _prepare(self) -> None:
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        os.environ.setdefault("OPENHANDS_SUPPRESS_BANNER", "1")
        agent = self._options.agent
        if agent not in (RL_AGENT, STOCK_AGENT):
            raise ConfigError(unknown_name("agent of OpenHands V1", agent, [RL_AGENT, STOCK_AGENT]))
        if self._settings.workspace.isolation != "none":
            check_bubblewrap()
        if "LOG_LEVEL" not in os.environ:
            logging.getLogger("openhands").setLevel(logging.ERROR)

    def _session(self, episode: Session) -> HostSession:
        from openhands_rl_plugin.hosts.v1.conversation_session import ConversationSession

        return ConversationSession(self._settings, self._options, episode)

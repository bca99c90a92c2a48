"""Errors of a model server, as a host's client raises them, by cause."""

from __future__ import annotations

from openhands_rl_plugin.core.errors import EpisodeError, InfrastructureError, ModelError, describe

# Temporary errors: a timeout, a conflict, a request sent too early, too many requests.
_WORTH_A_RETRY = frozenset({408, 409, 425, 429})


def model_server_error(error: Exception) -> EpisodeError:
    """``ModelError`` when the server refuses the request itself (4xx), else ``InfrastructureError``."""
    status = getattr(error, "status_code", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in _WORTH_A_RETRY
    return (ModelError if refused else InfrastructureError)(describe(error))

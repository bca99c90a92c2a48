"""What a client's terminal says of a conversation that an agent server plays: a line, when its first run has ended."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import wraps
from typing import Any
from weakref import WeakSet

from openhands.sdk.conversation import RemoteConversation

from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.hosts.shared.options import RL_AGENT
from openhands_rl_plugin.hosts.v1.recording_note import KEY, RECORDED

log = logging.getLogger("openhands")

_told: WeakSet[RemoteConversation] = WeakSet()


def _tell(conversation: RemoteConversation) -> None:
    if conversation in _told:
        return
    _told.add(conversation)
    # The server may be gone; that is not for us to say.
    with suppress(CaughtFailure), boundary(FailureKind.INFRASTRUCTURE, "rl.remote"):
        said = (conversation.state.model_dump().get("agent_state") or {}).get(KEY)
        kind = type(conversation.agent).__name__
        if not isinstance(said, str):
            said = (
                f"not recorded: no step of {RL_AGENT} was played"
                if kind == RL_AGENT
                else f"not recorded: the agent is {kind}; take {RL_AGENT}, or let `openhands-rl gateway` record it"
            )
        level = logging.INFO if said.startswith(RECORDED) and ";" not in said else logging.WARNING
        log.log(level, "openhands_rl_plugin: %s", said)


def _install() -> None:
    run, close = RemoteConversation.run, RemoteConversation.close

    @wraps(run)
    def running(self: RemoteConversation, *given: Any, **named: Any) -> Any:
        ended = run(self, *given, **named)
        if named.get("blocking", given[0] if given else True):
            _tell(self)
        return ended

    @wraps(close)
    def closing(self: RemoteConversation) -> None:
        _tell(self)
        close(self)

    RemoteConversation.run, RemoteConversation.close = running, closing


_install()

"""What a conversation's own state says of its recording, to clients of an agent server, who see no log of it."""

from __future__ import annotations

import socket

from openhands.sdk.conversation import LocalConversation

from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.transcript import one_line
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.run_summary import SHORT_ID, store_name

KEY = "openhands_rl"
"""In the state's ``agent_state``."""

_LONGEST = 300
_WITHOUT_FORKS = "StandardReAct"


def note_recording(conversation: LocalConversation, episode: HostEpisode, *, forks: bool) -> None:
    """Say where an episode is stored, and of a search without ``forks`` that it has none."""
    store, short = store_name(episode.settings), trajectory_id(episode.request)[:SHORT_ID]
    strategy = episode.strategy_spec.name
    flat = "" if forks or strategy == _WITHOUT_FORKS else f'; {strategy} forks nothing: isolation = "none"'
    _note(conversation, f"recorded in {store} on {socket.gethostname()} as {short}{flat}")


def note_failure(conversation: LocalConversation, why: str) -> None:
    """Say why the conversation is not recorded from here on."""
    _note(conversation, f"not recorded: {one_line(why, _LONGEST)}")


def _note(conversation: LocalConversation, text: str) -> None:
    state = conversation.state
    state.agent_state = {**state.agent_state, KEY: text}

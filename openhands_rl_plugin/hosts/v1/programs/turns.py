"""Running a conversation in a thread, so that it can be stopped from another at once."""

from __future__ import annotations

import asyncio

from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import ActionEvent, MessageEvent

from openhands_rl_plugin.hosts.v1.endings import said_finish


def play(conversation: LocalConversation) -> None:
    """Until the agent has finished, waits for someone, or is stopped. Blocks; raises the SDK's errors.

    With an SDK that can be stopped in the middle of a completion (1.23 and newer), it can be.
    """
    if (arun := getattr(conversation, "arun", None)) is not None:
        asyncio.run(arun())
    else:
        conversation.run()


def stop(conversation: LocalConversation) -> None:
    """End ``play``, from any thread. Blocks until a step has ended where the SDK cannot do better."""
    if (interrupt := getattr(conversation, "interrupt", None)) is not None:
        interrupt()
    else:
        conversation.pause()


def was_cut(conversation: LocalConversation) -> bool:
    """Whether the conversation ended although the agent had more to do: at a limit of ``[rl]``."""
    state = conversation.state
    if state.execution_status != Status.FINISHED or said_finish(state.events):
        return False
    said = (event for event in reversed(state.events) if event.source == "agent")
    last = next((event for event in said if isinstance(event, ActionEvent | MessageEvent)), None)
    return isinstance(last, ActionEvent)

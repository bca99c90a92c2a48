"""One task in a folder, from the command line: what the agent does is printed, then what was recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from openhands.sdk import Conversation
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import ActionEvent, AgentErrorEvent, Event, ObservationEvent

from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.work import OwnWork
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.transcript import one_line
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.hosts.shared.run_summary import run_summary
from openhands_rl_plugin.hosts.v1.programs.agents import make_agent
from openhands_rl_plugin.hosts.v1.programs.shown import SAYING, answer_of, said_of, thought_of, title_of
from openhands_rl_plugin.hosts.v1.programs.turns import play, stop, was_cut

DONE, FAILED, INTERRUPTED = 0, 1, 130

_LONGEST = 200


def run_task(task: str, workspace: Path, work: OwnWork, show: Callable[[str], None]) -> int:
    """Play until the agent has finished. Returns the exit code, 130 after Ctrl-C, which ends a completion at once.

    ``show`` prints a line. Raises ``ConfigError`` for settings that the SDK refuses.
    """
    conversation = Conversation(
        agent=make_agent(work), workspace=str(workspace), visualizer=None, callbacks=[_Progress(show)]
    )
    assert isinstance(conversation, LocalConversation)
    failed: list[str] = []

    def playing() -> None:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "openhands.conversation"):
                conversation.send_message(task)
                play(conversation)
        except CaughtFailure as caught:
            failed.append(one_line(caught.failure.message, 500))

    thread = threading.Thread(target=playing, name="openhands-conversation", daemon=True)
    thread.start()
    interrupted = _wait(thread, conversation)
    status = conversation.state.execution_status
    conversation.close()
    if was_cut(conversation):
        show(f"stopped at [rl] max_turns = {work.settings.max_turns} or another limit; --max-turns raises it")
    for line in failed:
        show(f"failed: {line}")
    background().wait_for(_show_recorded(str(conversation.id), work.settings, show))
    if interrupted:
        return INTERRUPTED
    return DONE if status == Status.FINISHED and not failed else FAILED


def _wait(thread: threading.Thread, conversation: LocalConversation) -> bool:
    """Whether it was interrupted. A second interrupt does not wait for the agent."""
    try:
        thread.join()
        return False
    except KeyboardInterrupt:
        threading.Thread(target=stop, args=(conversation,), daemon=True).start()
    with suppress(KeyboardInterrupt):
        thread.join()
    return True


async def _show_recorded(session: str, settings: RLSettings, show: Callable[[str], None]) -> None:
    storage = open_storage(settings)
    try:
        async for trajectory, scores in storage.find(TrajectoryFilter(group_id=session, finished=None)):
            show(run_summary(trajectory, scores, settings))
    finally:
        await storage.close()


class _Progress:
    """Shows what is said, which tools are called, and how they fail."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def __call__(self, event: Event) -> None:
        if thought := thought_of(event):
            self._show(f"({one_line(thought, _LONGEST)})")
        if said := said_of(event):
            self._show(said)
        if isinstance(event, ActionEvent) and event.tool_name not in SAYING:
            self._show(f"[{title_of(event)}]")
        elif isinstance(event, ObservationEvent | AgentErrorEvent) and event.tool_name not in SAYING:
            answer, wrong = answer_of(event)
            if wrong:
                self._show(f"  failed: {one_line(answer, _LONGEST)}")

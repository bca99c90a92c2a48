"""One conversation of an ACP client: its prompts, what is sent of it, and who is asked."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from acp import RequestError
from acp.interfaces import Client
from acp.schema import AllowedOutcome, CurrentModeUpdate, PermissionOption
from openhands.sdk import Conversation
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.conversation.state import ConversationState
from openhands.sdk.event import ActionEvent, Event
from openhands.sdk.security.confirmation_policy import AlwaysConfirm, NeverConfirm

from openhands_rl_plugin.config.work import OwnWork
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.transcript import one_line
from openhands_rl_plugin.core.types import FailureKind, JsonObject
from openhands_rl_plugin.hosts.v1.agent import RLAgent
from openhands_rl_plugin.hosts.v1.programs.acp.names import FolderNames
from openhands_rl_plugin.hosts.v1.programs.acp.updates import Update, Updates, only_reads
from openhands_rl_plugin.hosts.v1.programs.agents import make_agent
from openhands_rl_plugin.hosts.v1.programs.turns import play, stop, was_cut

Ended = Literal["end_turn", "max_turn_requests", "cancelled"]
Mode = Literal["ask", "auto"]

ASK: Mode = "ask"
_ONCE, _ALWAYS, _NO = "once", "always", "no"
_OPTIONS = (
    PermissionOption(option_id=_ONCE, name="Allow", kind="allow_once"),
    PermissionOption(option_id=_ALWAYS, name="Allow all in this session", kind="allow_always"),
    PermissionOption(option_id=_NO, name="Reject", kind="reject_once"),
)
_REFUSED, _CANCELLED = "The user refused this call.", "The user cancelled this call."
_CODE = -32000


class EditorSession:
    """A conversation in the folder ``cwd``, kept below ``conversations``. ``id``: a new one, or that of a kept one."""

    def __init__(
        self,
        client: Client,
        work: OwnWork,
        *,
        cwd: Path,
        conversations: Path,
        mode: Mode,
        mcp_servers: JsonObject,
        id: uuid.UUID | None = None,
    ) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self.names = FolderNames(cwd, isolated=work.settings.workspace.isolation != "none")
        self._updates = Updates(self.names)
        self._outgoing: asyncio.Queue[Update] = asyncio.Queue()
        self._sending = asyncio.ensure_future(self._send())
        self._lock = asyncio.Lock()
        self._cancelled = False
        self._show = False
        made = Conversation(
            agent=make_agent(work, mcp_servers=mcp_servers),
            workspace=str(cwd),
            persistence_dir=str(conversations),
            conversation_id=id or uuid.uuid4(),
            callbacks=[self._on_event],
            visualizer=None,
        )
        assert isinstance(made, LocalConversation)
        self.conversation = made
        self.id = made.id.hex
        self.mode: Mode = mode
        self.set_mode(mode)
        self._show = True

    def set_mode(self, mode: Mode) -> None:
        """Whether commands and changes wait for the user's yes."""
        self.mode = mode
        self.conversation.set_confirmation_policy(AlwaysConfirm() if mode == ASK else NeverConfirm())

    async def prompt(self, text: str) -> Ended:
        """Play until the agent has finished. Raises ``RequestError`` in one line when the conversation fails."""
        if self._lock.locked():
            raise RequestError(_CODE, "this session has a prompt under way; cancel it first")
        async with self._lock:
            self._cancelled = False
            try:
                with boundary(FailureKind.INFRASTRUCTURE, "openhands.conversation"):
                    return await self._play(text)
            except CaughtFailure as caught:
                raise RequestError(_CODE, one_line(caught.failure.message, 500)) from caught
            finally:
                await self._outgoing.join()

    async def cancel(self) -> None:
        """End the prompt that is under way; its completion is not waited for."""
        self._cancelled = True
        await background_call(lambda: stop(self.conversation))

    async def replay(self) -> None:
        """Send what the conversation was so far."""
        for event in self.conversation.state.events:
            for update in self._updates.of(event, replayed=True):
                self._outgoing.put_nowait(update)
        await self._outgoing.join()

    async def close(self) -> None:
        """Close the conversation, which ends its episode."""
        if self._lock.locked():
            await self.cancel()
            async with self._lock:
                pass
        await background_call(self.conversation.close)
        self._sending.cancel()

    async def _play(self, text: str) -> Ended:
        await background_call(lambda: self.conversation.send_message(text))
        while not self._cancelled:
            await background_call(lambda: play(self.conversation))
            status = self.conversation.state.execution_status
            if self._cancelled or status != Status.WAITING_FOR_CONFIRMATION:
                break
            if refused := await self._refused():
                await background_call(partial(self.conversation.reject_pending_actions, refused))
        if self._cancelled:
            return "cancelled"
        await background_call(self._end_episode)
        return "max_turn_requests" if was_cut(self.conversation) else "end_turn"

    def _end_episode(self) -> None:
        """A turn of the protocol is over, also when its last words were a question: who knows when it is answered."""
        agent = self.conversation.agent
        if isinstance(agent, RLAgent) and (episode := agent.episode_of(self.conversation)) is not None:
            episode.end()

    async def _refused(self) -> str:
        """Why the calls that wait must not be executed; empty when they may."""
        waiting = ConversationState.get_unmatched_actions(self.conversation.state.events)
        await self._outgoing.join()
        for action in waiting:
            if only_reads(action):
                continue
            if self._cancelled:
                return _CANCELLED
            chosen = await self._asked(action)
            if chosen == _ALWAYS:
                self.set_mode("auto")
                told = CurrentModeUpdate(session_update="current_mode_update", current_mode_id=self.mode)
                self._outgoing.put_nowait(told)
                return ""
            if chosen != _ONCE:
                return _REFUSED if chosen == _NO else _CANCELLED
        return ""

    async def _asked(self, action: ActionEvent) -> str:
        answer = await self._client.request_permission(
            session_id=self.id, tool_call=self._updates.asked_about(action), options=list(_OPTIONS)
        )
        if isinstance(answer.outcome, AllowedOutcome):
            return answer.outcome.option_id
        self._cancelled = True
        return ""

    def _on_event(self, event: Event) -> None:
        """Called in the conversation's thread."""
        if self._show:
            for update in self._updates.of(event):
                self._loop.call_soon_threadsafe(self._outgoing.put_nowait, update)

    async def _send(self) -> None:
        while True:
            update = await self._outgoing.get()
            try:
                await self._client.session_update(session_id=self.id, update=update)
            finally:
                self._outgoing.task_done()


async def background_call(call: Callable[[], None]) -> None:
    """Run ``call`` in a thread of its own."""
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(background().blocking(call), background().loop))

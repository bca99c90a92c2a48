"""The ACP server: what a client may ask, and the sessions that it has."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import acp
from acp import PROTOCOL_VERSION, RequestError
from acp.interfaces import Client
from acp.schema import (
    AgentCapabilities,
    AuthenticateResponse,
    EmbeddedResourceContentBlock,
    HttpMcpServer,
    Implementation,
    InitializeResponse,
    LoadSessionResponse,
    McpCapabilities,
    McpServerStdio,
    NewSessionResponse,
    PromptCapabilities,
    PromptResponse,
    ResourceContentBlock,
    SessionMode,
    SessionModeState,
    SetSessionModeResponse,
    SseMcpServer,
    TextContentBlock,
    TextResourceContents,
)
from pydantic import ValidationError

from openhands_rl_plugin.config.work import OwnWork
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.transcript import one_line
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.v1.programs.acp.names import FolderNames
from openhands_rl_plugin.hosts.v1.programs.acp.session import EditorSession, Mode

_STATE_FILE = "base_state.json"
_MODES: dict[Mode, SessionMode] = {
    "ask": SessionMode(id="ask", name="Ask", description="Commands and changes of files wait for your yes"),
    "auto": SessionMode(id="auto", name="Auto", description="Nothing is asked"),
}


def serve(work: OwnWork, *, output: int, conversations: Path, permissions: Mode) -> int:
    """Until standard input ends or the process is told to; the exit code. ``output`` is a file descriptor."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger().addFilter(_is_not_answered)
    return asyncio.run(_serve(RLAgentServer(work, conversations=conversations, mode=permissions), output))


def _is_not_answered(record: logging.LogRecord) -> bool:
    """Whether the client has not been told it as its request's error; the protocol package before 0.11 logs these."""
    return not (record.exc_info and isinstance(record.exc_info[1], RequestError))


async def _serve(server: RLAgentServer, output: int) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    reader = asyncio.StreamReader(limit=acp.core.DEFAULT_STDIO_BUFFER_LIMIT_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(output, "wb"))
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    with suppress(asyncio.CancelledError):
        await acp.run_agent(cast(acp.Agent, server), writer, reader)
    await server.close()
    return 0


class RLAgentServer:
    """Sessions of ``RLAgent`` with the model and the settings of ``work``.

    The methods of ``acp.Agent`` that are offered; the package gives all arguments by name, newer versions more.
    """

    def __init__(self, work: OwnWork, *, conversations: Path, mode: Mode) -> None:
        self._work = work
        self._conversations = conversations
        self._mode: Mode = mode
        self._sessions: dict[str, EditorSession] = {}
        self._client: Client | None = None

    def on_connect(self, conn: Client) -> None:
        """Called by the package with the client."""
        self._client = conn

    async def initialize(self, protocol_version: int, **more: Any) -> InitializeResponse:
        """Says what is offered. A client of another version is told which one is spoken here, and decides."""
        if protocol_version != PROTOCOL_VERSION:
            print(
                f"error: the client speaks version {protocol_version} of the Agent Client Protocol, this agent "
                f"{PROTOCOL_VERSION}; use a client for that version, or another agent-client-protocol",
                file=sys.stderr,
                flush=True,
            )
        return InitializeResponse(
            protocol_version=PROTOCOL_VERSION,
            agent_capabilities=AgentCapabilities(
                load_session=True,
                prompt_capabilities=PromptCapabilities(embedded_context=True),
                mcp_capabilities=McpCapabilities(http=True, sse=True),
            ),
            agent_info=Implementation(
                name="openhands-rl", title="RLAgent (OpenHands)", version=version("openhands_rl_plugin")
            ),
            auth_methods=[],
        )

    async def authenticate(self, method_id: str, **more: Any) -> AuthenticateResponse:
        """Nothing to do: the key of the model is in the settings."""
        return AuthenticateResponse()

    async def new_session(self, cwd: str, mcp_servers: list[Any] | None = None, **more: Any) -> NewSessionResponse:
        """A new conversation in the folder ``cwd``."""
        session = self._open(cwd, mcp_servers, None)
        return NewSessionResponse(session_id=session.id, modes=_modes(session.mode))

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: list[Any] | None = None, **more: Any
    ) -> LoadSessionResponse:
        """Go on with a kept conversation; what was said is sent first."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._open(cwd, mcp_servers, self._kept(session_id))
        try:
            await session.replay()
        except (ValueError, KeyError) as error:
            await self._sessions.pop(session.id).close()
            raise RequestError(-32000, _cause(error, session_id)) from error
        return LoadSessionResponse(modes=_modes(session.mode))

    async def set_session_mode(self, mode_id: str, session_id: str, **more: Any) -> SetSessionModeResponse:
        """``ask`` or ``auto``."""
        if mode_id != "ask" and mode_id != "auto":
            raise RequestError(-32602, f"no mode is called {mode_id!r}; there are {', '.join(_MODES)}")
        self._session(session_id).set_mode(mode_id)
        return SetSessionModeResponse()

    async def prompt(self, prompt: list[Any], session_id: str, **more: Any) -> PromptResponse:
        """Let the agent work on what the user says."""
        session = self._session(session_id)
        return PromptResponse(stop_reason=await session.prompt(_text(prompt, session.names)))

    async def cancel(self, session_id: str, **more: Any) -> None:
        """End the prompt that is under way."""
        if (session := self._sessions.get(session_id)) is not None:
            await session.cancel()

    async def close(self) -> None:
        """Close all conversations, which ends their episodes."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))

    def _open(self, cwd: str, mcp_servers: list[Any] | None, id: uuid.UUID | None) -> EditorSession:
        folder = Path(cwd)
        if not folder.is_absolute() or not folder.is_dir():
            raise RequestError(-32602, f"cwd: {cwd} is not the absolute path of a folder")
        assert self._client is not None
        try:
            session = EditorSession(
                self._client,
                self._work,
                cwd=folder,
                conversations=self._conversations,
                mode=self._mode,
                mcp_servers=_mcp(mcp_servers or ()),
                id=id,
            )
        except (ConfigError, ValueError, KeyError) as error:
            raise RequestError(-32000, _cause(error, id.hex if id is not None else None)) from error
        self._sessions[session.id] = session
        return session

    def _kept(self, session_id: str) -> uuid.UUID:
        try:
            id = uuid.UUID(session_id)
        except ValueError as error:
            raise RequestError(-32002, f"no session is called {session_id!r}") from error
        if not (self._conversations / id.hex / _STATE_FILE).is_file():
            raise RequestError(-32002, f"no session {session_id} is kept in {self._conversations}; begin a new one")
        return id

    def _session(self, session_id: str) -> EditorSession:
        if (session := self._sessions.get(session_id)) is None:
            raise RequestError(-32002, f"no session {session_id} is open; session/load opens a kept one")
        return session


def _cause(error: Exception, session_id: str | None) -> str:
    """In one line, why a session cannot be opened; ``session_id``: of a kept one."""
    said = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
    line = one_line(said.splitlines()[0], 300)
    return line if session_id is None else f"session {session_id} cannot be loaded, begin a new one: {line}"


def _modes(current: Mode) -> SessionModeState:
    return SessionModeState(current_mode_id=current, available_modes=list(_MODES.values()))


def _text(blocks: list[Any], names: FolderNames) -> str:
    """What the user says; a file that is mentioned is named, one that is embedded is shown."""
    parts = []
    for block in blocks:
        if isinstance(block, TextContentBlock):
            parts.append(names.heard(block.text))
        elif isinstance(block, ResourceContentBlock):
            parts.append(names.of_uri(block.uri))
        elif isinstance(block, EmbeddedResourceContentBlock) and isinstance(block.resource, TextResourceContents):
            parts.append(f"{names.of_uri(block.resource.uri)}\n```\n{block.resource.text}\n```")
        else:
            raise RequestError(-32602, "this agent reads text, links and embedded text only")
    return "\n".join(parts)


def _mcp(servers: Any) -> JsonObject:
    """The client's MCP servers as the SDK's ``mcp_config`` has them."""
    found: JsonObject = {}
    for each in servers:
        if isinstance(each, McpServerStdio):
            found[each.name] = {
                "command": each.command,
                "args": list(each.args),
                "env": {one.name: one.value for one in each.env},
            }
        elif isinstance(each, HttpMcpServer | SseMcpServer):
            headers: JsonObject = {one.name: one.value for one in each.headers}
            found[each.name] = {"url": each.url, "transport": each.type, "headers": headers}
    return found

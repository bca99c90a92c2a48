"""The sessions of a gateway: named, opened, stored request by request, and ended when they are idle.

A bounded number is held in memory. The least recently used one is evicted, and reloaded from the storage when it is
needed. The sessions of an earlier gateway that was killed are reloaded in the same way.

The first of these that is present is the name of a request's session:

1. the path: ``/session/<name>/v1/chat/completions``, set by the user as the ``base_url``;
2. the header ``x-litellm-session-id``, which OpenHands' SDK sends with every request of a conversation, or
   ``x-claude-code-session-id``;
3. ``prompt_cache_key`` in the body, which Codex and older SDKs send;
4. ``session_id`` in the body's ``metadata`` or ``litellm_metadata``, or in their ``user_id``, where Claude Code has it,
   or ``litellm_session_id`` beside them;
5. a digest of the client's address and user agent, and of all messages up to the first user message.

By the last rule, conversations with the same first messages share a session and are branches of one tree. It is all
that is left for OpenHands' SDK before 1.18.1, which sends no id. From then on it sends the id of the conversation as
``prompt_cache_key``, and from 1.30 also in the header, which alone arrives with models ``litellm_proxy/...`` of 1.58.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from openhands_rl_plugin.core.messages import WireMessage, text_of
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectorySummary, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, JsonObject, StopReason
from openhands_rl_plugin.rollout.journal import stored_episode
from openhands_rl_plugin.session.client_episode import ENVIRONMENT, RECORDED, ClientSession, request_of
from openhands_rl_plugin.session.replies import ErrorReply, error_reply
from openhands_rl_plugin.session.token_id_text import Json, parse_object

HEADERS = ("x-litellm-session-id", "x-claude-code-session-id")
_IN_USER_ID = "_session_"
LONGEST = 200
OPENING = "opening"
MOST_IN_MEMORY, MOST_OPEN = 256, 100_000


class SessionName(NamedTuple):
    """The name of a session, and which of the rules gave it."""

    name: str
    named_by: Literal["path", "header", "prompt_cache_key", "metadata", "opening", "response"]


def session_name(
    path_name: str, client: str, headers: Mapping[str, str], document: Json, messages: Sequence[WireMessage]
) -> SessionName:
    """The name of the session. ``path_name``: from the path, or empty; ``client``: the client's address."""
    if name := named_session(path_name, headers):
        return SessionName(name, "path" if _name(path_name) else "header")
    if name := _name(document.get("prompt_cache_key")):
        return SessionName(name, "prompt_cache_key")
    if name := _from_metadata(document):
        return SessionName(name, "metadata")
    return SessionName(_from_opening(client, headers, messages), OPENING)


def named_session(path_name: str, headers: Mapping[str, str]) -> str:
    """The name in the path or in a header; empty without one."""
    return _name(path_name) or next(filter(None, (_name(headers.get(name)) for name in HEADERS)), "")


def _name(given: Any) -> str:
    """A printable name; one longer than ``LONGEST`` is replaced by its digest."""
    if not isinstance(given, str) or not given.strip():
        return ""
    name = "".join(each if each.isprintable() else "?" for each in given.strip())
    return name if len(name) <= LONGEST else hashlib.sha256(name.encode()).hexdigest()


def _from_metadata(document: Json) -> str:
    for place in ("metadata", "litellm_metadata"):
        metadata = document.get(place)
        metadata = metadata if isinstance(metadata, dict) else {}
        if name := _name(metadata.get("session_id")) or _from_user(metadata.get("user_id")):
            return name
    return _name(document.get("litellm_session_id"))


def _from_user(user: Any) -> str:
    """The session in Claude Code's ``user_id``: ``user_<id>_account_<id>_session_<id>``, or an object with its id."""
    if not isinstance(user, str):
        return ""
    told = parse_object(user.encode("utf-8", "replace"))
    return _name(told.get("session_id") if told is not None else user.partition(_IN_USER_ID)[2])


def _from_opening(client: str, headers: Mapping[str, str], messages: Sequence[WireMessage]) -> str:
    digest = hashlib.sha256(f"{client}\0{headers.get('user-agent', '')}".encode())
    for message in messages:
        digest.update(f"\0{message['role']}\0{text_of(message.get('content')) or ''}".encode("utf-8", "replace"))
        if message["role"] == "user":
            break
    return f"opening-{digest.hexdigest()[:24]}"


class SessionPool:
    """Sessions by name; ``record`` makes one without a strategy.

    ``idle`` is in seconds; ``MOST_IN_MEMORY`` are in memory, ``MOST_OPEN`` have not ended.
    """

    def __init__(
        self,
        storage: TrajectoryStorage,
        record: Callable[[EpisodeRequest], ClientSession],
        *,
        run_id: str,
        idle: float,
    ) -> None:
        self._storage = storage
        self._run_id = run_id
        self._record = record
        self._idle = idle
        self._active: OrderedDict[str, ClientSession] = OrderedDict()
        self._evicted: dict[str, float] = {}
        # Serialises loading, evicting and ending, so that no two objects write to one episode.
        self._lock = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._active)

    async def start(self) -> None:
        """Find the sessions that an earlier gateway of this run left open. Raises ``StorageError``."""
        # Drops no real episode; it fails at the start when the storage cannot be written.
        await self._storage.drop((trajectory_id(request_of(self._run_id, "")),))
        where = TrajectoryFilter(run_id=self._run_id, environment=ENVIRONMENT, finished=False)
        async for left in self._storage.summaries(where):
            self._evicted[left.task_id] = left.times.finished
            if left.strategy != RECORDED.name:  # it ended with the gateway that searched
                await self.end(left.task_id, StopReason.NO_ACTION, {"ended_by": "shutdown"})

    async def open(self, name: str) -> ClientSession:
        """The session of that name, loaded or created. Raises ``StorageError`` and ``ErrorReply``."""
        session = self._active.get(name)
        if session is None:
            if name not in self._evicted:
                self._check_room()
            async with self._lock:
                session = self._active.get(name) or await self._load(name)
                self._evict(but=name)
        self._active.move_to_end(name)
        session.last_used = time.time()
        return session

    async def create(self, name: str, make: Callable[[EpisodeRequest], ClientSession]) -> None:
        """Open a session that a strategy decides. Raises what ``make`` raises, ``StorageError`` and ``ErrorReply``."""
        async with self._lock:
            part, last = await self._parts(name)
            if name in self._active or (last is not None and last.stop is StopReason.UNFINISHED):
                message = f"The session {name!r} is open: end it, or name another."
                raise ErrorReply(error_reply(409, message, "ConflictError"))
            self._check_room()
            self._active[name] = make(request_of(self._run_id, name, part))

    async def end(self, name: str, stop: StopReason, evidence: JsonObject) -> tuple[str | None, bool]:
        """End a session after its requests in flight. Returns the id of its episode, ``None`` if it has none, and
        whether it was open: else the episode is the last of that name."""
        # Outside the lock: a request may take minutes and must not block other sessions.
        if (session := self._active.get(name)) is not None:
            await session.pending.settle()
        async with self._lock:
            if name not in self._active:
                _, last = await self._parts(name)
                if last is None or last.stop is not StopReason.UNFINISHED:
                    return last and last.id, False
            session = self._active.get(name) or await self._load(name)
            return await self._close(session, stop, evidence), True

    async def end_idle(self) -> None:
        """End all sessions without a request for ``idle`` seconds. Raises ``StorageError``."""
        for name in (*self._active, *self._evicted):
            async with self._lock:
                session = self._active.get(name)
                last_used = session.last_used if session is not None else self._evicted.get(name, time.time())
                if time.time() - last_used < self._idle or (session is not None and session.pending.busy):
                    continue
                session = session or await self._load(name)
                # Another gateway may have continued it.
                if time.time() - session.last_used >= self._idle:
                    await self._close(session, StopReason.NO_ACTION, {"ended_by": "idle"})

    async def close(self, timeout: float) -> None:
        """End every session; requests in flight get ``timeout`` seconds. Raises ``StorageError``."""
        await asyncio.gather(*(session.pending.settle(timeout) for session in self._active.values()))
        for name in (*self._active, *self._evicted):
            async with self._lock:
                session = self._active.get(name) or await self._load(name)
                await self._close(session, StopReason.NO_ACTION, {"ended_by": "shutdown"})

    def _check_room(self) -> None:
        if (many := len(self._active) + len(self._evicted)) >= MOST_OPEN:
            message = f"{many} sessions are open: end some (/session/NAME/end) or retry later."
            raise ErrorReply(error_reply(429, message, "RateLimitError", {"retry-after": "60"}))

    async def _load(self, name: str) -> ClientSession:
        part, last = await self._parts(name)
        goes_on = last is not None and last.stop is StopReason.UNFINISHED
        request = request_of(self._run_id, name, part - goes_on)
        session = self._record(request)
        if goes_on and (stored := await stored_episode(self._storage, trajectory_id(request))) is not None:
            session.continue_after(stored)
        self._active[name] = session
        self._evicted.pop(name, None)
        return session

    async def _parts(self, name: str) -> tuple[int, TrajectorySummary | None]:
        """How many episodes have that name, and the last of them."""
        part, last = 0, None
        while True:
            where = TrajectoryFilter(ids=(trajectory_id(request_of(self._run_id, name, part)),), finished=None)
            found = [each async for each in self._storage.summaries(where)]
            if not found:
                return part, last
            part, last = part + 1, found[0]

    def _evict(self, *, but: str) -> None:
        unused = [name for name, each in self._active.items() if name != but and not each.is_held]
        for name in unused[: max(0, len(self._active) - MOST_IN_MEMORY)]:
            self._evicted[name] = self._active.pop(name).last_used

    async def _close(self, session: ClientSession, stop: StopReason, evidence: JsonObject) -> str | None:
        # It is forgotten, so that an end that fails is tried again.
        self._evicted[session.name] = self._active.pop(session.name).last_used
        await session.pending.settle()
        ended = await session.close(stop, evidence)
        self._evicted.pop(session.name)
        return ended

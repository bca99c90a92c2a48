"""The sessions of clients over HTTP: named, followed, stored request by request, and ended when they are idle.

The tree of a session follows the client's conversation. Without a strategy the server's completion is passed on
unchanged, and recorded. A strategy chooses among several completions; no environment is forked. The next prompt
shows what it executed, condensed or left out.

Side requests (a summary of the history, a title) are recorded apart from the turns of the episode. Clients do not mark
them. A request is a side request if it starts a separate conversation without tools, and the session has tools, now or
later. It is a condensation if a rewritten history quotes its completion and no later prompt continues it.

A request's session is named by the first of these that is present:

1. the path: ``/session/<name>/v1/chat/completions``, set by the user as the ``base_url``;
2. the header ``x-litellm-session-id``, which OpenHands' SDK sends with every request of a conversation, or
   ``x-claude-code-session-id``;
3. ``prompt_cache_key`` in the body, which Codex and older SDKs send;
4. a digest of the client's address and user agent, and of all messages up to the first user message.

By the last rule, conversations with the same first messages share a session and are branches of one tree. OpenHands'
SDK before 1.18.1 sends no id, so only this rule names its sessions. Later releases send the conversation's id as
``prompt_cache_key``, and from 1.30 also in the header. With models ``litellm_proxy/...`` 1.58 sends only the header.

A request is a retry when a byte-identical one of the same session is in flight or was the last one answered, and

- its header ``x-stainless-retry-count`` is above 0 (OpenAI's client); or
- all clients of the first request have disconnected, or its response was not delivered.

Other identical requests are separate samples, for example when a client sends several requests at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from openhands_rl_plugin.config.build import make_strategy, strategy_spec
from openhands_rl_plugin.config.rl import HttpUrl, RLSettings, SafeName, VariableName
from openhands_rl_plugin.core.concurrency import background, on_loop
from openhands_rl_plugin.core.errors import RLError, StorageError
from openhands_rl_plugin.core.messages import WireMessage, equals, recorded_parameters, text_of, to_message
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectorySummary, trajectory_id
from openhands_rl_plugin.core.servers import API_KEY, AccessRules, required_key
from openhands_rl_plugin.core.tree import squeezed
from openhands_rl_plugin.core.types import (
    CONDENSATION,
    KIND,
    SIDE,
    TURN,
    EpisodeRequest,
    JsonObject,
    Limits,
    PolicyRef,
    SamplingParams,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Trajectory,
    kind_of,
    path_to,
)
from openhands_rl_plugin.models.engines.client import note_missing, with_version
from openhands_rl_plugin.models.engines.openai_wire import ChatAnswer, Json
from openhands_rl_plugin.rollout.episode import on_its_loop, stored_episode
from openhands_rl_plugin.rollout.strategies.base import SearchStrategy, StandardReActStrategy
from openhands_rl_plugin.session.session import Session, Upstream
from openhands_rl_plugin.session.wire import CHAT, ClientRequest

HEADERS = ("x-litellm-session-id", "x-claude-code-session-id")
LONGEST = 200
OPENING = "opening-"
"""The prefix of session names that are digests, because the client sends no id."""
TOOLS = "tools"
"""Metadata key of a sampled node: the tools of its request, if they differ from the session's."""


class GatewayConfig(BaseModel):
    """The gateway's address, its model server and its limits.

    ``[rl.serving]`` has the model server's key (without one the client's is forwarded), its base model, and the folder
    of adapters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    upstream: Annotated[HttpUrl, AfterValidator(with_version)] = Field(
        min_length=1, description="base URL of the model server, such as http://127.0.0.1:8100/v1"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on; any but loopback needs a key")
    port: int = Field(default=8200, ge=0, le=65535, description="0 takes a free port")
    api_key_env: VariableName = Field(
        default=API_KEY,
        description="environment variable with the API key that clients must send; unset: no key is required",
    )
    run_id: str = Field(
        default="gateway",
        min_length=1,
        max_length=200,
        description="run that the episodes belong to; one gateway per run",
    )
    adapter: SafeName | None = Field(
        default=None, description="requests for 'latest' and for this name are routed to the adapter's current version"
    )
    idle_minutes: float = Field(default=60.0, gt=0, description="minutes without requests after which a session ends")
    max_body_bytes: int = Field(default=64 * 1024**2, ge=1024, description="maximum size of a request in bytes")
    timeout: float = Field(
        default=600.0, gt=0, description="seconds for one answer of the model server, to its last byte"
    )
    restore_calls: bool = Field(
        default=False,
        description="send tool calls that a client rewrote (OpenHands V1) to the model server as they were sampled, "
        "so that every prompt extends the one before; calls are matched by id",
    )

    def access(self) -> AccessRules:
        """The rules of access. Raises ``ConfigError`` when a network address has no key."""
        return AccessRules(required_key(self.host, self.api_key_env, protects="the model server"))


def session_name(
    path_name: str, client: str, headers: Mapping[str, str], document: Json, messages: Sequence[WireMessage]
) -> str:
    """The name of a request's session. ``path_name``: from the path, or empty; ``client``: the client's address."""
    known = named_session(path_name, headers) or _name(document.get("prompt_cache_key"))
    return known or _from_opening(client, headers, messages)


def named_session(path_name: str, headers: Mapping[str, str]) -> str:
    """The name in the path or in a header; empty without one."""
    return _name(path_name) or next(filter(None, (_name(headers.get(name)) for name in HEADERS)), "")


def _name(given: Any) -> str:
    """A printable name; one longer than ``LONGEST`` is replaced by its digest."""
    if not isinstance(given, str) or not given.strip():
        return ""
    name = "".join(each if each.isprintable() else "?" for each in given.strip())
    return name if len(name) <= LONGEST else hashlib.sha256(name.encode()).hexdigest()


def _from_opening(client: str, headers: Mapping[str, str], messages: Sequence[WireMessage]) -> str:
    digest = hashlib.sha256(f"{client}\0{headers.get('user-agent', '')}".encode())
    for message in messages:
        digest.update(f"\0{message['role']}\0{text_of(message.get('content')) or ''}".encode("utf-8", "replace"))
        if message["role"] == "user":
            break
    return f"{OPENING}{digest.hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete response. ``recorded``: its content is stored, so a retry may get the same reply."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = False


class ErrorReply(RLError):
    """An error that the gateway itself returns for a request; ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class PendingCall:
    """A request to the model server. Any number of clients read the events of its response, each from the start.

    ``left``: for each client a future that is done when it has disconnected. ``headers``: of a streamed response.
    """

    digest: tuple[str, int, int]
    left: list[asyncio.Future[Any]]
    task: asyncio.Task[Reply] = field(init=False)
    delivered: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    _parts: list[bytes] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def begun(self) -> bool:
        """Whether an event has arrived."""
        return bool(self._parts)

    def add(self, part: bytes) -> None:
        """Append bytes for the clients."""
        if part:
            self._parts.append(part)
            self.wake()

    async def parts(self, silence: float | None, filler: bytes) -> AsyncIterator[bytes]:
        """Yield all events until the task is done, and ``filler`` after ``silence`` seconds without one."""
        read = 0
        while True:
            more = self._more
            if new := b"".join(self._parts[read:]):
                read = len(self._parts)
                yield new
            elif self.task.done():
                return
            else:
                try:
                    async with asyncio.timeout(silence):
                        await more.wait()
                except TimeoutError:
                    yield filler

    def is_retried_by(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with the same body repeats this one."""
        count = headers.get("x-stainless-retry-count", "")
        if count.isascii() and count.isdecimal() and count.strip("0"):
            return True
        return not self.delivered if self.task.done() else all(left.done() for left in self.left)

    def wake(self) -> None:
        """Wake the readers: there is something to read, or the task is done."""
        # A new event each time: it wakes those that wait for the old one, and need not be cleared.
        woken, self._more = self._more, asyncio.Event()
        woken.set()


ENVIRONMENT = "gateway"
RECORDED = StrategySpec(name="gateway")
"""The strategy of a session that only records."""


class OpenRequest(BaseModel):
    """Body of ``POST /session``. ``session``: its name, by default a new one. ``limits``: fields of ``Limits``.

    ``[rl]`` gives the other limits, and ``strategy`` and ``sampling`` if the body has none.
    """

    model_config = ConfigDict(extra="forbid")

    session: str = Field(default="", max_length=200)
    task: str = ""
    strategy: StrategySpec | None = None
    limits: Annotated[JsonObject, Field(default_factory=dict)]
    sampling: SamplingParams = SamplingParams()
    seed: int = Field(default=0, ge=0, lt=2**31)


class ClientSession(Session):
    """A session of a client over HTTP.

    With ``opened``, a strategy chooses the completions; without, they are only recorded.

    ``pending``: its requests in flight. ``last_used`` is a Unix time in seconds.
    """

    def __init__(
        self,
        storage: TrajectoryStorage,
        request: EpisodeRequest,
        settings: RLSettings,
        config: GatewayConfig,
        opened: OpenRequest | None = None,
    ) -> None:
        """Raises ``ConfigError`` and ``ValidationError`` for a strategy or limits that do not exist."""
        strategy, spec = StandardReActStrategy(), RECORDED
        if opened is not None:
            spec = opened.strategy or strategy_spec(settings)
            known = settings.model_dump(exclude_unset=True)
            settings = RLSettings.model_validate({**known, "rollout_strategy": spec.name, "strategy": spec.options})
            most = settings.limits().model_dump() | {"max_prompt_length": None} | opened.limits
            task = request.task.model_copy(update={"instruction": opened.task, "limits": Limits.model_validate(most)})
            request = request.model_copy(update={"task": task, "sampling": opened.sampling, "seed": opened.seed})
            strategy = make_strategy(settings)
            if isinstance(strategy, SearchStrategy):
                strategy.check_world(None)
        super().__init__(
            request,
            settings,
            strategy=strategy,
            strategy_spec=spec,
            base_model=settings.serving.model,
            environment_mode=True,
            strict=True,
        )
        self.is_searched = opened is not None
        self.last_used = time.time()
        self.pending: list[PendingCall] = []
        self._last: PendingCall | None = None
        self.exact = config.restore_calls or self.is_searched
        self._storage = storage

    @property
    def name(self) -> str:
        return self.request.task.id

    def join(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        left: asyncio.Future[Any],
        ask: Callable[[PendingCall], Coroutine[Any, Any, Reply]],
    ) -> PendingCall:
        """Return the call for this request: the earlier one if it is a retry, else a new one that runs ``ask``."""
        # ``hash`` has a new key in every process; unlike hashlib, it does not release the GIL.
        digest = (path, len(body), hash(body))
        for call in (*self.pending, *([self._last] if self._last else ())):
            if call.digest == digest and call.is_retried_by(headers):
                call.left += [] if call.task.done() else [left]
                return call
        if self._last is not None and self._last.digest == digest:
            self._last = None  # a later retry belongs to the call that starts now
        call = PendingCall(digest, [left])
        self.pending.append(call)
        call.task = asyncio.create_task(ask(call))
        call.task.add_done_callback(lambda task: self._finish(call, task))
        return call

    async def settle(self, timeout: float | None = None) -> None:
        """Wait for the calls in flight; cancel those that take longer than ``timeout`` seconds."""
        while self.pending:
            _, late = await asyncio.wait([call.task for call in self.pending], timeout=timeout)
            for task in late:
                task.cancel()
            await asyncio.sleep(0)

    def _finish(self, call: PendingCall, task: asyncio.Task[Reply]) -> None:
        self.pending.remove(call)
        call.left.clear()  # each keeps its whole request in memory
        if not task.cancelled() and task.exception() is None and task.result().recorded:
            self._last = call
        call.wake()

    def continue_after(self, stored: Trajectory) -> None:
        """Resume the episode that an earlier gateway stored. Raises ``StorageError``."""
        self.request = self.request.model_copy(update={"task": stored.task})
        self.policy, self.strategy_spec = stored.policy, stored.strategy
        if not self.resume(stored, on_its_loop(self._storage, asyncio.get_running_loop())):
            raise StorageError(f"the stored episode {stored.id} was not recorded by a gateway")
        self.follow_tree()
        self.last_used = stored.times.finished

    def as_sampled(self, prompt: Sequence[WireMessage]) -> list[WireMessage]:
        """The prompt, with each completion that the tree has in the form in which it was sampled."""
        path, known = self.conversation.common(prompt)
        return [*self.texts.put_back(prompt[:known], path), *prompt[known:]]

    def policy_of(self, served: str) -> PolicyRef:
        """As ``Session.policy_of``. The server's model may differ from ``base_model``."""
        policy = super().policy_of(served)
        return policy if policy.adapter is not None else PolicyRef(base_model=served)

    async def record(self, call: ClientRequest, answer: ChatAnswer) -> list[str]:
        """Store a response with the new messages of its prompt. After a ``StorageError`` the next call stores it too.

        Returns a cause for each completion without token ids or logprobs.
        """
        latency, parameters = round(time.perf_counter() - call.started, 4), recorded_parameters(call.settings)
        served = answer.model or call.model
        self._begin(call, served)
        tree, tools = self.tree, self.tree.tools
        if aside := self._is_aside(call):
            rewritten, parent = False, tree.add_side_prompt([to_message(message) for message in call.messages], SIDE)
        else:
            rewritten, parent = self.conversation.follow(call.messages), tree.head
        notes: JsonObject = {"request": parameters, "response": answer.about, "latency": latency}
        noted: JsonObject = {
            "streamed": call.streams,
            "history_rewritten": rewritten,
            TOOLS: list(call.tools) if call.tools != tools else None,
            "protocol": call.protocol.path if call.protocol is not CHAT else None,
            "unknown_before": call.unknown_before,
        }
        notes |= {name: value for name, value in noted.items() if value or value == []}
        causes, nodes, why = [], [], partial(call.why_missing, lost_ids=answer.lost_ids)
        for at, choice in enumerate(answer.choices):
            metadata = {**notes, **({"message": choice.extra} if choice.extra else {})}
            made = answer.completion(self.policy_of(served), call.sampling, metadata, at)
            causes += [f"{what}: {why}" for what, why in note_missing(made, why).items()]
            nodes.append(tree.propose(made, parent=parent))
            if aside:
                tree.nodes[nodes[-1]].metadata[KIND] = SIDE
        for node in reversed(nodes if not aside else ()):
            # The first choice counts as executed until the next request shows which one the client used.
            self.conversation.acted(node)
        await self.keep_up()
        return causes

    async def decided(self, call: ClientRequest, model: str, upstream: Upstream) -> Json:
        """Let the strategy choose a completion, and store it. Raises as ``Session.respond``."""
        self._begin(call, model)
        self.upstream = upstream
        body = {**call.document, "messages": list(call.messages), "model": model}
        body.pop("n", None)
        work = self.aside(body, SIDE, upstream) if self._is_aside(call) else self.respond(body)
        return await on_loop(background().loop, work)

    async def close(self, stop: StopReason, evidence: JsonObject) -> str | None:
        """Close the episode and return its id, or ``None`` when nothing was recorded. Raises ``StorageError``."""
        nodes = self.tree.nodes
        if self._journal is None or not nodes:
            return None
        await self.keep_up()
        self._mark_condensations()
        turns = [node for node in nodes if kind_of(node) == TURN]
        for node in turns:
            if node.metadata.get(TOOLS) == list(self.tree.tools):
                del node.metadata[TOOLS]  # set before the session's tools were known
        if self.strategy_spec == RECORDED:
            self._ask(next((node.message.content for node in turns if node.message.role == "user"), None))
        times = Times(started=self.started, finished=self.last_used)
        frozen = self.freeze(stop=self.stop or stop, evidence=evidence)
        # The weights that sampled the first turn; side requests may have used others.
        policy = next((node.policy for node in turns if node.policy), self.policy)
        trajectory = frozen.model_copy(update={"policy": policy, "times": times})
        await self.end(trajectory)
        return trajectory.id

    def _begin(self, call: ClientRequest, served: str) -> None:
        if self._journal is not None:
            return
        if not self.request.task.instruction:
            self._ask(next((text_of(each.get("content")) for each in call.messages if each["role"] == "user"), None))
        self.tree.tools = call.tools
        self.policy = self.policy_of(served)
        self.started = time.time()
        self.store_in(on_its_loop(self._storage, asyncio.get_running_loop()))

    def _ask(self, instruction: str | None) -> None:
        task = self.request.task.model_copy(update={"instruction": instruction or self.request.task.instruction})
        self.request = self.request.model_copy(update={"task": task})

    def _is_aside(self, call: ClientRequest) -> bool:
        """Whether the request is a side request. Call it before the request is added to the tree."""
        tree = self.tree
        if call.tools and not tree.tools:
            self._set_tools(call.tools, call.messages[0])
        if call.tools or not tree.tools or not any(node.sampled for node in tree.nodes):
            return False
        if any(message["role"] == "assistant" for message in call.messages):
            return False
        roots = [tree.nodes[at] for at in tree.children(None) if kind_of(tree.nodes[at]) == TURN]
        return not any(equals(call.messages[0], root.message) for root in roots)

    def _set_tools(self, tools: Sequence[JsonObject], opening: WireMessage) -> None:
        """Set the session's tools, which arrived with a conversation that begins with ``opening``.

        Earlier conversations become side requests unless they begin with ``opening`` or a later prompt continues them.
        """
        tree = self.tree
        tree.tools = tuple(tools)
        for at, node in enumerate(tree.nodes):
            if node.sampled:
                node.metadata.setdefault(TOOLS, [])
            alone = node.parent is None and kind_of(node) == TURN and self._is_alone(at)
            if alone and not equals(opening, node.message):
                self._mark(at, SIDE)
        if tree.head is not None and kind_of(tree.nodes[tree.head]) == SIDE:
            tree.head = None

    def _mark_condensations(self) -> None:
        """Mark side requests whose completion a rewritten history quotes after its last earlier completion."""
        nodes = self.tree.nodes
        for leaf in (at for at, node in enumerate(nodes) if node.metadata.get("history_rewritten")):
            path = path_to(nodes, leaf)
            first = next((at for at in range(leaf, 0, -1) if nodes[at - 1].sampled), 0)
            new = [at for at in path if at >= first and not nodes[at].sampled]
            if not new or nodes[new[0]].parent is None:
                continue
            quoted = squeezed(
                " ".join(nodes[at].message.content or "" for at in new if nodes[at].message.role != "assistant")
            )
            for at, node in enumerate(nodes[:first]):
                if not node.sampled or node.message.tool_calls:
                    continue
                root, answer = path_to(nodes, at)[0], squeezed(node.message.content)
                # A shorter completion occurs in many texts by chance.
                if root != path[0] and len(answer) >= 8 and answer in quoted and self._is_alone(root):
                    self._mark(root, CONDENSATION)

    def _is_alone(self, root: int) -> bool:
        """Whether no prompt continues a completion of the conversation that begins at ``root``."""
        return not any(self.tree.children(at) for at in self._subtree(root) if self.tree.nodes[at].sampled)

    def _mark(self, root: int, kind: str) -> None:
        for at in self._subtree(root):
            self.tree.nodes[at].metadata[KIND] = kind

    def _subtree(self, root: int) -> list[int]:
        found = [root]
        for at in found:
            found += self.tree.children(at)
        return found


class SessionPool:
    """Sessions by name. ``settings``: defaults of sessions that a client opens."""

    def __init__(self, storage: TrajectoryStorage, config: GatewayConfig, settings: RLSettings) -> None:
        self._storage, self._config, self._settings = storage, config, settings
        self._open: dict[str, ClientSession] = {}
        # Serialises beginning and ending, so that no two objects write to one episode.
        self._lock = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._open)

    async def start(self) -> None:
        """Resume the sessions that an earlier gateway of this run left open; end those with a strategy.

        Raises ``StorageError``.
        """
        # No episode has this id. The call fails here, before any request, if the storage cannot be written.
        await self._storage.drop((trajectory_id(self._request("")),))
        where = TrajectoryFilter(run_id=self._config.run_id, environment=ENVIRONMENT, finished=False)
        for left in [each async for each in self._storage.summaries(where)]:
            part, _ = await self._parts(left.task_id)
            session = self._session(left.task_id, part - 1)
            if (stored := await stored_episode(self._storage, left.id)) is not None:
                session.continue_after(stored)
                self._open[session.name] = session
                if left.strategy != RECORDED.name:
                    await self._close(session, StopReason.NO_ACTION, {"ended_by": "shutdown"})

    async def open(self, name: str, opened: OpenRequest | None = None) -> ClientSession:
        """The session of that name, or a new one. With ``opened`` it has to be new.

        Raises ``StorageError``, ``ErrorReply``, and as ``ClientSession``.
        """
        if opened is not None or name not in self._open:
            async with self._lock:
                if name not in self._open:
                    part, _ = await self._parts(name)
                    self._open[name] = self._session(name, part, opened)
                elif opened is not None:
                    raise ErrorReply(409, f"The session {name!r} is open: end it, or name another.")
        session = self._open[name]
        session.last_used = time.time()
        return session

    async def end(self, name: str, stop: StopReason, evidence: JsonObject) -> tuple[str | None, bool]:
        """End a session after its requests in flight. Returns its episode's id, or ``None``, and whether it was open.

        If it was not open, the id is that of the last episode with this name.
        """
        # Outside the lock: a request may take minutes and must not block other sessions.
        if (session := self._open.get(name)) is not None:
            await session.settle()
        async with self._lock:
            if (session := self._open.get(name)) is not None:
                return await self._close(session, stop, evidence), True
            _, last = await self._parts(name)
            return None if last is None else last.id, False

    async def end_idle(self) -> None:
        """End all sessions without a request for ``idle_minutes``. Raises ``StorageError``."""
        idle = 60 * self._config.idle_minutes
        for name in [*self._open]:
            async with self._lock:
                session = self._open.get(name)
                if session and not session.pending and time.time() - session.last_used >= idle:
                    await self._close(session, StopReason.NO_ACTION, {"ended_by": "idle"})

    async def close(self, timeout: float) -> None:
        """End every session; requests in flight get ``timeout`` seconds. Raises ``StorageError``."""
        await asyncio.gather(*(session.settle(timeout) for session in self._open.values()))
        for name in [*self._open]:
            await self.end(name, StopReason.NO_ACTION, {"ended_by": "shutdown"})

    def _request(self, name: str, part: int = 0) -> EpisodeRequest:
        """The episode request of a session. A name that is reused after its end starts the next ``part``."""
        task = Task(id=name, environment=ENVIRONMENT)
        return EpisodeRequest(task=task, run_id=self._config.run_id, group_id=name, sample=part)

    def _session(self, name: str, part: int, opened: OpenRequest | None = None) -> ClientSession:
        return ClientSession(self._storage, self._request(name, part), self._settings, self._config, opened)

    async def _parts(self, name: str) -> tuple[int, TrajectorySummary | None]:
        """How many episodes have that name, and the last of them."""
        part, last = 0, None
        while True:
            where = TrajectoryFilter(ids=(trajectory_id(self._request(name, part)),), finished=None)
            found = [each async for each in self._storage.summaries(where)]
            if not found:
                return part, last
            part, last = part + 1, found[0]

    async def _close(self, session: ClientSession, stop: StopReason, evidence: JsonObject) -> str | None:
        # New requests wait for the lock. If closing fails, the session stays open, and a later call tries again.
        del self._open[session.name]
        try:
            await session.settle()
            return await session.close(stop, evidence)
        except BaseException:
            self._open[session.name] = session
            raise

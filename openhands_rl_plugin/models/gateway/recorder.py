"""Forwards chat completions to the model server and records them before the client gets them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.models.gateway.config import GatewayConfig
from openhands_rl_plugin.models.gateway.replies import EVENTS, Reply, error_reply
from openhands_rl_plugin.models.gateway.requests import EXTENSIONS, ClientRequest, Unrecordable, upstream_body
from openhands_rl_plugin.models.gateway.responses import UpstreamResponse
from openhands_rl_plugin.models.gateway.routing import AdapterRoute
from openhands_rl_plugin.models.gateway.sessions import Session
from openhands_rl_plugin.models.gateway.sse import events
from openhands_rl_plugin.models.gateway.upstream import Upstream, UpstreamError

_LOG = redacting_logger(__name__)

CHAT = "chat/completions"
NOT_RECORDED = {"x-openhands-rl-recorded": "no"}


@dataclass(slots=True)
class Counts:
    """Counters of a gateway since its start."""

    recorded: int = 0
    unrecorded: int = 0
    upstream_errors: int = 0


class Recorder:
    """Sends chat completion requests to the model server and records the responses."""

    def __init__(self, config: GatewayConfig, upstream: Upstream) -> None:
        self._upstream = upstream
        self._pins = config.pin_sessions
        self._extensions = dict(EXTENSIONS)
        self._route = None
        if config.adapter is not None:
            self._route = AdapterRoute(
                config.adapters_path, config.adapter, base_model=config.base_model, aliases=config.alias
            )
        self.counts = Counts()

    async def ask(self, session: Session, call: ClientRequest, headers: Mapping[str, str]) -> Reply:
        """The reply to a request; an error of the model server is forwarded unchanged."""
        started = time.perf_counter()
        try:
            reply = await self._post(session, call, headers)
        except UpstreamError as error:
            self.counts.upstream_errors += 1
            return error.reply
        except StorageError as error:
            return error_reply(503, str(error), "ServiceUnavailableError")
        if reply.status != 200:
            self.counts.upstream_errors += 1
            return reply
        try:
            answer = UpstreamResponse(reply.body)
        except Unrecordable as problem:
            return self.unrecorded(reply, problem)
        try:
            await session.episode.record(call, answer, time.perf_counter() - started)
        except StorageError as error:
            # The client must not continue from an answer that is not stored; it can retry.
            _LOG.error("a response could not be stored: %s", error)
            return error_reply(503, f"The response could not be stored: {error}", "ServiceUnavailableError")
        self.counts.recorded += 1
        if call.streams:
            return Reply(200, events(answer, call), EVENTS, reply.headers, recorded=True)
        return Reply(200, answer.body_for(call), reply.content_type, reply.headers, recorded=True)

    def unrecorded(self, reply: Reply, problem: Unrecordable) -> Reply:
        """Forward a reply that cannot be recorded, with a header that marks it."""
        _LOG.warning("not recorded: %s", problem)
        self.counts.unrecorded += 1
        return Reply(reply.status, reply.body, reply.content_type, {**reply.headers, **NOT_RECORDED})

    async def _post(self, session: Session, call: ClientRequest, headers: Mapping[str, str]) -> Reply:
        model = self._model(session, call.model)
        reply = await self._upstream.post(CHAT, headers, upstream_body(call, model, self._extensions))
        if reply.status in (400, 422) and self._drop_refused_extension(reply.body, call):
            return await self._post(session, call, headers)
        return reply

    def _model(self, session: Session, asked: str) -> str:
        if self._route is None or not self._route.knows(asked):
            return asked
        if not self._pins:
            return self._route.current()
        session.pinned = session.pinned or self._route.current()
        return session.pinned

    def _drop_refused_extension(self, body: bytes, call: ClientRequest) -> bool:
        """Stop sending the extensions that the server rejected, such as token ids; whether there were any."""
        refused = [name for name in self._extensions if name.encode() in body and call.document.get(name) is None]
        for name in refused:
            _LOG.warning("the model server rejects %r: episodes are recorded without it", name)
            del self._extensions[name]
        return bool(refused)

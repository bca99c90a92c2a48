"""The ``LLMEngine`` of one session's strategy: it sends the host's own requests with the session's sampling."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.messages import (
    NEUTRAL_PARAMETERS,
    WireMessage,
    altering_parameters,
    recorded_parameters,
    sampling_in,
    to_wire,
    usage_to_wire,
    wire_calls,
)
from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, SamplingParams, Usage
from openhands_rl_plugin.models.engines.extensions import LOGPROBS, TOKEN_IDS, extension_values, missing_parts
from openhands_rl_plugin.models.engines.seeded import ConversationSeeds
from openhands_rl_plugin.session.requests import Unrecordable
from openhands_rl_plugin.session.responses import UpstreamResponse
from openhands_rl_plugin.session.token_id_text import Json, parse_object
from openhands_rl_plugin.session.turns import Turn, TurnAnswers
from openhands_rl_plugin.session.upstream import ServerError, Upstream

if TYPE_CHECKING:
    from openhands_rl_plugin.session.session import Session

# Of a request that is not the host's conversation, such as a judgement, only these stay.
_KEPT = frozenset({"model", "max_tokens", "max_completion_tokens"})
_OF_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_TRIES, _PAUSES = 3, Backoff(0.5, 8.0)
_LONGEST_PAUSE = 60.0
"""Seconds that a server may ask to wait (``Retry-After``)."""
_OF_STREAMS = frozenset({"stream", "stream_options"})


class SessionEngine:
    """Completions for one session. ``answers`` has the documents that the host gets.

    A request is sent three times while the server is overloaded or away, as OpenAI's client does; then the host may ask
    again.
    """

    def __init__(self, session: Session, upstream: Upstream) -> None:
        self.answers = TurnAnswers(session)
        self.spent = Usage()
        self._session = session
        self.upstream = upstream
        self._numbers = itertools.count()
        self._seeds = ConversationSeeds()
        self._before = self._seeds
        self._turn = Turn({}, ())
        self._failed: dict[object, list[JsonObject]] = {}

    @property
    def episode_seed(self) -> int | None:
        """The request's seed, which a search combines with its own."""
        return self._session.request.seed

    def open(self, turn: Turn) -> None:
        """Begin the decision on a request."""
        if turn.path != self._turn.path:
            self._failed.clear()
        self._turn, self.spent = turn, Usage()
        self._before = copy.deepcopy(self._seeds)
        self.answers.open(turn)

    def close(self, *, decided: bool) -> None:
        """End the decision. Failed requests are noted at the prompt; when the host asks again, seeds are the same."""
        if not decided:
            self._seeds = self._before
        tree = self._session.tree
        if tree.head is not None:
            metadata = tree.nodes[tree.head].metadata
            metadata.pop("failed_attempts", None)
            if self._failed:
                metadata["failed_attempts"] = [*itertools.chain.from_iterable(self._failed.values())]

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` answers concurrently. A conversation that extends the host's is sent in the host's form.

        Returns fewer when some calls fail. Raises ``InfrastructureError`` or ``ModelError``, with the ``ServerError``
        as the cause, when all fail. Meanwhile the episode so far is stored; raises ``StorageError``.
        """
        session, path = self._session, tuple(messages)
        turn = self.answers.turn(messages)
        if turn is None:
            turn = Turn({name: value for name, value in self._turn.body.items() if name in _KEPT}, ())
        body = turn.body if tools else {name: each for name, each in turn.body.items() if name not in _OF_TOOLS}
        wire = [*turn.wire, *(to_wire(message) for message in path[len(turn.path) :])]
        if not turn.body.get("tools"):
            wire = session.said.put_back(wire, path)
        after = session.tree.head if path == session.tree.messages() else None
        numbers = [self._seeds.next(messages) for _ in range(n)]
        return await self.answers.gather(
            self.ask(
                body,
                wire,
                session.sampling_for(sampling, number) if session.samples else None,
                after=after,
                path=path,
                rewritten=turn.rewritten,
            )
            for number in numbers
        )

    async def ask(
        self,
        given: Json,
        wire: Sequence[WireMessage],
        sampling: SamplingParams | None,
        *,
        after: int | None = None,
        path: tuple[Message, ...] = (),
        rewritten: bool = False,
        upstream: Upstream | None = None,
    ) -> Completion:
        """One completion, sampled as the host asks for it where ``sampling`` is ``None``. Its tokens extend those of
        the path to ``after``. Raises as ``complete``."""
        session, number, upstream = self._session, next(self._numbers), upstream or self.upstream
        asked = self._request(given, wire, sampling)
        key = path, asked.get("seed")
        fields = [name for name in upstream.fields if name not in asked] if session.token_ids else []
        asking = upstream.extensions.attempt(str(asked["model"]), fields)
        attempts = self._failed.pop(key, [])
        failures = 0
        while True:
            sent: Json = {**asked, **extension_values(asking.fields, asked)}
            attempt: JsonObject = {"model": sent["model"], "parameters": recorded_parameters(sent), "error": None}
            started = time.perf_counter()
            try:
                answer = _read(await upstream.send(sent))
                break
            except ServerError as error:
                attempts.append({**attempt, "latency": time.perf_counter() - started, "error": str(error)})
                if asking.is_refused(error.status, error.body):
                    continue
                failures += 1
                if error.is_temporary and error.status != 200 and failures < _TRIES:
                    await asyncio.sleep(max(_PAUSES.pause(failures), min(error.retry_after, _LONGEST_PAUSE)))
                    continue
                self._failed[key] = attempts
                raise error.as_failure() from error
        latency = time.perf_counter() - started
        asking.succeeded()
        document = answer.plain()
        choice = replace(answer.choices[0], message=_fitting(answer.choices[0].message, document, number))
        metadata: JsonObject = {
            **session.note,
            "call": number,
            "attempts": [*attempts, {**attempt, "latency": latency}],
            "response": document,
        }
        if rewritten:
            metadata["history_rewritten"] = True
        if session.reads is not None and path and (why := session.reads(document)) is not None:
            metadata["malformed"] = why
        completion = session.completion(
            choice,
            after=after,
            served=answer.model or str(sent["model"]),
            usage=answer.usage(),
            sampling=sampling_in(sent),
            metadata=metadata,
        )
        wanted = session.token_ids and TOKEN_IDS in upstream.fields
        wanted = wanted and all(asked.get(name, True) for name in (TOKEN_IDS, LOGPROBS))
        if wanted and (missing := missing_parts(asking.why_missing, completion.tokens)):
            metadata[MISSING] = missing
        self.spent += completion.usage
        if path:
            self.answers.keep(choice.message, document)
            if session.exact and not given.get("tools"):
                session.said.add(completion)
        return completion

    def document(self, node: int) -> Json:
        """What the host gets for an answer: as the server sent it, with the usage of the whole decision."""
        document, spent = self.answers.of(self._session.tree.nodes[node].message), self.spent
        if spent.calls < 2:
            return document
        return {**document, "usage": usage_to_wire(spent)}

    def _request(self, given: Json, wire: Sequence[WireMessage], sampling: SamplingParams | None) -> Json:
        """The host's request with these messages, and with the session's sampling in the place of the host's."""
        body: Json = {"messages": list(wire)}
        body |= {name: value for name, value in given.items() if name not in _OF_STREAMS and name != "messages"}
        if sampling is None:
            return body
        own = {name: getattr(sampling, name) for name in NEUTRAL_PARAMETERS}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        body |= altering_parameters(own)
        longest = "max_tokens" if "max_tokens" in given else "max_completion_tokens"
        body[longest] = min(filter(None, (sampling.max_tokens, given.get(longest))))
        if sampling.stop:
            stop = body.get("stop") or ()
            body["stop"] = list(dict.fromkeys([*([stop] if isinstance(stop, str) else stop), *sampling.stop]))
        if self._session.request.served_model is not None:
            body["model"] = self._session.request.served_model
        return body


def _read(body: bytes) -> UpstreamResponse:
    try:
        return UpstreamResponse(body)
    except Unrecordable as problem:
        document = parse_object(body)
        if document is not None and not document.get("choices"):
            raise ServerError(200, "the server answered without a choice", body) from problem
        shown = " ".join(body[:200].decode("utf-8", "replace").split())
        raise ServerError(500, f"{problem} (check base_url): {shown}", body) from problem


def _fitting(message: Message, document: Json, number: int) -> Message:
    """The message, and in ``document`` the same, as a host can read it and send it again: text, and calls with ids."""
    said = document["choices"][0]["message"]
    if any(not call.id for call in message.tool_calls):
        named = (
            call.model_copy(update={"id": call.id or f"call_{number}_{at}"})
            for at, call in enumerate(message.tool_calls)
        )
        message = message.model_copy(update={"tool_calls": tuple(named)})
    calls = wire_calls(message.tool_calls)
    if calls and said.get("tool_calls") != calls:
        said = {**said, "tool_calls": calls}
    if message.content is None or not isinstance(said.get("content"), str | None):
        said = {**said, "content": message.content}
    document["choices"] = [{**document["choices"][0], "message": said}]
    return message

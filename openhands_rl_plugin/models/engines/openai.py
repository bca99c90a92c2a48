"""Completions from any OpenAI-compatible endpoint (vLLM, SGLang, ``openhands-rl serve``, hosted models)."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import error_in, sampling_in, text_of
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.core.servers import named_key, sendable_key
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, SamplingParams
from openhands_rl_plugin.models.engines.client import (
    Attempts,
    Connections,
    HttpUpstream,
    Response,
    ServerError,
    close_connections,
    missing_parts,
    parts,
)
from openhands_rl_plugin.models.engines.openai_wire import (
    DONE,
    ChatAnswer,
    ChunkAssembler,
    EventStreamReader,
    Unrecordable,
    chat_answer,
    completion_in,
    parse_object,
    reading,
    request_body,
)

_LONGEST_PAUSE = 20.0
# Larger than any ``n`` of one call, whose seeds are consecutive; a prime, so that repeated calls do not line up.
_SEED_STEP = 1_000_003
# OpenAI-compatible servers accept at least 31 bits.
_SEEDS = 2**31


def merge_sampling(given: SamplingParams | None, default: SamplingParams) -> SamplingParams:
    """``given``, with every unset parameter taken from ``default``."""
    if given is None:
        return default
    unset = [name for name in SamplingParams.model_fields if getattr(given, name) in (None, ())]
    return given.model_copy(update={name: getattr(default, name) for name in unset})


class ConversationSeeds:
    """Numbers for the seeds of an episode's calls.

    A number follows from the conversation that an answer is sampled to, and from how many calls there were about it. So
    an episode can be sampled again whatever runs beside it, and whichever of its own branches is answered first. The
    first call's is 0, so that a request's seed is the one that its first answer is sampled with.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._calls: Counter[int] = Counter()
        self._last: tuple[tuple[Message, ...], int] = (), 0

    def copy(self) -> ConversationSeeds:
        """The numbers as they are now."""
        copied = ConversationSeeds()
        copied._first, copied._calls, copied._last = self._first, self._calls.copy(), self._last
        return copied

    def next(self, messages: Sequence[Message]) -> int:
        """The number of the next call about ``messages``."""
        (known, digest), given = self._last, tuple(messages)
        if given[: len(known)] != known:
            known, digest = (), 0
        for message in given[len(known) :]:
            digest = zlib.crc32(f"{message.role}\0{message.content}\0".encode("utf-8", "surrogatepass"), digest)
            for call in message.tool_calls:
                digest = zlib.crc32(repr((call.name, call.arguments)).encode("utf-8", "surrogatepass"), digest)
        self._last = given, digest
        self._first = digest if self._first is None else self._first
        times = self._calls[digest]
        self._calls[digest] += 1
        return (digest ^ self._first) + times * _SEED_STEP


class SeededEngine:
    """An engine for one episode: the run's sampling parameters, and a seed of its own for every call.

    A call's seed follows from the episode's and from ``ConversationSeeds``. Without a seed the server chooses.
    """

    def __init__(self, engine: LLMEngine, sampling: SamplingParams, seed: int | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._seeds = ConversationSeeds()

    @property
    def episode_seed(self) -> int | None:
        """The episode's seed, for a search that has one of its own and mixes them."""
        return self._seed

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` completions. Raises ``InfrastructureError`` or ``ModelError``."""
        seed = None if self._seed is None else (self._seed + self._seeds.next(messages)) % _SEEDS
        wanted = merge_sampling(sampling, self._sampling.model_copy(update={"seed": seed}))
        return await self._engine.complete(messages, tools=tools, n=n, sampling=wanted)


class OpenAIEngine:
    """``protocols.LLMEngine`` over ``POST {base_url}/chat/completions``.

    Args:
        model: the served name, for example ``policy-v000007``.
        base_url: up to and including ``/v1``.
        api_key: sent as a bearer token; never stored elsewhere, printed or logged.
        api_key_env: name of an environment variable that holds the key.
        base_model: name of the base model of an adapter; ``model`` without an adapter.
        timeout: seconds for one request, from the connection to the last byte.
        retries: how often a request is retried when the server is unreachable, slow or overloaded.
        backoff: seconds before the first retry; doubled each time, with jitter.
        sampling: defaults for parameters that a call does not set. Those beyond temperature and ``top_p`` that nobody
            sets are sent with their neutral values (``core.messages.NEUTRAL_PARAMETERS``), unless the server refuses.
        token_ids: whether to ask for ``client.EXTENSIONS``; ``False`` for an endpoint that records them itself.

    Close it with ``aclose``, on the event loop of its requests.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key: str | None = None,
        base_model: str | None = None,
        timeout: float = 120.0,
        *,
        api_key_env: str | None = None,
        retries: int = 4,
        backoff: float = 0.5,
        sampling: SamplingParams | None = None,
        token_ids: bool = True,
    ) -> None:
        self.model = model
        self.base_model = base_model or model
        self.base_url = base_url.rstrip("/")
        self._retries = retries
        self._backoff = Backoff(backoff, _LONGEST_PAUSE)
        self._sampling, self._token_ids = sampling or SamplingParams(), token_ids
        key = sendable_key(api_key, "api_key") if api_key else named_key(api_key_env or "", "api_key_env")
        self._connections: Connections = {}
        self._server = HttpUpstream(base_url, key, timeout, extended=token_ids, connections=self._connections)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` completions. Raises ``InfrastructureError`` or ``ModelError``."""
        wanted = merge_sampling(sampling, self._sampling)

        async def one(at: int) -> Completion:
            own = wanted if wanted.seed is None else wanted.model_copy(update={"seed": wanted.seed + at})
            return await self._completion(request_body(self.model, messages, tools=tools, sampling=own), own)

        # One request for each, as some servers ignore ``n`` or refuse it.
        answers = await asyncio.gather(*map(one, range(n)), return_exceptions=True)
        for error in answers:
            if isinstance(error, BaseException):
                raise error
        return [each for each in answers if isinstance(each, Completion)]

    async def stream(
        self, messages: Sequence[Message], *, tools: Sequence[JsonObject] = (), sampling: SamplingParams | None = None
    ) -> AsyncIterator[str | Completion]:
        """Yields the text as it is sampled, then the completion. Raises as ``complete`` does.

        A request is retried only before the first text.
        """
        wanted = merge_sampling(sampling, self._sampling)
        body = request_body(self.model, messages, tools=tools, sampling=wanted)
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        # In a task of its own, so that the caller's time is not the server's.
        texts: asyncio.Queue[str] = asyncio.Queue()
        request = asyncio.create_task(self._completion(streamed, wanted, texts.put_nowait))
        request.add_done_callback(lambda _: texts.put_nowait(""))
        try:
            while text := await texts.get():
                yield text
            yield await request
        finally:
            request.cancel()
            await asyncio.wait([request])

    async def aclose(self) -> None:
        """Close the connections."""
        await close_connections(self._connections)

    async def _completion(
        self, body: JsonObject, sampling: SamplingParams, show: Callable[[str], None] | None = None
    ) -> Completion:
        """The completion; the texts of a streamed answer are shown as they come. What training needs and is missing is
        named in its metadata."""
        attempts = Attempts(self._server, tries=self._retries + 1, pauses=self._backoff)
        shown: list[str] = []

        async def send() -> ChatAnswer:
            nonlocal sent
            sent = {**self._server.extensions, **body} if attempts.extended else body
            try:
                async with self._server.post(sent) as response:
                    if "event-stream" in response.headers.get("content-type", ""):
                        return await self._streamed(response, shown, show)
                    return chat_answer(await self._server.completion(response))
            except ServerError as error:
                if shown:
                    raise error.as_failure() from error
                raise

        sent = body
        try:
            answer = await attempts.answered(send)
        except ServerError as error:
            raise error.as_failure(attempts.failures) from error
        except Unrecordable as problem:
            raise ModelError(
                f"the model server's answer is not a chat completion (check base_url): {problem}"
            ) from problem
        made = completion_in(answer, self.base_model, self.model, sampling_in(sent), attempts.failures + 1)
        if self._token_ids and (missing := missing_parts(attempts.why_missing, made.tokens)):
            made.metadata[MISSING] = missing
        return made

    async def _streamed(self, response: Response, shown: list[str], show: Callable[[str], None] | None) -> ChatAnswer:
        """The answer of a stream with one choice. Raises ``Unrecordable``, ``ServerError``, ``EpisodeError``."""
        events, chunks, done = EventStreamReader(), ChunkAssembler(), False

        def text_in(data: bytes) -> str:
            chunk: Any = parse_object(data)
            if (found := error_in(chunk)) is not None:
                raise self._server.error(found[0], data, response.headers)
            chunks.add(chunk)
            deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or () if not choice.get("index")]
            return "".join(text_of(delta.get("content")) or "" for delta in deltas)

        async for data in parts(response):
            for event in events.feed(data):
                done |= event.data == DONE
                if event.data and not done and (text := reading("an event", text_in, event.data)) and show is not None:
                    shown.append(text)
                    show(text)
        if not done and not chunks.finished:
            raise InfrastructureError("the stream of the model server ended before its answer did")
        return reading("the stream", ChatAnswer, chunks.document())

"""Streams completions as server-sent events while they are generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.models.generator.errors import RequestCancelled, ServingError
from openhands_rl_plugin.models.generator.sequence import Delta, DeltaCallback, Generation, RequestHandle
from openhands_rl_plugin.models.server.http import SSE_DONE, error_body, sse_event
from openhands_rl_plugin.models.server.requests import ChatCompletionRequest, CompletionRequest
from openhands_rl_plugin.models.server.responses import (
    Body,
    Formatter,
    chunk_body,
    chunk_choice,
    new_id,
    now,
    parse_tool_calls,
    present,
    safe_length,
    tool_call_bodies,
    usage,
)

Event = tuple[int, Delta | Generation | BaseException]


class DeltaQueue:
    """Transfers the deltas and results of several requests from the generator's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def callback(self, index: int) -> DeltaCallback:
        """The ``on_delta`` callback of ``Generator.submit`` for the choice ``index``."""
        return lambda delta: self._put((index, delta))

    def watch(self, index: int, handle: RequestHandle) -> None:
        """Queue the result of a request after its last delta."""

        def ended(future: Future[Generation]) -> None:
            error = future.exception()
            self._put((index, future.result() if error is None else error))

        handle.future.add_done_callback(ended)

    async def events(self, count: int) -> AsyncIterator[tuple[int, Delta | Generation]]:
        """The events of ``count`` choices, until the last has finished. Raises the first error of any of them."""
        while count:
            index, event = await self._queue.get()
            if isinstance(event, BaseException):
                raise event
            count -= isinstance(event, Generation)
            yield index, event

    def _put(self, event: Event) -> None:
        # A closed loop means that the server is shutting down and the stream has no reader.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)


@dataclass
class _Choice:
    """State of a streamed chat choice; with tools, text that may become a tool call is buffered."""

    tools: Sequence[JsonObject]
    whole: str = ""
    sent: int = 0

    def add(self, text: str) -> str:
        """Append ``text``; returns the content that can be sent now."""
        self.whole += text
        stop = safe_length(self.whole) if self.tools else len(self.whole)
        fresh = self.whole[self.sent : stop]
        self.sent = max(self.sent, stop)
        return fresh

    def rest(self) -> tuple[str, list[Body]]:
        """At the end: the buffered text, and the tool calls that were parsed from it."""
        parsed = parse_tool_calls(self.whole, self.tools)
        calls = tool_call_bodies(parsed.calls)
        return parsed.spoken[self.sent :], [{"index": i, **call} for i, call in enumerate(calls)]


async def chat_events(
    queue: DeltaQueue,
    request: ChatCompletionRequest,
    model: str,
    prompt_ids: Sequence[int],
    formatter: Formatter,
    count: int,
) -> AsyncIterator[str]:
    """The events of a chat completion with ``count`` choices, up to and including ``[DONE]``."""
    head = {"id": new_id("chatcmpl"), "object": "chat.completion.chunk", "created": now(), "model": model}
    choices = [_Choice(request.callable) for _ in range(count)]
    finished: dict[int, Generation] = {}
    for index in range(count):
        first = chunk_choice(index, delta={"role": "assistant", "content": ""})
        ids = list(prompt_ids) if index == 0 and request.return_token_ids else None
        yield sse_event(chunk_body(head, [first], prompt_token_ids=ids))
    async for index, event in queue.events(count):
        if isinstance(event, Delta):
            choice = chunk_choice(
                index,
                delta=present({"content": choices[index].add(event.text) or None}),
                logprobs=formatter.chat_logprobs(event.sampled) if request.logprobs else None,
                token_ids=[one.token for one in event.sampled] if request.return_token_ids else None,
            )
        else:
            finished[index] = event
            text, calls = choices[index].rest()
            choice = chunk_choice(
                index,
                "tool_calls" if calls else event.finish_reason,
                delta=present({"content": text or None, "tool_calls": calls or None}),
                stop_reason=event.stop_reason,
            )
        yield sse_event(chunk_body(head, [choice]))
    if request.stream_options and request.stream_options.include_usage:
        yield sse_event(chunk_body(head, [], usage=usage([finished[i] for i in range(count)], count)))
    yield SSE_DONE


async def text_events(
    queue: DeltaQueue,
    request: CompletionRequest,
    model: str,
    prompts: Sequence[Sequence[int]],
    formatter: Formatter,
    count: int,
) -> AsyncIterator[str]:
    """The events of a text completion with ``count`` choices, up to and including ``[DONE]``."""
    head = {"id": new_id("cmpl"), "object": "text_completion", "created": now(), "model": model}
    per_prompt = count // len(prompts)
    offsets = [0] * count
    finished: dict[int, Generation] = {}
    started: set[int] = set()
    async for index, event in queue.events(count):
        if isinstance(event, Delta):
            ids = None
            if request.return_token_ids and index not in started:
                ids = list(prompts[index // per_prompt])
            started.add(index)
            wanted = request.logprobs is not None
            choice = chunk_choice(
                index,
                text=event.text,
                logprobs=formatter.text_logprobs(event.sampled, offsets[index]) if wanted else None,
                token_ids=[one.token for one in event.sampled] if request.return_token_ids else None,
                prompt_token_ids=ids,
            )
            offsets[index] += len(event.text)
        else:
            finished[index] = event
            choice = chunk_choice(index, event.finish_reason, text="", stop_reason=event.stop_reason)
        yield sse_event(chunk_body(head, [choice]))
    if request.stream_options and request.stream_options.include_usage:
        yield sse_event(chunk_body(head, [], usage=usage([finished[i] for i in range(count)], per_prompt)))
    yield SSE_DONE


async def cancelling(events: AsyncIterator[str], cancel: Callable[[], None]) -> AsyncIterator[str]:
    """``events``; calls ``cancel`` when the client disconnects, and ends with an error event when they fail."""
    try:
        async for event in events:
            yield event
    except RequestCancelled:
        yield sse_event(error_body(503, "The server is stopping.", "ServiceUnavailableError"))
    except ServingError as error:
        yield sse_event(error_body(error.status, error.message, error.kind))
    finally:
        cancel()

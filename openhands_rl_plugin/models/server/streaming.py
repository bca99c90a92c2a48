"""Streams completions as server-sent events while they are generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from openhands_rl_plugin.models.generator.errors import RequestCancelled, ServingError
from openhands_rl_plugin.models.generator.sequence import Delta, DeltaCallback, Generation, RequestHandle
from openhands_rl_plugin.models.server.http import SSE_DONE, error_body, sse_event
from openhands_rl_plugin.models.server.requests import ChatCompletionRequest, CompletionRequest
from openhands_rl_plugin.models.server.responses import (
    ChatCompletionChunk,
    ChatCompletionChunkChoice,
    CompletionChoice,
    CompletionResponse,
    DeltaMessage,
    DeltaToolCall,
    Formatter,
    new_id,
    now,
    parse_tool_calls,
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

    tools: bool
    whole: str = ""
    sent: int = 0

    def add(self, text: str) -> str:
        """Append ``text``; returns the content that can be sent now."""
        self.whole += text
        stop = safe_length(self.whole) if self.tools else len(self.whole)
        fresh = self.whole[self.sent : stop]
        self.sent = max(self.sent, stop)
        return fresh

    def rest(self) -> tuple[str, list[DeltaToolCall]]:
        """At the end: the buffered text, and the tool calls that were parsed from it."""
        parsed = parse_tool_calls(self.whole) if self.tools else None
        if parsed is None or not parsed.calls:
            return self.whole[self.sent :], []
        calls = tool_call_bodies(parsed.calls)
        return parsed.spoken[self.sent :], [DeltaToolCall(index=i, **call.model_dump()) for i, call in enumerate(calls)]


async def chat_events(
    queue: DeltaQueue,
    request: ChatCompletionRequest,
    model: str,
    prompt_ids: Sequence[int],
    formatter: Formatter,
    count: int,
) -> AsyncIterator[str]:
    """The events of a chat completion with ``count`` choices, up to and including ``[DONE]``."""
    identifier, created = new_id("chatcmpl"), now()
    tools = bool(request.tools) and request.tool_choice != "none"
    choices = [_Choice(tools) for _ in range(count)]
    finished: dict[int, Generation] = {}

    def chunk(choice: ChatCompletionChunkChoice, *, first: bool = False) -> str:
        ids = list(prompt_ids) if first and request.return_token_ids else None
        return sse_event(
            ChatCompletionChunk(id=identifier, created=created, model=model, choices=[choice], prompt_token_ids=ids)
        )

    for index in range(count):
        yield chunk(
            ChatCompletionChunkChoice(index=index, delta=DeltaMessage(role="assistant", content="")), first=index == 0
        )
    async for index, event in queue.events(count):
        if isinstance(event, Delta):
            yield chunk(_chat_delta(index, choices[index].add(event.text), event, request, formatter))
        else:
            finished[index] = event
            text, calls = choices[index].rest()
            yield chunk(
                ChatCompletionChunkChoice(
                    index=index,
                    delta=DeltaMessage(content=text or None, tool_calls=calls or None),
                    finish_reason="tool_calls" if calls else event.finish_reason,
                    stop_reason=event.stop_reason,
                )
            )
    if request.stream_options and request.stream_options.include_usage:
        counts = usage([finished[i] for i in range(count)], count)
        yield sse_event(ChatCompletionChunk(id=identifier, created=created, model=model, choices=[], usage=counts))
    yield SSE_DONE


def _chat_delta(
    index: int, text: str, delta: Delta, request: ChatCompletionRequest, formatter: Formatter
) -> ChatCompletionChunkChoice:
    return ChatCompletionChunkChoice(
        index=index,
        delta=DeltaMessage(content=text or None),
        logprobs=formatter.chat_logprobs(delta.sampled) if request.logprobs else None,
        token_ids=[one.token for one in delta.sampled] if request.return_token_ids else None,
    )


async def text_events(
    queue: DeltaQueue,
    request: CompletionRequest,
    model: str,
    prompts: Sequence[Sequence[int]],
    formatter: Formatter,
    count: int,
) -> AsyncIterator[str]:
    """The events of a text completion with ``count`` choices, up to and including ``[DONE]``."""
    identifier, created = new_id("cmpl"), now()
    per_prompt = count // len(prompts)
    offsets = [0] * count
    finished: dict[int, Generation] = {}

    def chunk(choice: CompletionChoice) -> str:
        return sse_event(CompletionResponse(id=identifier, created=created, model=model, choices=[choice]))

    started: set[int] = set()
    async for index, event in queue.events(count):
        if isinstance(event, Delta):
            ids = None
            if request.return_token_ids and index not in started:
                ids = list(prompts[index // per_prompt])
            started.add(index)
            wanted = request.logprobs is not None
            yield chunk(
                CompletionChoice(
                    index=index,
                    text=event.text,
                    logprobs=formatter.text_logprobs(event.sampled, offsets[index]) if wanted else None,
                    token_ids=[one.token for one in event.sampled] if request.return_token_ids else None,
                    prompt_token_ids=ids,
                )
            )
            offsets[index] += len(event.text)
        else:
            finished[index] = event
            yield chunk(
                CompletionChoice(index=index, text="", finish_reason=event.finish_reason, stop_reason=event.stop_reason)
            )
    if request.stream_options and request.stream_options.include_usage:
        counts = usage([finished[i] for i in range(count)], per_prompt)
        yield sse_event(CompletionResponse(id=identifier, created=created, model=model, choices=[], usage=counts))
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

"""An engine that sends text to a listener while the model generates it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from openhands_rl_plugin.apps.endpoint.events import TextDelta
from openhands_rl_plugin.core.errors import ModelError
from openhands_rl_plugin.core.protocols import LLMEngine, StreamingEngine
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, SamplingParams
from openhands_rl_plugin.environments.tools.environment import ToolEnvironment


class TextStreamingEngine:
    """Sends the visible text of each response to ``listener``; all at once when the engine cannot stream.

    ``streamed_text`` is the text of the last response that was sent.
    """

    def __init__(self, engine: LLMEngine, environment: ToolEnvironment, listener: Callable[[TextDelta], None]) -> None:
        self.streamed_text = ""
        self._engine = engine
        self._environment = environment
        self._listener = listener
        self._turn = 0

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` completions; only a single one is streamed. Raises what the engine raises."""
        if n != 1:
            return await self._engine.complete(messages, tools=tools, n=n, sampling=sampling)
        self._turn += 1
        self.streamed_text = ""
        if isinstance(self._engine, StreamingEngine):
            completion = await self._listen(self._engine.stream(messages, tools=tools, sampling=sampling))
        else:
            completion = (await self._engine.complete(messages, tools=tools, sampling=sampling))[0]
        self._emit(self._environment.read(completion.message).speech)
        return [completion]

    async def _listen(self, stream: AsyncIterator[str | Completion]) -> Completion:
        text = ""
        async with aclosing(stream):  # pyright: ignore[reportArgumentType]  (a generator, where there is something to close)
            async for piece in stream:
                if isinstance(piece, Completion):
                    return piece
                text += piece
                self._emit(self._environment.said(text))
        raise ModelError("the engine's stream ended without a completion")

    def _emit(self, speech: str) -> None:
        """Send the new part of ``speech``; nothing when it no longer starts with the text that was sent."""
        if speech.startswith(self.streamed_text) and (fresh := speech[len(self.streamed_text) :]):
            self.streamed_text = speech
            self._listener(TextDelta(text=fresh, turn=self._turn))

"""An engine that lets a listener hear what the model says, while it says it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from openhands_rl_plugin.apps.endpoint.events import TextDelta
from openhands_rl_plugin.core.errors import ModelError
from openhands_rl_plugin.core.protocols import LLMEngine, StreamingEngine
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, SamplingParams
from openhands_rl_plugin.environments.tools.environment import ToolEnvironment


class TextStreamingEngine:
    """Passes on what of each answer is speech. An engine that cannot stream is asked as usual, and says it all at once.

    ``said`` is the speech of the last answer, as far as it was passed on.
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
        """Sample ``n`` answers; only a single one is spoken. Raises what the engine raises."""
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
        """Pass on what is new. What no longer begins with what was said has become something else: then nothing."""
        if speech.startswith(self.streamed_text) and (fresh := speech[len(self.streamed_text) :]):
            self.streamed_text = speech
            self._listener(TextDelta(text=fresh, turn=self._turn))

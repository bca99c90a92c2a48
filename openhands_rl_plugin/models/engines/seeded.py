"""The sampling parameters of an episode's calls: defaults filled in, and a reproducible seed for each call."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, SamplingParams

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

    def copy(self) -> ConversationSeeds:
        """The numbers as they are now."""
        copied = ConversationSeeds()
        copied._first, copied._calls = self._first, self._calls.copy()
        return copied

    def next(self, messages: Sequence[Message]) -> int:
        """The number of the next call about ``messages``."""
        digest = 0
        for message in messages:
            digest = zlib.crc32(f"{message.role}\0{message.content}\0".encode("utf-8", "surrogatepass"), digest)
            for call in message.tool_calls:
                digest = zlib.crc32(repr((call.name, call.arguments)).encode("utf-8", "surrogatepass"), digest)
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
        """Sample ``n`` answers. Raises ``InfrastructureError`` or ``ModelError``."""
        seed = None if self._seed is None else (self._seed + self._seeds.next(messages)) % _SEEDS
        wanted = merge_sampling(sampling, self._sampling.model_copy(update={"seed": seed}))
        return await self._engine.complete(messages, tools=tools, n=n, sampling=wanted)

"""One episode's random numbers: whoever plays it again with the same seed gets the same answers."""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.protocols import LLMEngine
from openhands_rl_plugin.types import Completion, JsonObject, Message, SamplingParams

from .defaults import merge_sampling

# Larger than any number of answers to one call, whose seeds are consecutive.
_SEED_STEP = 1_000_003
_SEEDS = 2**31


class SeededEngine:
    """An engine for one episode: the run's sampling parameters, and a seed of its own for every call.

    The seeds depend on the episode's seed only, so that an episode can be sampled again whatever is played beside it.
    Without a seed the server chooses.
    """

    def __init__(self, engine: LLMEngine, sampling: SamplingParams, seed: int | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._calls = 0

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` answers. Raises ``InfrastructureError`` or ``ModelError``."""
        seed = None if self._seed is None else (self._seed + self._calls * _SEED_STEP) % _SEEDS
        self._calls += 1
        wanted = merge_sampling(sampling, self._sampling.model_copy(update={"seed": seed}))
        return await self._engine.complete(messages, tools=tools, n=n, sampling=wanted)

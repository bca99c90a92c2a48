"""How fast the model's server reads and writes: measured, in seconds."""

from __future__ import annotations

import asyncio
import random
import time

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.types import Frozen, Message, SamplingParams
from openhands_rl_plugin.models.engines.openai import OpenAIEngine

_WRITTEN = 48
_MOST_AT_ONCE = 8
_TASK = "Write the numbers from 1 to 300, with commas between them, and nothing else."


class ServerRates(Frozen):
    """Tokens a second over all requests: of prompts that were not seen before, and of answers, ``at_once`` together."""

    read: float
    written: float
    at_once: int


async def measure_rates(settings: RLSettings, prompt: str) -> ServerRates:
    """One prompt of that text, then answers to several at once. Raises ``InfrastructureError`` or ``ModelError``."""
    serving = settings.serving
    timeout = max(serving.request_timeout, 600.0)
    engine = OpenAIEngine(serving.model, serving.base_url, serving.api_key(), timeout=timeout)
    at_once = min(settings.max_workers, _MOST_AT_ONCE)
    try:
        await _asked(engine, "Say yes.", 1)  # what the first request alone has to wait for
        read, _, seconds = await _asked(engine, _unseen(prompt), 1)
        began = time.monotonic()
        answers = await asyncio.gather(*(_asked(engine, _unseen(_TASK), _WRITTEN) for _ in range(at_once)))
        spent = time.monotonic() - began
    finally:
        await engine.aclose()
    written = sum(count for _, count, _ in answers)
    if not read or not written:
        raise InfrastructureError(f"{serving.base_url} does not say how many tokens it reads and writes (usage)")
    return ServerRates(read=read / seconds, written=written / spent, at_once=at_once)


def _unseen(text: str) -> str:
    """With a beginning of its own, so that no cache knows it."""
    return f"{random.SystemRandom().getrandbits(64):x} {text}"


async def _asked(engine: OpenAIEngine, text: str, most: int) -> tuple[int, int, float]:
    """Tokens read and written, and seconds."""
    began = time.monotonic()
    (answer,) = await engine.complete([Message(role="user", content=text)], sampling=SamplingParams(max_tokens=most))
    usage = answer.usage
    return usage.prompt_tokens, usage.completion_tokens, time.monotonic() - began

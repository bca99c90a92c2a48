"""The conformance check of engines."""

from __future__ import annotations

import asyncio
import math
from typing import NoReturn

from openhands_rl_plugin.core.errors import InfrastructureError, ModelError
from openhands_rl_plugin.core.protocols import LLMEngine, StreamingEngine
from openhands_rl_plugin.core.types import Completion, Message, SamplingParams, Tokens

_ASKED = (Message(role="system", content="Be brief."), Message(role="user", content="Say one word."))
_SAMPLING = SamplingParams(temperature=1.0, max_tokens=16, seed=7)


async def check_engine(engine: LLMEngine, *, away: LLMEngine | None = None) -> None:
    """Ask ``engine`` for one answer, for three, for two side by side, and to go on from an answer.

    Asserts what strategies and training rely on: as many completions as were asked for, each an assistant message that
    says what it was sampled with and from; whole prompts with as many logprobs as ids, where there are ids; the
    limit of tokens kept. ``away``: the same engine with a server that does not answer, which must raise
    ``InfrastructureError`` or ``ModelError``: anything else would end the whole run, not the episode.
    """
    (answer,) = await _asked(engine, _ASKED, 1)
    await _asked(engine, _ASKED, 3)
    await asyncio.gather(_asked(engine, _ASKED, 1), _asked(engine, _ASKED, 2))
    after = (*_ASKED, answer.message, Message(role="user", content="Another one."))
    (later,) = await _asked(engine, after, 1)
    if answer.tokens and later.tokens and len(later.tokens.prompt_ids) <= len(answer.tokens.prompt_ids):
        _broken("the prompt of a longer conversation is not longer; prompt_ids is the whole prompt, with extends false")
    if isinstance(engine, StreamingEngine):
        await _check_stream(engine)
    if away is not None:
        await _check_away(away)


async def _asked(engine: LLMEngine, messages: tuple[Message, ...], n: int) -> list[Completion]:
    answers = await engine.complete(messages, n=n, sampling=_SAMPLING)
    if not isinstance(answers, list) or len(answers) != n:
        _broken(f"complete(n={n}) must return a list of {n} completions")
    for answer in answers:
        _check_completion(answer)
    return answers


def _check_completion(answer: Completion) -> None:
    if answer.message.role != "assistant":
        _broken(f"a completion's message has the role {answer.message.role!r}; it must be 'assistant'")
    if answer.policy is None:
        _broken("a completion must name its policy: the base model, and the adapter that it was sampled from")
    if answer.sampling is None or answer.sampling.temperature != _SAMPLING.temperature:
        _broken("a completion must say what it was sampled with (sampling): training needs to know the temperature")
    if _SAMPLING.max_tokens is not None and answer.usage.completion_tokens > _SAMPLING.max_tokens:
        _broken(f"max_tokens was {_SAMPLING.max_tokens}, and {answer.usage.completion_tokens} tokens were sampled")
    if answer.tokens is not None:
        _check_tokens(answer.tokens)


def _check_tokens(tokens: Tokens) -> None:
    if tokens.extends:
        _broken("an engine gives the whole prompt (extends false); the tree finds what a prompt adds")
    if not tokens.prompt_ids or not tokens.sampled_ids:
        _broken("tokens need both prompt_ids and sampled_ids; where the server gives none, tokens is None")
    if len(tokens.logprobs) not in (0, len(tokens.sampled_ids)):
        _broken("there must be a logprob for each sampled id, or none at all")
    if any(math.isnan(logprob) or logprob > 1e-3 for logprob in tokens.logprobs):
        _broken("a logprob is a natural logarithm of a probability: at most 0, and not NaN")


async def _check_stream(engine: StreamingEngine) -> None:
    parts = [part async for part in engine.stream(_ASKED, sampling=_SAMPLING)]
    if not parts or not isinstance(whole := parts[-1], Completion):
        _broken("stream() must yield a Completion last")
    if any(not isinstance(part, str) for part in parts[:-1]):
        _broken("stream() must yield texts before the Completion")
    _check_completion(whole)
    if not whole.message.tool_calls and "".join(map(str, parts[:-1])) != (whole.message.content or ""):
        _broken("the streamed texts are not the text of the completion")


async def _check_away(engine: LLMEngine) -> None:
    (outcome,) = await asyncio.gather(engine.complete(_ASKED, sampling=_SAMPLING), return_exceptions=True)
    if not isinstance(outcome, BaseException):
        _broken("the engine answered without its server; is `away` really away?")
    if not isinstance(outcome, InfrastructureError | ModelError):
        _broken(f"without its server the engine raised {outcome!r}; raise InfrastructureError or ModelError")


def _broken(rule: str) -> NoReturn:
    raise AssertionError(rule)

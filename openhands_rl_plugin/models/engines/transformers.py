"""Completions from a Hugging Face causal LM in this process.

A path is served by the embedded server's generation core: batched, with a prefix cache and adapters. A model object is
left as it is (it may be in the middle of a training) and sampled with a plain loop, one call at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.models.generator.threads import prepare_threads

prepare_threads()

import torch  # noqa: E402  (the thread settings are read when torch loads)
from pydantic import ValidationError  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import PreTrainedModel, PreTrainedTokenizerFast  # noqa: E402

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, ModelError  # noqa: E402
from openhands_rl_plugin.core.types import (  # noqa: E402
    Completion,
    JsonObject,
    Message,
    PolicyRef,
    SamplingParams,
    Tokens,
    ToolCall,
    Usage,
)
from openhands_rl_plugin.models.engines.defaults import merge_sampling  # noqa: E402
from openhands_rl_plugin.models.engines.openai_wire import request_body  # noqa: E402
from openhands_rl_plugin.models.generator.config import GeneratorConfig  # noqa: E402
from openhands_rl_plugin.models.generator.failures import Overloaded, ServingError  # noqa: E402
from openhands_rl_plugin.models.generator.generator import Generator  # noqa: E402
from openhands_rl_plugin.models.generator.sampling import Sampled, new_random, sample  # noqa: E402
from openhands_rl_plugin.models.generator.sampling import SamplingParams as CoreParams  # noqa: E402
from openhands_rl_plugin.models.generator.sequence import Cancelled, FinishReason, Generation  # noqa: E402
from openhands_rl_plugin.models.generator.text import AnswerText  # noqa: E402
from openhands_rl_plugin.models.server.prompts import Prompts  # noqa: E402
from openhands_rl_plugin.models.server.requests import ChatRequest  # noqa: E402
from openhands_rl_plugin.models.server.toolcalls import ParsedText, parse_tool_calls  # noqa: E402

DEFAULT_MAX_TOKENS = 512
_UNBOUNDED = 2**31


class _Core(Protocol):
    max_len: int

    async def generate(self, prompt_ids: tuple[int, ...], params: Sequence[CoreParams]) -> list[Generation]: ...

    def close(self) -> None: ...


class TransformersEngine:
    """``protocols.LLMEngine`` on a model in this process. Prompts and tool calls are those of the embedded server.

    Args:
        model: a directory (or cached hub name), a running ``Generator`` (shared: ``aclose`` leaves it running), or a
            model object.
        tokenizer: needed with a model object; the others bring their own.
        adapter: versioned name of the adapter to sample from; it must be loaded in the ``Generator``, or be the
            active one of the model object.
        base_model: name for the records; by default the model's own.
        sampling: used for whatever a call leaves open; ``max_tokens`` is 512 when nobody says.

    Raises ``ConfigError`` for a tokenizer that does not fit, ``ServingError`` for a path that cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path | Generator | PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast | None = None,
        *,
        adapter: str | None = None,
        base_model: str | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        if isinstance(model, str | Path | Generator):
            owned = not isinstance(model, Generator)
            generator = _started(model) if owned else model
            self._core: _Core = _ServedCore(generator, adapter, owned=owned)
            self.tokenizer, name = tokenizer or generator.tokenizer, generator.config.model
        else:
            self.tokenizer = _fast(tokenizer)
            self._core, name = _ObjectCore(model, self.tokenizer), model.name_or_path or type(model).__name__
        self.policy = PolicyRef.from_served_name(base_model or name, adapter or name)
        self._prompts = Prompts(self.tokenizer, self._core.max_len, None)
        self._sampling = sampling or SamplingParams()

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` answers. Raises ``InfrastructureError`` or ``ModelError``."""
        wanted = merge_sampling(sampling, self._sampling)
        try:
            prompt_ids, params = self._request(messages, tools, n, wanted)
            answers = await self._core.generate(prompt_ids, params)
        except (Overloaded, Cancelled) as error:
            raise InfrastructureError(str(error)) from error
        except (ServingError, ValidationError) as error:
            raise ModelError(f"the model cannot take this request: {error}") from error
        turn = len(messages)
        return [self._completion(answer, wanted, turn, called=bool(tools)) for answer in answers]

    async def aclose(self) -> None:
        """Stop the generation core, if this engine started it."""
        await asyncio.to_thread(self._core.close)

    def _request(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], n: int, wanted: SamplingParams
    ) -> tuple[tuple[int, ...], list[CoreParams]]:
        """Prompt ids, and one set of parameters an answer, each with its own seed."""
        body = request_body(self.policy.served_name, messages, tools=tools, n=1, sampling=wanted)
        request = ChatRequest.model_validate(body)
        ids = self._prompts.chat(request)
        room = self._core.max_len - len(ids)
        if room < 1:
            raise ModelError(
                f"the prompt has {len(ids)} tokens and the model takes {self._core.max_len}: lower max_prompt_length"
            )
        limit = min(wanted.max_tokens or DEFAULT_MAX_TOKENS, room)
        params = self._prompts.params(request, prompt_len=len(ids), max_tokens=limit, top_logprobs=None)
        return ids, [params.with_seed(None if wanted.seed is None else wanted.seed + at) for at in range(n)]

    def _completion(self, answer: Generation, wanted: SamplingParams, turn: int, *, called: bool) -> Completion:
        parsed = parse_tool_calls(answer.text) if called else ParsedText(answer.text, ())
        calls = tuple(
            ToolCall(id=f"call_{turn}_{at}", name=call.name, arguments=call.arguments)
            for at, call in enumerate(parsed.calls)
        )
        return Completion(
            message=Message(role="assistant", content=parsed.content, tool_calls=calls),
            tokens=Tokens(prompt_ids=answer.prompt_ids, sampled_ids=answer.token_ids, logprobs=answer.logprobs),
            finish_reason="tool_calls" if calls else answer.finish_reason.value,
            usage=Usage(
                prompt_tokens=len(answer.prompt_ids),
                cached_tokens=answer.cached_tokens,
                completion_tokens=len(answer.sampled),
                calls=1,
            ),
            policy=self.policy,
            sampling=wanted,
        )


class _ServedCore:
    """The embedded server's generation core."""

    def __init__(self, generator: Generator, adapter: str | None, *, owned: bool) -> None:
        self.max_len = generator.max_len
        self._generator = generator
        self._adapter = adapter
        self._owned = owned

    async def generate(self, prompt_ids: tuple[int, ...], params: Sequence[CoreParams]) -> list[Generation]:
        tickets = [self._generator.submit(prompt_ids, each, adapter=self._adapter) for each in params]
        futures = [asyncio.wrap_future(ticket.future) for ticket in tickets]
        try:
            # Shielded, because the core settles its futures itself: an answer given up is one it was told to cancel.
            return [await asyncio.shield(future) for future in futures]
        finally:
            for ticket, future in zip(tickets, futures, strict=True):
                ticket.cancel()
                future.add_done_callback(_look_at)

    def close(self) -> None:
        if self._owned:
            self._generator.close()


class _ObjectCore:
    """A model object, sampled as it is. Calls wait for each other."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._one_call = threading.Lock()
        self._eos_ids = _eos_ids(model, tokenizer)
        self.max_len = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _UNBOUNDED)

    async def generate(self, prompt_ids: tuple[int, ...], params: Sequence[CoreParams]) -> list[Generation]:
        given_up = threading.Event()
        try:
            return await asyncio.to_thread(self._generate, prompt_ids, params, given_up)
        finally:
            given_up.set()

    def close(self) -> None:
        """Nothing to stop: the model is its owner's."""

    def _generate(
        self, prompt_ids: tuple[int, ...], params: Sequence[CoreParams], given_up: threading.Event
    ) -> list[Generation]:
        with self._one_call, torch.inference_mode():
            was_training = self._model.training
            self._model.eval()
            try:
                answers = [_Answer(prompt_ids, each, self._tokenizer, self._eos_ids) for each in params]
                self._sample(prompt_ids, answers, given_up)
            finally:
                self._model.train(was_training)
        return [answer.result() for answer in answers]

    def _sample(self, prompt_ids: tuple[int, ...], answers: Sequence[_Answer], given_up: threading.Event) -> None:
        """Grow all answers by a token a step, sharing one pass over the prompt."""
        ids = torch.tensor([prompt_ids], device=self._model.device)
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        past, logits = output.past_key_values, output.logits[:, -1].float().expand(len(answers), -1)
        past.batch_repeat_interleave(len(answers))
        while not given_up.is_set():
            chosen = sample(logits, [a.params for a in answers], [a.random for a in answers])
            for answer, token in zip(answers, chosen, strict=True):
                answer.add(token)
            if all(answer.finish is not None for answer in answers):
                return
            logits, past = self._next_logits([token.token for token in chosen], past)
        raise Cancelled("the request was cancelled")

    def _next_logits(self, tokens: Sequence[int], past: object) -> tuple[Tensor, object]:
        ids = torch.tensor(tokens, device=self._model.device)[:, None]
        output = self._model(input_ids=ids, past_key_values=past, use_cache=True)
        return output.logits[:, -1].float(), output.past_key_values


class _Answer:
    """One answer under way in ``_ObjectCore``; what is sampled after its end is dropped."""

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        params: CoreParams,
        tokenizer: PreTrainedTokenizerFast,
        eos_ids: frozenset[int],
    ) -> None:
        self.params = params
        self.random = new_random(params.seed)
        self.finish: FinishReason | None = None
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._text = AnswerText(tokenizer, params.stop)
        self._sampled: list[Sampled] = []

    def add(self, token: Sampled) -> None:
        """Take the next token, unless the answer has ended."""
        if self.finish is not None:
            return
        self._sampled.append(token)
        if token.token in self._eos_ids or self._text.add(token.token):
            self.finish = FinishReason.STOP
        elif len(self._sampled) >= self.params.max_tokens:
            self.finish = FinishReason.LENGTH

    def result(self) -> Generation:
        """The finished answer."""
        ids = [token.token for token in self._sampled]
        self._text.finish(str(self._tokenizer.decode(ids, skip_special_tokens=True)))
        return Generation(
            prompt_ids=self._prompt_ids,
            sampled=tuple(self._sampled),
            text=self._text.text,
            finish_reason=self.finish or FinishReason.LENGTH,
            stop_reason=self._text.stopped_by,
            prompt=None,
            cached_tokens=0,
            adapter=None,
        )


def _started(model: str | Path) -> Generator:
    return Generator(GeneratorConfig.model_validate({"model": str(model)}))


def _fast(tokenizer: object) -> PreTrainedTokenizerFast:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError("TransformersEngine needs a fast tokenizer beside a model object: pass tokenizer=...")
    return tokenizer


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if isinstance(token, int))


def _look_at(future: asyncio.Future[Generation]) -> None:
    """Retrieve what became of an answer that nobody waits for any more, so that asyncio does not report it as lost."""
    if not future.cancelled():
        future.exception()

"""Completions from a Hugging Face causal LM in this process.

A path is served by the embedded server's generation core: batched, with a prefix cache and adapters. A model object is
left as it is (it may be in the middle of a training) and sampled with a plain loop, one call at a time.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.serving.threads import prepare_threads

prepare_threads()

import torch  # noqa: E402  (the thread settings are read when torch loads)
from jinja2 import TemplateError  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import PreTrainedModel, PreTrainedTokenizerFast  # noqa: E402

from openhands_rl_plugin.errors import ConfigError, InfrastructureError, ModelError  # noqa: E402
from openhands_rl_plugin.serving.config import GeneratorConfig  # noqa: E402
from openhands_rl_plugin.serving.failures import Overloaded, ServingError  # noqa: E402
from openhands_rl_plugin.serving.generator import Generator  # noqa: E402
from openhands_rl_plugin.serving.sampling import Sampled, new_random, sample  # noqa: E402
from openhands_rl_plugin.serving.sampling import SamplingParams as CoreParams  # noqa: E402
from openhands_rl_plugin.serving.sequence import Cancelled, FinishReason, Generation  # noqa: E402
from openhands_rl_plugin.serving.text import AnswerText  # noqa: E402
from openhands_rl_plugin.types import (  # noqa: E402
    Completion,
    JsonObject,
    Message,
    PolicyRef,
    SamplingParams,
    Tokens,
    Usage,
)

from .defaults import merge_sampling  # noqa: E402

DEFAULT_MAX_TOKENS = 512


class _Core(Protocol):
    async def generate(self, prompt_ids: tuple[int, ...], params: Sequence[CoreParams]) -> list[Generation]: ...

    def close(self) -> None: ...


class TransformersEngine:
    """``protocols.LLMEngine`` on a model in this process.

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
        if isinstance(model, str | Path):
            self._core: _Core = _ServedCore(Generator(GeneratorConfig(model=str(model))), adapter, owned=True)
            name = str(model)
        elif isinstance(model, Generator):
            self._core = _ServedCore(model, adapter, owned=False)
            name = model.config.model
        else:
            self._core = _ObjectCore(model, _fast(tokenizer))
            name = model.name_or_path or type(model).__name__
        served = self._core.generator if isinstance(self._core, _ServedCore) else None
        self.tokenizer = _fast(tokenizer if tokenizer is not None or served is None else served.tokenizer)
        self.policy = PolicyRef.from_served_name(base_model or name, adapter or name)
        self._sampling = sampling or SamplingParams()

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` answers as text. Raises ``InfrastructureError`` or ``ModelError``."""
        wanted = merge_sampling(sampling, self._sampling)
        prompt_ids = render(self.tokenizer, messages, tools)
        params = [_core_params(wanted, at) for at in range(n)]
        try:
            answers = await self._core.generate(prompt_ids, params)
        except (Overloaded, Cancelled) as error:
            raise InfrastructureError(str(error)) from error
        except ServingError as error:
            raise ModelError(str(error)) from error
        return [self._completion(prompt_ids, answer, wanted) for answer in answers]

    async def aclose(self) -> None:
        """Stop the generation core, if this engine started it."""
        await asyncio.to_thread(self._core.close)

    def _completion(self, prompt_ids: tuple[int, ...], answer: Generation, wanted: SamplingParams) -> Completion:
        return Completion(
            message=Message(role="assistant", content=answer.text),
            tokens=Tokens(prompt_ids=prompt_ids, sampled_ids=answer.token_ids, logprobs=answer.logprobs),
            finish_reason=answer.finish_reason.value,
            usage=Usage(
                prompt_tokens=len(prompt_ids),
                cached_tokens=answer.cached_tokens,
                completion_tokens=len(answer.sampled),
                calls=1,
            ),
            policy=self.policy,
            sampling=wanted,
        )


def render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], tools: Sequence[JsonObject] = ()
) -> tuple[int, ...]:
    """The token ids that the chat template makes of a conversation, up to where the assistant speaks.

    Raises ``ModelError`` when the tokenizer has no template or the template refuses the conversation.
    """
    conversation = [_template_message(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            conversation, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise ModelError(f"the chat template cannot render this conversation: {error}") from error
    return tuple(tokenizer(str(text), add_special_tokens=False)["input_ids"])


class _ServedCore:
    """The embedded server's generation core."""

    def __init__(self, generator: Generator, adapter: str | None, *, owned: bool) -> None:
        self.generator = generator
        self._adapter = adapter
        self._owned = owned

    async def generate(self, prompt_ids: tuple[int, ...], params: Sequence[CoreParams]) -> list[Generation]:
        tickets = [self.generator.submit(prompt_ids, each, adapter=self._adapter) for each in params]
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
            self.generator.close()


class _ObjectCore:
    """A model object, sampled as it is. Calls wait for each other."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._one_call = threading.Lock()
        self._eos_ids = _eos_ids(model, tokenizer)

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
        limit = self._room(len(prompt_ids))
        ids = torch.tensor([prompt_ids], device=self._model.device)
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        past, logits = output.past_key_values, output.logits[:, -1].float().expand(len(answers), -1)
        past.batch_repeat_interleave(len(answers))
        while not given_up.is_set():
            chosen = sample(logits, [a.params for a in answers], [a.random for a in answers])
            for answer, token in zip(answers, chosen, strict=True):
                answer.add(token, limit)
            if all(answer.finish is not None for answer in answers):
                return
            logits, past = self._next_logits([token.token for token in chosen], past)
        raise Cancelled("the request was cancelled")

    def _next_logits(self, tokens: Sequence[int], past: object) -> tuple[Tensor, object]:
        ids = torch.tensor(tokens, device=self._model.device)[:, None]
        output = self._model(input_ids=ids, past_key_values=past, use_cache=True)
        return output.logits[:, -1].float(), output.past_key_values

    def _room(self, prompt_length: int) -> int:
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if longest is None:
            return 2**31
        if prompt_length >= longest:
            raise ModelError(
                f"the prompt has {prompt_length} tokens and the model takes {longest}: lower max_prompt_length"
            )
        return int(longest) - prompt_length


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

    def add(self, token: Sampled, limit: int) -> None:
        """Take the next token; ``limit`` is what fits the model after the prompt."""
        if self.finish is not None:
            return
        self._sampled.append(token)
        if token.token in self._eos_ids or self._text.add(token.token):
            self.finish = FinishReason.STOP
        elif len(self._sampled) >= min(self.params.max_tokens, limit):
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


def _fast(tokenizer: object) -> PreTrainedTokenizerFast:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError("TransformersEngine needs a fast tokenizer beside a model object: pass tokenizer=...")
    return tokenizer


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if isinstance(token, int))


def _core_params(wanted: SamplingParams, at: int) -> CoreParams:
    """The core's parameters for the ``at``-th of several answers, each with its own seed."""
    params = CoreParams(max_tokens=wanted.max_tokens or DEFAULT_MAX_TOKENS, stop=wanted.stop)
    return replace(
        params,
        temperature=params.temperature if wanted.temperature is None else wanted.temperature,
        top_p=params.top_p if wanted.top_p is None else wanted.top_p,
        seed=None if wanted.seed is None else wanted.seed + at,
    )


def _template_message(message: Message) -> JsonObject:
    """A message as chat templates expect it: a tool call's arguments as an object where they are one."""
    wire: JsonObject = {"role": message.role, "content": message.content or ""}
    if message.tool_calls:
        wire["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": _object(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        wire["name"] = message.name
    return wire


def _object(arguments: str) -> JsonObject | str:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _look_at(future: asyncio.Future[Generation]) -> None:
    """Retrieve what became of an answer that nobody waits for any more, so that asyncio does not report it as lost."""
    if not future.cancelled():
        future.exception()

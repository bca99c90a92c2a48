"""Completions from a Hugging Face causal LM in this process.

A path is served by a ``Generator``, as in the embedded server: continuous batching, prefix cache, LoRA. A model object
is not changed (it may be in training) and is sampled with a plain loop, one call at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS
from openhands_rl_plugin.core.types import Completion, JsonObject, Message, PolicyRef, SamplingParams, Tokens, Usage
from openhands_rl_plugin.models.engines.openai_wire import request_body
from openhands_rl_plugin.models.engines.seeded import merge_sampling
from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.errors import Overloaded, ServingError
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.model import eos_ids
from openhands_rl_plugin.models.generator.sequence import DecodingParams, Generation, sample
from openhands_rl_plugin.models.server.app import PromptRenderer
from openhands_rl_plugin.models.server.wire import ChatCompletionRequest, answer_message

DEFAULT_MAX_TOKENS = 512
_UNBOUNDED = 2**31


_NEUTRAL = SamplingParams.model_validate(NEUTRAL_PARAMETERS)


class TransformersEngine:
    """``protocols.LLMEngine`` on a model in this process. Prompts and tool calls are those of the embedded server.

    Args:
        model: a directory (or cached hub name), a running ``Generator`` (shared: ``aclose`` leaves it running), or a
            model object.
        tokenizer: needed with a model object; the others bring their own.
        adapter: versioned name of the adapter to sample from; it must be loaded in the ``Generator``, or be the
            active one of the model object.
        base_model: name for the records; by default the model's own.
        sampling: defaults for unset parameters; ``max_tokens`` is 512 when neither sets it.

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
        self._owned: Generator | None = None
        if isinstance(model, str | Path | Generator):
            if not isinstance(model, Generator):
                model = self._owned = Generator(GeneratorConfig.model_validate({"model": str(model)}))
            self.tokenizer, name = tokenizer or model.tokenizer, model.config.model
            self._longest, self._generate = model.max_model_len, partial(_generated, model, adapter)
        else:
            if not isinstance(tokenizer, PreTrainedTokenizerFast):
                raise ConfigError("TransformersEngine needs a fast tokenizer beside a model object: pass tokenizer=...")
            self.tokenizer, name = tokenizer, model.name_or_path or type(model).__name__
            known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            self._longest, self._generate = int(known or _UNBOUNDED), _ModelBackend(model, tokenizer).generate
        self.policy = PolicyRef.from_served_name(base_model or name, adapter or name)
        self._prompts = PromptRenderer(self.tokenizer, self._longest, None)
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
            answers = await self._generate(prompt_ids, params)
        except Overloaded as error:
            raise InfrastructureError(str(error)) from error
        except (ServingError, ValidationError) as error:
            raise ModelError(f"the model cannot take this request: {error}") from error
        turn = len(messages)
        return [self._completion(answer, wanted, turn, tools) for answer in answers]

    async def aclose(self) -> None:
        """Stop the generator, if this engine started it."""
        if self._owned is not None:
            await asyncio.to_thread(self._owned.close)

    def _request(
        self, messages: Sequence[Message], tools: Sequence[JsonObject], n: int, wanted: SamplingParams
    ) -> tuple[tuple[int, ...], list[DecodingParams]]:
        """Prompt ids, and one set of parameters an answer, each with its own seed."""
        body = request_body(self.policy.served_name, messages, tools=tools, n=1, sampling=wanted)
        request = ChatCompletionRequest.model_validate(body)
        ids = self._prompts.chat(request)
        room = self._longest - len(ids)
        if room < 1:
            raise ModelError(
                f"the prompt has {len(ids)} tokens and the model takes {self._longest}: lower max_prompt_length"
            )
        limit = min(wanted.max_tokens or DEFAULT_MAX_TOKENS, room)
        params = self._prompts.params(request, prompt_len=len(ids), max_tokens=limit, top_logprobs=None)
        return ids, params.seeds(n)

    def _completion(
        self, answer: Generation, wanted: SamplingParams, turn: int, tools: Sequence[JsonObject]
    ) -> Completion:
        message = answer_message(answer.text, tools, turn=turn)
        return Completion(
            message=message,
            tokens=Tokens.of(answer.prompt_ids, answer.token_ids, answer.logprobs),
            finish_reason="tool_calls" if message.tool_calls else answer.finish_reason,
            usage=Usage(
                prompt_tokens=len(answer.prompt_ids),
                cached_tokens=answer.cached_tokens,
                completion_tokens=len(answer.sampled),
                calls=1,
            ),
            policy=self.policy,
            sampling=merge_sampling(wanted, _NEUTRAL),
        )


async def _generated(
    generator: Generator, adapter: str | None, prompt_ids: tuple[int, ...], params: Sequence[DecodingParams]
) -> list[Generation]:
    futures = [generator.submit(prompt_ids, each, adapter=adapter) for each in params]
    try:
        return await asyncio.gather(*map(asyncio.wrap_future, futures))
    finally:
        for future in futures:
            future.cancel()


class _ModelBackend:
    """A model object, sampled with a plain loop; one call at a time."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._one_call = threading.Lock()
        self._eos_ids = eos_ids(model, tokenizer)

    async def generate(self, prompt_ids: tuple[int, ...], params: Sequence[DecodingParams]) -> list[Generation]:
        cancelled = threading.Event()
        try:
            return await asyncio.to_thread(self._generate, prompt_ids, params, cancelled)
        finally:
            cancelled.set()

    def _generate(
        self, prompt_ids: tuple[int, ...], params: Sequence[DecodingParams], cancelled: threading.Event
    ) -> list[Generation]:
        with self._one_call, torch.inference_mode():
            was_training = self._model.training
            self._model.eval()
            try:
                sequences = [Generation(prompt_ids, each, self._tokenizer, each.max_tokens) for each in params]
                self._sample(prompt_ids, sequences, cancelled)
            finally:
                self._model.train(was_training)
        return sequences

    def _sample(self, prompt_ids: tuple[int, ...], sequences: Sequence[Generation], cancelled: threading.Event) -> None:
        """Grow all sequences by a token a step, after one prefill of the prompt that they share."""
        ids = torch.tensor([prompt_ids], device=self._model.device)
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        past, logits = getattr(output, "past_key_values", None), output.logits[:, -1].float().expand(len(sequences), -1)
        if past is None:
            raise ServingError(
                f"{self._model.config.model_type} keeps its state in no cache of transformers: give the model's "
                "directory to a server"
            )
        # One row for each sequence. Layers with a recurrent state have this method, and not `batch_repeat_interleave`.
        past.reorder_cache(torch.zeros(len(sequences), dtype=torch.int64, device=self._model.device))
        while not cancelled.is_set():
            chosen = sample(logits, [s.params for s in sequences], [s.random for s in sequences])
            for sequence, token in zip(sequences, chosen, strict=True):
                # A finished sequence stays in the batch until the last one ends; its further tokens are dropped.
                if sequence.finish_reason is None:
                    sequence.append(token, self._eos_ids)
            if all(sequence.finish_reason is not None for sequence in sequences):
                return
            ids = torch.tensor([token.token for token in chosen], device=self._model.device)[:, None]
            output = self._model(input_ids=ids, past_key_values=past, use_cache=True)
            logits, past = output.logits[:, -1].float(), output.past_key_values
        raise Overloaded("the request was cancelled")

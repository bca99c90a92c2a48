"""Converts request bodies to token ids and sampling parameters."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerFast

from openhands_rl_plugin.core.templates.chat import TemplateTokenizer, chat_text
from openhands_rl_plugin.core.templates.parsing import RenderError
from openhands_rl_plugin.models.generator.errors import ServingError, StartError
from openhands_rl_plugin.models.generator.sequence import DecodingParams
from openhands_rl_plugin.models.server.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    SamplingFields,
    TokenizeRequest,
)

log = logging.getLogger(__name__)
_LEAST_PER_TOKEN = 16
"""Characters that a token may stand for at least, whatever the longest one in the vocabulary has."""


class PromptRenderer:
    """Renders conversations and texts to token ids with the model's tokenizer. Safe in any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_model_len: int, chat_template: str | None) -> None:
        """``chat_template``: a file in the place of the model's own template, or the name of one of those. Raises
        ``StartError``."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        try:
            named = isinstance(tokenizer.chat_template, dict) and chat_template in tokenizer.chat_template
            read = None if named or not chat_template else Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"cannot read the chat template {chat_template}: {error}") from error
        self._template = read or chat_template
        self._warned = False
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._most_characters = max_model_len * max(longest, _LEAST_PER_TOKEN)

    def chat(self, request: ChatCompletionRequest | TokenizeRequest) -> tuple[int, ...]:
        """The token ids of a conversation, with the generation prompt. Raises ``ServingError``."""
        if not (self._template or self._tokenizer.chat_template):
            raise ServingError(
                "This model has no chat template; start the server with --chat-template, or use /v1/completions."
            )
        assert request.messages is not None
        tools = [tool.model_dump() for tool in request.tools or ()]
        wires = [message.wire for message in request.messages]
        more = {**(request.chat_template_kwargs or {}), "continue_final_message": request.continue_final_message}
        cue, tokenizer = request.add_generation_prompt, cast(TemplateTokenizer, self._tokenizer)
        try:
            text = chat_text(tokenizer, wires, tools, cue=cue, template=self._template, options=more)
        except RenderError as error:
            raise ServingError(f"The chat template rejected the messages: {error}", param="messages") from error
        if tools and not self._warned and "tools" not in tokenizer.get_chat_template(self._template, tools):
            self._warned = True
            log.warning("the chat template does not render tools: use one that does (--chat-template)")
        return self.text(text, special=False)

    def text(self, text: str, *, special: bool) -> tuple[int, ...]:
        """The token ids of a text, with or without special tokens. Raises ``ServingError`` when it cannot fit."""
        if len(text) > self._most_characters:
            raise ServingError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, your request has "
                f"{len(text)} characters, which are more tokens than that. Please reduce the length of the input.",
                param="input_tokens",
            )
        # Unlike ``encode``, a batch leaves the interpreter to other threads while it works.
        return tuple(self._tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)

    def completion(self, request: CompletionRequest) -> list[tuple[int, ...]]:
        """The token ids of each prompt of a text completion."""
        prompts = request.prompts
        return [p if isinstance(p, tuple) else self.text(p, special=request.add_special_tokens) for p in prompts]

    def params(
        self, request: SamplingFields, *, prompt_len: int, max_tokens: int | None, top_logprobs: int | None
    ) -> DecodingParams:
        """Sampling parameters; ``max_tokens=None``: all that fits. Raises ``ServingError`` when it does not fit."""
        room = self._max_model_len - prompt_len
        if max_tokens is not None and max_tokens > room:
            raise ServingError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, you requested "
                f"{max_tokens + prompt_len} tokens ({prompt_len} in the messages, {max_tokens} in the completion). "
                "Please reduce the length of the messages or completion.",
                param="max_tokens",
            )
        return DecodingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(request.top_k or 0, 0),
            min_p=request.min_p or 0.0,
            max_tokens=max(room, 1) if max_tokens is None else max_tokens,
            seed=request.seed,
            stop=request.stops,
            stop_token_ids=request.stop_token_ids or (),
            ignore_eos=request.ignore_eos,
            top_logprobs=top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )

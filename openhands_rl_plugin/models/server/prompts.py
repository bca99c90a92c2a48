"""Converts request bodies to token ids and sampling parameters."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from pydantic import JsonValue
from pydantic_core import from_json
from transformers import PreTrainedTokenizerFast

from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.templates.json_calls import render_tool_call
from openhands_rl_plugin.core.types import FailureKind, ToolCall
from openhands_rl_plugin.models.generator.errors import ServingError, StartError
from openhands_rl_plugin.models.generator.sequence import DecodingParams
from openhands_rl_plugin.models.server.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    SamplingFields,
    TokenizeRequest,
    Tool,
)

log = logging.getLogger(__name__)
_LEAST_PER_TOKEN = 16
"""Characters that a token may stand for at least, whatever the longest one in the vocabulary has."""


class PromptRenderer:
    """Renders conversations and texts to token ids with the model's tokenizer. Safe in any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_model_len: int, chat_template: str | None) -> None:
        """``chat_template``: a file that replaces the model's own template. Raises ``StartError``."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        try:
            own = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
            self._template = Path(chat_template).read_text(encoding="utf-8") if chat_template else own
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"cannot read the chat template {chat_template}: {error}") from error
        self._warned = False
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._most_characters = max_model_len * max(longest, _LEAST_PER_TOKEN)

    def chat(self, request: ChatCompletionRequest | TokenizeRequest) -> tuple[int, ...]:
        """The token ids of a conversation, with the generation prompt. Raises ``ServingError``."""
        if not self._template:
            raise ServingError(
                "This model has no chat template; start the server with --chat-template, or use /v1/completions."
            )
        assert request.messages is not None
        self._warn_if_ignored(request.tools)
        # It accepts any keyword that the template uses.
        render = cast(Callable[..., str], self._tokenizer.apply_chat_template)
        try:
            with boundary(FailureKind.MODEL, "chat template"):
                text = render(
                    [self._message(message) for message in request.messages],
                    tools=[tool.model_dump(exclude_none=True) for tool in request.tools or ()] or None,
                    chat_template=self._template,
                    add_generation_prompt=request.add_generation_prompt,
                    continue_final_message=request.continue_final_message,
                    tokenize=False,
                    **(request.chat_template_kwargs or {}),
                )
        except CaughtFailure as caught:
            reason = caught.failure.message
            raise ServingError(f"The chat template rejected the messages: {reason}", param="messages") from caught
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

    def _message(self, message: ChatMessage) -> dict[str, JsonValue]:
        """One message as chat templates expect it: text content, arguments as an object."""
        content = message.text
        rendered: dict[str, JsonValue] = {"role": message.role}
        calls = message.tool_calls or ()
        if calls and "tool_calls" not in (self._template or ""):
            # A template without tool calls would drop them from the history.
            values = (ToolCall(name=call.function.name, arguments=call.function.arguments or "{}") for call in calls)
            written = (render_tool_call(call) for call in values)
            content = "\n".join([content, *written] if content else written)
        elif calls:
            rendered["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in calls
            ]
        rendered["content"] = content
        if message.name is not None:
            rendered["name"] = message.name
        if message.tool_call_id is not None:
            rendered["tool_call_id"] = message.tool_call_id
        return rendered

    def _warn_if_ignored(self, tools: Sequence[Tool] | None) -> None:
        if tools and "tools" not in (self._template or "") and not self._warned:
            self._warned = True
            log.warning("the chat template does not render tools: use one that does (--chat-template)")


def _arguments(text: str) -> JsonValue:
    """Parsed arguments for the template; text that is not a JSON object is returned unchanged."""
    try:
        value = from_json(text or "{}")
    except ValueError as error:
        if "recursion limit" in str(error):
            raise ServingError("The arguments of a tool call are nested too deeply.", param="messages") from error
        try:
            value = json.loads(text)  # it takes half a surrogate pair
        except (ValueError, RecursionError):
            return text
    return value if isinstance(value, dict) else text

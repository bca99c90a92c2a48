"""Response bodies: OpenAI's fields and vLLM's extensions."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openhands_rl_plugin.core.templates.json_calls import OPEN, fenced_call, parse_tool_call_json
from openhands_rl_plugin.core.templates.parsing import ParsedAnswer
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall
from openhands_rl_plugin.models.server.requests import CompletionRequest

if TYPE_CHECKING:  # torch and transformers take seconds to import, and clients of this module need neither
    from transformers import PreTrainedTokenizerFast

    from openhands_rl_plugin.models.generator.sequence import Generation, SampledToken, ScoredToken

Body = dict[str, Any]
"""A JSON object of a response."""


class Formatter:
    """Writes tokens as text. ``as_ids``: tokens in logprobs are written ``token_id:<id>`` (vLLM's option)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat_logprobs(self, sampled: Sequence[SampledToken]) -> Body:
        """OpenAI's ``logprobs`` object of chat choices."""
        content = [
            {**self._token(one.token, one.logprob), "top_logprobs": [self._token(*each) for each in one.top]}
            for one in sampled
        ]
        return {"content": content}

    def text_logprobs(self, sampled: Sequence[SampledToken], offset: int) -> Body:
        """OpenAI's ``logprobs`` object of text choices; ``offset`` is the text's length before these tokens.

        As in vLLM, the sampled token is always among the alternatives.
        """
        tokens = [self._text(one.token) for one in sampled]
        offsets = [offset]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        return {
            "text_offset": offsets[: len(tokens)],
            "token_logprobs": [one.logprob for one in sampled],
            "tokens": tokens,
            "top_logprobs": [
                {self._text(token): logprob for token, logprob in ((one.token, one.logprob), *one.top)}
                for one in sampled
            ],
        }

    def prompt_logprobs(self, observed: Sequence[ScoredToken | None] | None) -> list[Body | None] | None:
        """vLLM's shape: None for the first token, then the token (and alternatives) by id; rank 1 is the likeliest."""
        if observed is None:
            return None
        return [None if one is None else self._prompt_entry(one) for one in observed]

    def chat_choice(
        self, index: int, answer: Generation, *, logprobs: bool, token_ids: bool, tools: Sequence[JsonObject]
    ) -> Body:
        """A whole chat choice; tool calls are parsed when the request offered tools."""
        parsed = parse_tool_calls(answer.text, tools)
        return {
            "index": index,
            "message": assistant_body(parsed.content, parsed.calls),
            "logprobs": self.chat_logprobs(answer.sampled) if logprobs else None,
            "finish_reason": "tool_calls" if parsed.calls else answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": list(answer.token_ids) if token_ids else None,
        }

    def text_choice(self, index: int, answer: Generation, request: CompletionRequest) -> Body:
        """A whole text choice."""
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self.text_logprobs(answer.sampled, 0) if request.logprobs is not None else None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "prompt_logprobs": self.prompt_logprobs(answer.prompt),
            "token_ids": list(answer.token_ids) if request.return_token_ids else None,
            "prompt_token_ids": list(answer.prompt_ids) if request.return_token_ids else None,
        }

    def _prompt_entry(self, one: ScoredToken) -> Body:
        ranked = [*((token, logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1))]
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": self._decode(token)}
            for token, logprob, rank in (*ranked, (one.token, one.logprob, one.rank))
        }

    def _token(self, token: int, logprob: float) -> Body:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", errors="replace"))}

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._decode(token)

    def _decode(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def tool_call_bodies(calls: Sequence[ToolCall]) -> list[Body]:
    """Parsed calls with new identifiers."""
    return [
        {"id": new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def assistant_body(content: str | None, calls: Sequence[ToolCall]) -> Body:
    """The model's message."""
    return {"role": "assistant", "content": content, "refusal": None, "tool_calls": tool_call_bodies(calls) or None}


def usage(answers: Sequence[Generation], choices_per_prompt: int) -> Body:
    """Counts of a request's answers: each prompt once, all sampled tokens, prompt tokens from the prefix cache."""
    firsts = answers[::choices_per_prompt]
    counted = usage_body(
        sum(len(answer.prompt_ids) for answer in firsts), sum(len(answer.sampled) for answer in answers)
    )
    return counted | {"prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in firsts)}}


def usage_body(prompt: int, sampled: int) -> Body:
    """Token counts of a request, all choices together."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}


def chat_body(identifier: str, model: str, choices: Sequence[Body], counts: Body, **more: object) -> Body:
    """The response of /v1/chat/completions."""
    head = {"id": identifier, "object": "chat.completion", "created": now(), "model": model}
    return {**head, "choices": choices, "usage": counts, **more}


def chunk_body(head: Body, choices: Sequence[Body], **more: object) -> Body:
    """One chunk of a streamed response; ``head``: its id, object, time and model. What is ``None`` is left out."""
    return {**head, "choices": choices, **present(more)}


def chunk_choice(index: int, finish_reason: str | None = None, **more: object) -> Body:
    """The part of one choice in a chunk. Clients expect ``finish_reason`` in each."""
    return {"index": index, "finish_reason": finish_reason, **present(more)}


def present(fields: Body) -> Body:
    """The fields that are not ``None``."""
    return {name: value for name, value in fields.items() if value is not None}


def models_body(cards: Sequence[Body]) -> Body:
    """The response of /v1/models; a card has an ``id`` and a ``root``, and an adapter a ``parent``."""
    head = {"object": "model", "created": now(), "owned_by": "openhands_rl_plugin", "parent": None}
    return {"object": "list", "data": [{**head, "max_model_len": None, **card} for card in cards]}


def new_id(prefix: str) -> str:
    """A new identifier such as ``chatcmpl-...``."""
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since the epoch."""
    return int(time.time())


_OPEN = re.compile(re.escape(OPEN), re.IGNORECASE)
_FENCED = re.compile(r"\s*+(?:`{0,2}\Z|```(?:j|js|jso|json)?\s*+(?:\Z|\{))", re.IGNORECASE)


@dataclass(frozen=True)
class ParsedText:
    """The text around the calls without white space at its ends (None when there is none), and the calls.

    ``spoken`` is that text as the model wrote it: what a stream has sent is the beginning of it.
    """

    content: str | None
    calls: tuple[ToolCall, ...]
    spoken: str = ""


def parse_tool_calls(text: str, tools: Sequence[JsonObject]) -> ParsedText:
    """Split an answer to a request that offered ``tools`` into text and calls.

    Without tools, or if any call is malformed, everything is content.
    """
    parsed = parse_tool_call_json(text) if tools else ParsedAnswer(text)
    if (call := fenced_call(text, tools)) is not None:
        return ParsedText(None, (call,))
    if parsed.problems or not parsed.calls:
        return ParsedText(text, (), text)
    spoken = parsed.before + parsed.after
    return ParsedText(spoken.strip() or None, parsed.calls, spoken)


def answer_message(text: str, tools: Sequence[JsonObject], *, turn: int) -> Message:
    """The answer to a request that offered ``tools``, as the server gives it; ``turn`` numbers its calls."""
    parsed = parse_tool_calls(text, tools)
    calls = tuple(call.model_copy(update={"id": f"call_{turn}_{at}"}) for at, call in enumerate(parsed.calls))
    return Message(role="assistant", content=parsed.content, tool_calls=calls)


def safe_length(text: str) -> int:
    """How much of an unfinished answer is surely plain content: up to a call or what may become one."""
    if _FENCED.match(text):
        return 0
    if match := _OPEN.search(text):
        return match.start()
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text[-length:].lower() == OPEN[:length]:
            return len(text) - length
    return len(text)

"""From finished or partial answers to response bodies."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from openhands_rl_plugin.core.types import ToolCall
from openhands_rl_plugin.models.generator.sampling import SampledToken, ScoredToken
from openhands_rl_plugin.models.generator.sequence import Generation
from openhands_rl_plugin.models.server.requests import CompletionRequest, FunctionCall, MessageToolCall
from openhands_rl_plugin.models.server.responses import (
    AssistantMessage,
    ChatCompletionChoice,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TokenLogprob,
    UsageInfo,
    new_id,
)
from openhands_rl_plugin.models.server.tool_calls import ParsedText, parse_tool_calls


class Formatter:
    """Writes tokens as text. ``as_ids``: tokens in logprobs are written ``token_id:<id>`` (vLLM's option)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat_logprobs(self, sampled: Sequence[SampledToken]) -> ChatLogprobs:
        """OpenAI's ``logprobs`` object of chat choices."""
        return ChatLogprobs(
            content=[
                ContentLogprob(
                    **self._token(one.token, one.logprob).model_dump(),
                    top_logprobs=[self._token(token, logprob) for token, logprob in one.top],
                )
                for one in sampled
            ]
        )

    def text_logprobs(self, sampled: Sequence[SampledToken], offset: int) -> CompletionLogprobs:
        """OpenAI's ``logprobs`` object of text choices; ``offset`` is the text's length before these tokens.

        As in vLLM, the sampled token is always among the alternatives.
        """
        tokens = [self._text(one.token) for one in sampled]
        offsets = [offset]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        return CompletionLogprobs(
            text_offset=offsets[: len(tokens)],
            token_logprobs=[one.logprob for one in sampled],
            tokens=tokens,
            top_logprobs=[
                {self._text(token): logprob for token, logprob in ((one.token, one.logprob), *one.top)}
                for one in sampled
            ],
        )

    def prompt_logprobs(self, observed: Sequence[ScoredToken | None] | None) -> PromptLogprobs | None:
        """vLLM's shape: None for the first token, then the token (and alternatives) by id."""
        if observed is None:
            return None
        return [None if one is None else self._prompt_entry(one) for one in observed]

    def chat_choice(
        self, index: int, answer: Generation, *, logprobs: bool, token_ids: bool, tools: bool
    ) -> ChatCompletionChoice:
        """A whole chat choice; tool calls are parsed when the request offered tools."""
        parsed = parse_tool_calls(answer.text) if tools else ParsedText(answer.text, ())
        return ChatCompletionChoice(
            index=index,
            message=AssistantMessage(content=parsed.content, tool_calls=tool_call_bodies(parsed.calls) or None),
            logprobs=self.chat_logprobs(answer.sampled) if logprobs else None,
            finish_reason="tool_calls" if parsed.calls else answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=list(answer.token_ids) if token_ids else None,
        )

    def text_choice(self, index: int, answer: Generation, request: CompletionRequest) -> CompletionChoice:
        """A whole text choice."""
        return CompletionChoice(
            index=index,
            text=answer.text,
            logprobs=self.text_logprobs(answer.sampled, 0) if request.logprobs is not None else None,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            prompt_logprobs=self.prompt_logprobs(answer.prompt),
            token_ids=list(answer.token_ids) if request.return_token_ids else None,
            prompt_token_ids=list(answer.prompt_ids) if request.return_token_ids else None,
        )

    def _prompt_entry(self, one: ScoredToken) -> dict[int, PromptLogprob]:
        entry = {
            token: PromptLogprob(logprob=logprob, rank=rank, decoded_token=self._decode(token))
            for rank, (token, logprob) in enumerate(one.top, 1)
        }
        entry[one.token] = PromptLogprob(logprob=one.logprob, rank=one.rank, decoded_token=self._decode(one.token))
        return entry

    def _token(self, token: int, logprob: float) -> TokenLogprob:
        text = self._text(token)
        return TokenLogprob(token=text, logprob=logprob, bytes=list(text.encode("utf-8", errors="replace")))

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._decode(token)

    def _decode(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def tool_call_bodies(calls: Sequence[ToolCall]) -> list[MessageToolCall]:
    """Parsed calls with new identifiers."""
    return [
        MessageToolCall(id=new_id("call"), function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in calls
    ]


def usage(answers: Sequence[Generation], choices_per_prompt: int) -> UsageInfo:
    """Counts of a request's answers: each prompt once, all sampled tokens."""
    firsts = answers[::choices_per_prompt]
    prompt = sum(len(answer.prompt_ids) for answer in firsts)
    sampled = sum(len(answer.sampled) for answer in answers)
    return UsageInfo(
        prompt_tokens=prompt,
        completion_tokens=sampled,
        total_tokens=prompt + sampled,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(answer.cached_tokens for answer in firsts)),
    )

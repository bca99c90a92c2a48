"""OpenRLHF's rollout engine as an ``LLMEngine``: ids in, ids out; sampled text is never tokenised again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Protocol

from openhands_rl_plugin.core.errors import ModelError
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.templates.chat import chat_text
from openhands_rl_plugin.core.types import (
    Completion,
    JsonObject,
    Message,
    PolicyRef,
    SamplingParams,
    Tokens,
    Usage,
)
from openhands_rl_plugin.models.server.responses import answer_message

_CHOSEN_BY_STRATEGY = ("temperature", "top_p", "seed")


class TokenGenerator(Protocol):
    """The method of OpenRLHF's ``RolloutRayActor`` that is used; it returns vLLM's ``RequestOutput``."""

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Sample one answer."""
        ...


class OpenRLHFEngine:
    """The engine of one episode.

    Args:
        generator: samples the answers.
        tokenizer: a Hugging Face tokenizer with a chat template.
        sampling: OpenRLHF's ``SamplingParams`` of vLLM; copied for every answer, never changed.
        longest: maximal number of tokens of prompt and answers together.
        answer: maximal number of tokens of one answer.
    """

    def __init__(self, generator: TokenGenerator, tokenizer: Any, sampling: Any, *, longest: int, answer: int) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._template = TokenizerTemplate(tokenizer)
        self._sampling = deepcopy(sampling)
        self._longest = longest
        self._answer = min(answer, sampling.max_tokens or answer)
        self._contexts: dict[tuple[Message, ...], tuple[int, ...]] = {}
        self.policy = PolicyRef(base_model=str(getattr(tokenizer, "name_or_path", "") or "openrlhf"))
        self.full = False
        """Whether a conversation has left no room for another answer."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` answers. Raises ``ModelError`` when there is no room for one."""
        prompt = self._prompt(tuple(messages), tools)
        room = self._longest - len(prompt)
        if room < 1:
            self.full = True
            raise ModelError(f"the conversation has {len(prompt)} tokens of {self._longest}: raise --data.max_len")
        wanted = self._wanted(sampling, room)
        answers = await asyncio.gather(*(self._generator.generate(list(prompt), deepcopy(wanted)) for _ in range(n)))
        return [self._completion(tuple(messages), prompt, answer.outputs[0], tools) for answer in answers]

    def _prompt(self, messages: tuple[Message, ...], tools: Sequence[JsonObject]) -> tuple[int, ...]:
        """The ids of the longest known prefix that ends with an answer, and those of the text after it."""
        for end in range(len(messages), 0, -1):
            if (known := self._contexts.get(messages[:end])) is not None:
                behind = self._ids(text_behind(self._template, messages, end - 1, tools))
                # A complete answer ends with its sampled end-of-turn token; a truncated one has none.
                return known + (behind[1:] if known[-1:] == behind[:1] else behind)
        return self._ids(self._template.render(messages, tools))

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _wanted(self, sampling: SamplingParams | None, room: int) -> Any:
        wanted = deepcopy(self._sampling)
        asked = (sampling.max_tokens if sampling is not None else None) or self._answer
        wanted.max_tokens = min(asked, self._answer, room)
        for name in _CHOSEN_BY_STRATEGY:
            if sampling is not None and (value := getattr(sampling, name)) is not None:
                setattr(wanted, name, value)
        if sampling is not None and sampling.stop:
            wanted.stop = list(sampling.stop)
        return wanted

    def _completion(
        self, messages: tuple[Message, ...], prompt: tuple[int, ...], output: Any, tools: Sequence[JsonObject]
    ) -> Completion:
        sampled = tuple(output.token_ids)
        # Not the engine's own text: OpenRLHF requests it with its special tokens.
        text = str(self._tokenizer.decode(list(sampled), skip_special_tokens=True))
        message = answer_message(text, tools, turn=len(messages))
        self._contexts[(*messages, message)] = prompt + sampled
        given = output.logprobs or ()
        return Completion(
            message=message,
            tokens=Tokens.of(
                prompt, sampled, (each[token].logprob for each, token in zip(given, sampled, strict=False))
            ),
            finish_reason=output.finish_reason,
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(sampled), calls=1),
            policy=self.policy,
        )


_STAND_IN = "STAND-IN-FOR-WHAT-WAS-SAMPLED"


class Renderer(Protocol):
    """Renders a conversation as the text of a prompt; every ``ChatTemplate`` is one."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        """The text."""
        ...


class TokenizerTemplate:
    """The chat template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        """The text of the prompt. Raises ``RenderError``."""
        return chat_text(self._tokenizer, [to_wire(each) for each in messages], tools, cue=add_generation_prompt)


def text_behind(renderer: Renderer, messages: Sequence[Message], answer: int, tools: Sequence[JsonObject]) -> str:
    """The text after the answer at index ``answer`` in a prompt of ``messages``: the end of its turn and later turns.

    Raises ``ModelError`` for a template that omits answers.
    """
    shown = [*messages[:answer], Message(role="assistant", content=_STAND_IN), *messages[answer + 1 :]]
    before, found, behind = renderer.render(shown, tools).rpartition(_STAND_IN)
    if not found or _STAND_IN in before:
        raise ModelError("the chat template omits the assistant's answers; use a model with another template")
    return behind

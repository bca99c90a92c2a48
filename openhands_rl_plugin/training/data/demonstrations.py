"""Token ids of demonstrations, which no model sampled: rendered once with the model's own chat template.

Episodes of a policy have recorded ids and are never rendered again. A demonstration has none, so its ids are made
exactly as a server makes prompts, and every turn is checked to extend the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import Message, Sample, Trajectory


class ChatTokenizer(Protocol):
    """The method of a Hugging Face tokenizer that is used here."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: object) -> object:
        """Render a conversation; with ``return_dict=False`` the result is a list of token ids."""
        ...


def demonstration_sample(trajectory: Trajectory, tokenizer: ChatTokenizer) -> Sample:
    """One sample of the acted path; the loss mask covers the assistant turns, including their end-of-turn token.

    Raises ``TrainingError`` when the template rewrites earlier turns, because then no single sequence holds all
    prompts, or when the tokenizer has no end-of-turn token.
    """
    if tokenizer.eos_token_id is None:
        raise TrainingError("the tokenizer names no end-of-sequence token, so a turn's end cannot be trained")
    messages = trajectory.messages()
    ids: list[int] = []
    mask: list[bool] = []
    for at, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = _render(tokenizer, messages[:at], cue=True)
        answered = _render(tokenizer, messages[: at + 1], cue=False)
        if prompt[: len(ids)] != ids or answered[: len(prompt)] != prompt:
            raise TrainingError(
                f"trajectory {trajectory.id}: the chat template rewrites earlier turns, so the demonstration is not "
                "one sequence; use a template whose prompts only grow"
            )
        answer = _through_end_token(answered[len(prompt) :], tokenizer.eos_token_id)
        mask += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
        ids = prompt + answer
    return Sample(
        trajectory_id=trajectory.id,
        leaf=trajectory.head or 0,
        input_ids=tuple(ids),
        mask=tuple(mask),
        logprobs=(0.0,) * len(ids),
        policy=trajectory.policy,
    )


def _render(tokenizer: ChatTokenizer, messages: Sequence[Message], *, cue: bool) -> list[int]:
    conversation = [{"role": message.role, "content": message.content or ""} for message in messages]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=True, add_generation_prompt=cue, return_dict=False)
    if not isinstance(rendered, list):
        raise TrainingError("the tokenizer did not render the conversation as a list of token ids")
    return rendered


def _through_end_token(ids: list[int], end: int) -> list[int]:
    if end not in ids:
        raise TrainingError("the chat template does not end an answer with the tokenizer's end-of-sequence token")
    return ids[: ids.index(end) + 1]

"""The verifier's prompt about an episode, as token ids that end where the label starts.

The prompt ends with ``<judgement>`` and the label is the next token, in training and in scoring. A log that is too long
for the context is truncated in the middle; the instruction, the final patch and the position of the label are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.core.judgements import patch_of
from openhands_rl_plugin.core.messages import transcript
from openhands_rl_plugin.core.templates import (
    LogSection,
    RenderError,
    TemplateTokenizer,
    chat_text,
    joined,
    log_sections,
    question,
)
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.training.data.demonstrations import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

JUDGEMENT = "<judgement>"
YES, NO = "YES", "NO"

_PLACE = "@@interaction-log@@"
# The text around the log is encoded with it, up to a space after a word: in some vocabularies adjacent line ends and
# punctuation are one token.
_OPEN, _CLOSE = " ===\n", "\n=== END INTERACTION"
_LEFT_OUT = "[... the log is longer than the context; what stood here is left out ...]\n"
_PATCH_TITLE = "*** Final patch of the assistant ***\n"
_LEAST_ROOM = 64
"""The least number of tokens for the log; a chosen value: fewer hold no more than a sentence or two."""


@dataclass(frozen=True)
class VerifierPrompt:
    """``ids``: the prompt, up to and including ``<judgement>``. ``truncated``: whether parts of the log are omitted."""

    ids: tuple[int, ...]
    truncated: bool


class VerifierPrompts:
    """Renders episodes with a model's own chat template.

    ``max_length``: tokens of a prompt and its label. Raises ``TrainingError`` for a tokenizer without a chat template,
    for one in which YES and NO have the same first token, and for a ``max_length`` that leaves no room for the log.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
        self.max_length = max_length
        self._tokenizer = tokenizer
        self.yes, self.no = (self._first(label) for label in (YES, NO))
        """The token ids of the labels."""
        if self.yes == self.no:
            raise TrainingError(
                f"the tokenizer begins {YES} and {NO} with the same token, so one token cannot tell them apart; use "
                "another base model"
            )
        before, after = self._around()
        self._before, self._after = self._encode(before, special=True), self._encode(after, special=True)
        self._room = max_length - 1 - len(self._before) - len(self._after)
        if self._room < _LEAST_ROOM:
            raise TrainingError(
                f"{max_length} tokens (the smaller of max_length and what the model takes) leave no room for the "
                f"interaction: at least {max_length - self._room + _LEAST_ROOM} are needed"
            )

    def of(self, trajectory: Trajectory) -> VerifierPrompt:
        """The prompt about an episode, however often its history was condensed."""
        sections = log_sections(transcript(trajectory))
        log = self._encode(_text(sections))
        truncated = len(log) > self._room
        if truncated:
            log = self._cut(sections, patch_of(trajectory))
        return VerifierPrompt((*self._before, *log, *self._after), truncated)

    def _cut(self, sections: Sequence[LogSection], patch: str | None) -> list[int]:
        """The instruction, up to half of the room, a note of the omission, and the end of the turns and of the patch.

        The agent's system message is omitted, because it is the same in all attempts.
        """
        turns = [section for section in sections if section.kind == "turn"]
        if patch and patch.strip():
            turns.append(LogSection("turn", f"{_PATCH_TITLE}{patch}\n"))
        instruction = joined([section for section in sections if section.kind == "instruction"])
        begin, end = self._encode(f"{_OPEN}{instruction}"), self._encode(f"{joined(turns)}{_CLOSE}")
        head = [*begin[: self._room // 2], *self._encode(_LEFT_OUT)][: self._room]
        return [*head, *end[max(0, len(end) + len(head) - self._room) :]]

    def _around(self) -> tuple[str, str]:
        try:
            rendered = chat_text(cast(TemplateTokenizer, self._tokenizer), question(_PLACE), cue=True)
        except RenderError as error:
            raise TrainingError(
                f"the verifier's question cannot be rendered with the model's chat template: {error}"
            ) from error
        before, found, after = rendered.partition(f"{_OPEN}{_PLACE}{_CLOSE}")
        if not found:
            raise TrainingError("the model's chat template changes the user's message; use another base model")
        return before, after + JUDGEMENT

    def _first(self, label: str) -> int:
        return self._encode(label)[0]

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids; in a log the names of special tokens are plain text, so that the log cannot end the user's message."""
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=not special)["input_ids"]  # pyrefly: ignore[bad-return]


def _text(sections: Sequence[LogSection]) -> str:
    return f"{_OPEN}{joined(sections)}{_CLOSE}"


def prompts_for(model: str, max_length: int) -> VerifierPrompts:
    """Prompts with the tokenizer in a model's directory, no longer than the model is made for. Raises
    ``TrainingError``.
    """
    path = Path(model) / "config.json"
    try:
        longest = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings", max_length)
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"cannot read {path}: {describe(error)} (give a directory with config.json and *.safetensors)"
        ) from error
    return VerifierPrompts(load_tokenizer(model), min(max_length, longest))

"""Scores prompts with a trained verifier in this process; common prefixes are computed once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.core.files import file_sha256
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE
from openhands_rl_plugin.training.data.batch import pack
from openhands_rl_plugin.training.policies.adapter_shape import read_shape
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.verifier.card import VerifierCard, VerifierOutput
from openhands_rl_plugin.training.verifier.prompt import VerifierPrompts, load_tokenizer


class VerifierModel(TrainablePolicy):
    """A base model with a verifier's adapter. Any thread may call it; calls wait for each other.

    ``tokens_per_pass``: tokens of a micro-batch, common prefixes counted once; a longer prompt is a micro-batch of its
    own. Raises ``TrainingError`` when the model or the adapter cannot be used, ``ConfigError`` when the directory has
    no verifier.
    """

    def __init__(
        self,
        directory: Path,
        *,
        model: str | Path | None = None,
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        tokens_per_pass: int = 16_384,
    ) -> None:
        self.card = VerifierCard.load(directory)
        if weights_sha256(directory) != self.card.sha256:
            raise TrainingError(f"{directory / WEIGHTS_FILE} was changed since it was made (sha256 differs)")
        base = str(model or self.card.model)
        self.prompts = VerifierPrompts(load_tokenizer(base), self.card.max_length)
        if (self.prompts.yes, self.prompts.no) != (self.card.yes, self.card.no):
            raise TrainingError(f"{base} has another tokenizer than the model that {directory} was trained on")
        super().__init__(base, _settings_of(directory, self.card).model_copy(update={"dtype": dtype}))
        self.load(directory)
        self._tokens_per_pass = tokens_per_pass
        self._turn = threading.Lock()

    @torch.no_grad()
    def judge(self, prompts: Sequence[tuple[int, ...]]) -> list[VerifierOutput]:
        """One output per prompt, in order. Raises ``TrainingError`` for a prompt that is too long for the model."""
        longest = max(map(len, prompts), default=0)
        if longest > self.longest:
            raise TrainingError(
                f"a prompt has {longest} tokens, but the model is made for {self.longest}; train the verifier with a "
                "smaller max_length"
            )
        verdicts: dict[tuple[int, ...], VerifierOutput] = {}
        with self._turn:
            for group in pack([_sample(prompt) for prompt in set(prompts)], self._tokens_per_pass):
                sequences = [sample.input_ids for sample in group]
                verdicts.update(zip(sequences, self._verdicts(sequences), strict=True))
        return [verdicts[prompt] for prompt in prompts]

    def _verdicts(self, sequences: Sequence[tuple[int, ...]]) -> list[VerifierOutput]:
        # One row per prompt: few, because a prompt has at least a few hundred tokens.
        logits = self.last_logits(sequences)
        labels = logits[:, [self.card.yes, self.card.no]]
        margins = labels[:, 0] - labels[:, 1]
        masses = (labels.logsumexp(1) - logits.logsumexp(1)).exp()
        return [VerifierOutput(*pair) for pair in zip(margins.tolist(), masses.tolist(), strict=True)]


def weights_sha256(directory: Path) -> str:
    """Hexadecimal digest of an adapter's weights. Raises ``TrainingError``."""
    path = directory / WEIGHTS_FILE
    try:
        return file_sha256(path)
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {describe(error)}") from error


def _sample(prompt: tuple[int, ...]) -> Sample:
    return Sample.model_construct(trajectory_id="", leaf=0, input_ids=prompt, mask=(), logprobs=())


def _settings_of(directory: Path, card: VerifierCard) -> TrainingSettings:
    shape = read_shape(directory)
    try:
        return TrainingSettings.model_validate(
            {
                "lora_rank": shape.r,
                "lora_alpha": shape.lora_alpha,
                "lora_variant": shape.variant,
                "target_modules": shape.layers,
                "adapt_experts": card.adapt_experts,
            }
        )
    except ValidationError as error:
        raise TrainingError(f"the adapter in {directory} cannot be used here: {describe(error)}") from error

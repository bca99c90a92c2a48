"""Trains a LoRA adapter on recorded samples: fine-tuning and REINFORCE with a clipped, token-mean objective."""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from openhands_rl_plugin.errors import TrainingError
from openhands_rl_plugin.settings import TrainingSettings
from openhands_rl_plugin.training.batch import pack
from openhands_rl_plugin.training.checkpoint import load_checkpoint, save_checkpoint
from openhands_rl_plugin.training.layout import lay_out
from openhands_rl_plugin.training.loss import Diagnostics, diagnose, policy_losses
from openhands_rl_plugin.training.metrics import TrainMetrics, TrainProgress
from openhands_rl_plugin.training.policy import WEIGHTS_FILE, TrainablePolicy
from openhands_rl_plugin.types import Adapter, Probe, Sample

OnProgress = Callable[[TrainProgress], None]
"""Called after every optimiser step."""

PROBE_TOLERANCE = {"bfloat16": 0.15, "float32": 0.01}
"""Mean absolute difference, in nats, between two sound implementations that sum in another order."""

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Tokens:
    """The trained tokens of one pass, all tensors [K] float32."""

    logprobs: Tensor
    entropies: Tensor
    recorded: Tensor
    advantages: Tensor


TokenLosses = Callable[[_Tokens], tuple[Tensor, Diagnostics]]


@dataclass
class _Tally:
    """Sums over one call."""

    started: float = field(default_factory=time.monotonic)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    skipped_steps: int = 0
    skipped_samples: int = 0
    tokens: int = 0

    def metrics(self, samples: int) -> TrainMetrics:
        steps = len(self.losses)
        return TrainMetrics(
            steps=steps,
            skipped_steps=self.skipped_steps,
            samples=samples,
            skipped_samples=self.skipped_samples,
            tokens=self.tokens,
            trained_tokens=self.diagnostics.tokens,
            first_loss=self.losses[0] if steps else 0.0,
            last_loss=self.losses[-1] if steps else 0.0,
            loss=sum(self.losses) / steps if steps else 0.0,
            grad_norm=sum(self.norms) / steps if steps else 0.0,
            ratio=self.diagnostics.ratio,
            approx_kl=self.diagnostics.approx_kl,
            clip_share=self.diagnostics.clip_share,
            entropy=self.diagnostics.entropy,
            seconds=time.monotonic() - self.started,
        )


class LoraTrainer:
    """One adapter of one base model and its optimiser. The same settings, calls and samples give the same weights.

    ``adapter``: start from its weights instead of fresh ones. Raises ``TrainingError`` when the model or the adapter
    cannot be used.
    """

    def __init__(self, model_path: str | Path, settings: TrainingSettings, *, adapter: Adapter | None = None) -> None:
        self.settings = settings
        self.step = 0
        """Optimiser steps so far, over all calls."""
        self._policy = TrainablePolicy(model_path, settings)
        self.parameters = self._policy.parameters
        """The adapter's float32 weights by name."""
        if adapter is not None:
            _check_file(adapter)
            self._policy.load(Path(adapter.path))
        self._optimizer = torch.optim.AdamW(
            list(self._policy.parameters.values()),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def sft(self, samples: Sequence[Sample], on_progress: OnProgress | None = None) -> TrainMetrics:
        """Fine-tune for ``num_epochs``: minimise the mean negative log-likelihood of the sampled tokens, in nats.

        Advantages and recorded logprobs are not looked at. Raises ``TrainingError``.
        """
        return self._train(samples, _sft_losses, lambda sample: True, on_progress)

    def reinforce(self, samples: Sequence[Sample], on_progress: OnProgress | None = None) -> TrainMetrics:
        """REINFORCE for ``num_epochs`` with the recorded logprobs as the old policy and PPO's clip around it.

        Samples with an advantage of zero are not computed; their tokens still count in the mean. A step that has
        no other samples is skipped. Raises ``TrainingError``.
        """
        bounds = {"clip_low": self.settings.clip_low, "clip_high": self.settings.clip_high}

        def losses(tokens: _Tokens) -> tuple[Tensor, Diagnostics]:
            of_tokens = policy_losses(tokens.logprobs, tokens.recorded, tokens.advantages, **bounds)
            return of_tokens, diagnose(tokens.logprobs, tokens.recorded, tokens.advantages, tokens.entropies, **bounds)

        return self._train(samples, losses, lambda sample: sample.has_signal, on_progress)

    def probe(self, token_ids: Sequence[int], max_difference: float | None = None) -> Probe:
        """The current adapter's logprobs of fixed ids, to check a server against."""
        ids = tuple(token_ids)
        return Probe(
            token_ids=ids,
            logprobs=tuple(self._policy.sequence_logprobs(ids)),
            max_difference=max_difference or PROBE_TOLERANCE[self.settings.dtype],
        )

    def save_adapter(self, directory: Path) -> None:
        """Write the adapter in PEFT's format (adapter_config.json, adapter_model.safetensors)."""
        directory.mkdir(parents=True, exist_ok=True)
        self._policy.save(directory)

    def save_state(self, directory: Path) -> None:
        """Write weights, optimiser and step counter into one file, atomically. Raises ``StorageError``.

        Shuffling depends on the seed and the step counter only, so these are the whole state of the random numbers.
        """
        tensors = {f"weights.{name}": tensor for name, tensor in self._policy.weights().items()}
        for name, parameter in self._policy.parameters.items():
            for key, moment in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = moment
        save_checkpoint(directory, tensors, {"step": str(self.step), "seed": str(self.settings.seed)})

    def load_state(self, directory: Path) -> None:
        """Continue from ``save_state`` exactly where it was. Raises ``TrainingError`` when it does not fit."""
        tensors, counters = load_checkpoint(directory)
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = tensor
        try:
            step = int(counters["step"])
            moments = {name: {key: groups[key][name] for key in _MOMENTS} for name in groups.get("exp_avg", {})}
            parameters = {name: self._policy.parameters[name] for name in moments}
        except (KeyError, ValueError) as error:
            raise TrainingError(f"{directory} does not hold a training state of this adapter") from error
        self._policy.set_weights(groups.get("weights", {}), str(directory))
        self._optimizer.state.clear()
        for name, parameter in parameters.items():
            self._optimizer.state[parameter] = {
                key: moment if key == "step" else moment.to(parameter.device) for key, moment in moments[name].items()
            }
        self.step = step

    def _train(
        self,
        samples: Sequence[Sample],
        token_losses: TokenLosses,
        counts: Callable[[Sample], bool],
        on_progress: OnProgress | None,
    ) -> TrainMetrics:
        self._check(samples)
        batches = self._batches(samples)
        tally = _Tally()
        for done, batch in enumerate(batches, start=1):
            live = [sample for sample in batch if counts(sample)]
            tally.skipped_samples += len(batch) - len(live)
            if live:
                self._optimiser_step(live, sum(sum(sample.mask) for sample in batch), token_losses, tally)
            else:
                tally.skipped_steps += 1
            if on_progress is not None:
                loss, norm = (tally.losses[-1], tally.norms[-1]) if live else (0.0, 0.0)
                on_progress(TrainProgress(done, len(batches), loss, norm))
        return tally.metrics(len(samples))

    def _check(self, samples: Sequence[Sample]) -> None:
        if not samples:
            raise TrainingError("there is nothing to train on: no samples were given")
        for sample in samples:
            where, length = f"trajectory {sample.trajectory_id}", len(sample.input_ids)
            if not (length == len(sample.mask) == len(sample.logprobs)) or True not in sample.mask[1:]:
                raise TrainingError(f"{where}: a sample needs a mask and a logprob for each token, and a sampled token")
            if sample.mask[0]:
                raise TrainingError(f"{where}: the first token has no context, so it cannot have been sampled")
            if length > self._policy.longest:
                raise TrainingError(
                    f"{where}: {length} tokens, but the model is made for {self._policy.longest}; lower "
                    "max_prompt_length"
                )
            if min(sample.input_ids) < 0 or max(sample.input_ids) >= self._policy.vocabulary:
                raise TrainingError(f"{where}: a token id is not in the model's vocabulary; was it another model's?")

    def _batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Optimiser batches of all epochs: ``batch_size`` trajectories each, in a new order every epoch."""
        by_trajectory: dict[str, list[Sample]] = {}
        for sample in samples:
            by_trajectory.setdefault(sample.trajectory_id, []).append(sample)
        size = self.settings.batch_size
        batches: list[list[Sample]] = []
        for epoch in range(self.settings.num_epochs):
            order = list(by_trajectory)
            random.Random(f"{self.settings.seed}:{self.step}:{epoch}").shuffle(order)
            for start in range(0, len(order), size):
                batches.append([sample for name in order[start : start + size] for sample in by_trajectory[name]])
        return batches

    def _optimiser_step(self, live: list[Sample], tokens: int, token_losses: TokenLosses, tally: _Tally) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for group in pack(live, self.settings.max_tokens_per_pass):
            loss += self._backward(group, tokens, token_losses, tally)
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters.values(), self.settings.max_grad_norm).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"step {self.step + 1}: the loss is {loss} and the gradient norm {norm}; the weights are unchanged. "
                "Lower learning_rate, or check the recorded logprobs"
            )
        warmup = min(1.0, (self.step + 1) / (self.settings.warmup_steps + 1))
        self._optimizer.param_groups[0]["lr"] = self.settings.learning_rate * warmup
        self._optimizer.step()
        self.step += 1
        tally.losses.append(loss)
        tally.norms.append(norm)

    def _backward(self, group: list[Sample], tokens: int, token_losses: TokenLosses, tally: _Tally) -> float:
        """Add one pass's share of the batch's gradient; returns its share of the loss."""
        wanted = [(s, t) for s, sample in enumerate(group) for t, sampled in enumerate(sample.mask) if sampled]
        logprobs, entropies = self._policy.logprobs(lay_out([sample.input_ids for sample in group]), wanted)
        recorded = logprobs.new_tensor([group[s].logprobs[t] for s, t in wanted])
        advantages = logprobs.new_tensor([group[s].advantage_at(t) for s, t in wanted])
        losses, diagnostics = token_losses(_Tokens(logprobs, entropies, recorded, advantages))
        loss = losses.sum() / tokens
        loss.backward()
        tally.diagnostics += diagnostics
        tally.tokens += sum(len(sample.input_ids) for sample in group)
        return loss.item()


def _sft_losses(tokens: _Tokens) -> tuple[Tensor, Diagnostics]:
    entropy = tokens.entropies.mean().item()
    return -tokens.logprobs, Diagnostics(tokens=tokens.logprobs.numel(), entropy=entropy)


def _check_file(adapter: Adapter) -> None:
    path = Path(adapter.path) / WEIGHTS_FILE
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TrainingError(f"adapter {adapter.name}: cannot read {path}: {error.strerror}") from error
    if digest != adapter.sha256:
        raise TrainingError(f"adapter {adapter.name}: {path} was changed since it was made (sha256 differs)")

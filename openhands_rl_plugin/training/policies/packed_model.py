"""A causal language model over packed sequences, checked against the original. Subclasses define what is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.training.data.layout import Layout, lay_out
from openhands_rl_plugin.training.losses.logprobs import token_logprobs
from openhands_rl_plugin.training.policies.packed_attention import ATTENTION_NAME, PackedRows, hidden_states

# Packing and fused layers reorder sums only; an architecture that they do not fit is off by far more than that.
# On unlikely text bfloat16 alone moves logprobs by 0.1 nats on average; a wrong mask moves them by whole nats.
_SELF_CHECK_TOLERANCE = {torch.bfloat16: 0.3, torch.float32: 1e-3}

PROBE_TOLERANCE = {torch.bfloat16: 0.15, torch.float32: 0.01}
"""Mean absolute difference, in nats, between two sound implementations that sum in another order."""


class PackedModel(ABC):
    """A model that computes logprobs of packed sequences. Raises ``TrainingError`` when it cannot be trained."""

    def __init__(self, model_path: str | Path, settings: TrainingSettings) -> None:
        self.model_path = str(model_path)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = _dtype(settings.dtype, self.device)
        self._entropy_gradient = settings.entropy_coefficient > 0
        self._base = self._open()
        self.longest: int = self._base.config.max_position_embeddings
        """The model's maximal context length, in tokens."""
        self.vocabulary: int = self._base.config.vocab_size
        expected = self._plain_logprobs()
        self._prepare(settings)
        self._check_packed(expected)
        if settings.gradient_checkpointing:
            _checkpoint_layers(self._base, self.model_path)
        self.parameters = self._trained()
        """The trained parameters, float32, by name."""

    @property
    def probe_tolerance(self) -> float:
        """Largest accepted mean absolute difference of a server's logprobs from these, in nats."""
        return PROBE_TOLERANCE[self.dtype]

    def logprobs(self, layout: Layout, wanted: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies ([K] float32) of tokens ``t > 0`` of sequences ``s``; ``wanted``: pairs ``(s, t)``.

        With gradients enabled, they reach the trained parameters; those of the entropies with an entropy bonus only.
        """
        rows = [layout.rows[s][t - 1] for s, t in wanted]
        targets = [layout.ids[layout.rows[s][t]] for s, t in wanted]
        return self._compute(
            PackedRows(layout, self.device),
            torch.tensor(rows, device=self.device),
            torch.tensor(targets, device=self.device),
        )

    def sequence_logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        """Logprobs of tokens 1 .. T-1 given the ones before."""
        with torch.no_grad():
            values, _ = self.logprobs(lay_out([token_ids]), [(0, t) for t in range(1, len(token_ids))])
        return values.tolist()

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Use the reference model inside the block, where it is still available."""
        raise TrainingError('full fine-tuning keeps no reference model; set kl = "none", or train an adapter')
        yield

    @property
    def sharded(self) -> bool:
        """Whether every rank has only its shard of the trained parameters, in ``weights`` and ``parameters``."""
        return False

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The trained parameters, under their names in the saved files."""

    @abstractmethod
    def set_weights(self, tensors: dict[str, Tensor], source: str) -> None:
        """Load the result of ``weights``. Raises ``TrainingError`` when names or shapes differ."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the trained parameters into an existing directory."""

    @abstractmethod
    def _prepare(self, settings: TrainingSettings) -> None:
        """Replace layers of the model by ones for training."""

    @abstractmethod
    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters for the optimiser."""

    def _open(self) -> PreTrainedModel:
        return load_model(self.model_path, self.dtype, self.device)

    def _compute(self, packed: PackedRows, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """[K] logprobs and entropies of ``targets``, the tokens after ``rows``."""
        head = self._base.get_output_embeddings()
        assert isinstance(head, nn.Linear)  # checked when it was loaded
        return self._score(hidden_states(self._base, packed)[rows], targets, head)

    def _score(self, hidden: Tensor, targets: Tensor, head: nn.Linear) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, targets, head.weight, head.bias, entropy_gradient=self._entropy_gradient)

    @torch.no_grad()
    def _plain_logprobs(self) -> Tensor:
        parts = []
        for sequence in self._check_sequences():
            ids = torch.tensor([sequence], device=self.device)
            logits = self._base(ids, use_cache=False).logits[0, :-1].float()
            parts.append(torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0])
        return torch.cat(parts)

    def _check_packed(self, expected: Tensor) -> None:
        """Two packed sequences with a common prefix must agree with the original model on each of them alone."""
        sequences = self._check_sequences()
        wanted = [(s, t) for s, sequence in enumerate(sequences) for t in range(1, len(sequence))]
        try:
            self._base.set_attn_implementation(ATTENTION_NAME)
            with torch.no_grad():
                actual, _ = self.logprobs(lay_out(sequences), wanted)
        except (NotImplementedError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise TrainingError(f"{self.model_path}: this architecture cannot be trained: {describe(error)}") from error
        difference = (actual - expected).abs().mean().item()
        if not difference <= _SELF_CHECK_TOLERANCE[self._base.dtype]:
            raise TrainingError(
                f"{self.model_path}: this architecture cannot be trained: packed logprobs differ from the model's by "
                f"{difference:.3g} on average"
            )

    def _check_sequences(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ids = tuple((11 * i + 3) % 97 % self.vocabulary for i in range(48))
        return ids, ids[:24] + ids[:24]


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """``"auto"`` as in the embedded server: emulated bfloat16 products take eight times as long as float32."""
    if name != "auto":
        return getattr(torch, name)
    native = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def load_model(path: str, dtype: torch.dtype, device: torch.device, **options: Any) -> PreTrainedModel:
    """A frozen model, from local files only. Raises ``TrainingError``."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, local_files_only=True, **options
        )
    except (OSError, ValueError, ImportError) as error:
        raise TrainingError(
            f"cannot load the model {path}: {describe(error)} (give a directory with config.json and *.safetensors)"
        ) from error
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise TrainingError(f"{path}: this architecture cannot be trained: its output layer is not linear")
    nn.Module.to(model, device)  # transformers' own `to` hides its signature from type checkers
    return model.eval().requires_grad_(False)


def _checkpoint_layers(base: PreTrainedModel, path: str) -> None:
    """Gradient checkpointing: save only each layer's input for the backward pass, and recompute the rest."""
    if not base.supports_gradient_checkpointing:
        raise TrainingError(
            f"{path}: this architecture has no gradient checkpointing; set gradient_checkpointing = false"
        )
    base.gradient_checkpointing_enable({"use_reentrant": False})
    for module in base.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # Layers read this flag; their submodules stay in evaluation mode, without dropout.
            module.training = True

"""A causal language model over several sequences, checked against the original. Subclasses define what is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.models.short_windows import short_windows
from openhands_rl_plugin.training.data.layout import Layout, lay_out
from openhands_rl_plugin.training.losses.logprobs import token_logprobs
from openhands_rl_plugin.training.policies.float32_products import keep_positions_exact, use_tensor_cores
from openhands_rl_plugin.training.policies.output_layer import measure_scale, scaled_token_logprobs
from openhands_rl_plugin.training.policies.packed_attention import ATTENTION_NAME
from openhands_rl_plugin.training.policies.packed_rows import PackedRows
from openhands_rl_plugin.training.policies.packing_check import (
    PACKED,
    Packing,
    drop_nothing,
    problem_of_logprobs,
    problem_of_packing,
    problem_of_positions,
    sequences_of,
)
from openhands_rl_plugin.training.policies.router_loss import RouterLoss

_UNBOUNDED = 2**31

PROBE_TOLERANCE = {torch.bfloat16: 0.15, torch.float32: 0.01}
"""Mean absolute difference, in nats, between two sound implementations that sum in another order."""


class PackedModel(ABC):
    """A model that computes logprobs of packed sequences. Raises ``TrainingError`` when it cannot be trained."""

    def __init__(self, model_path: str | Path, settings: TrainingSettings) -> None:
        self.model_path = str(model_path)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        use_tensor_cores(self.device)
        self.dtype = _dtype(settings.dtype, self.device)
        self._entropy_gradient = settings.entropy_coefficient > 0
        self._base = self._open()
        config = self._base.config.get_text_config()
        self.longest: int = getattr(config, "max_position_embeddings", None) or _UNBOUNDED
        """The model's maximal context length, in tokens."""
        self.vocabulary: int = config.vocab_size
        self._router: RouterLoss | None = None
        drop_nothing(self._base)
        keep_positions_exact(self._base)
        with short_windows(self._base):
            try:
                plain = self._plain_logprobs()
            except (NotImplementedError, TypeError, AttributeError, RuntimeError, ValueError, IndexError) as error:
                raise self._refusal(describe(error)) from error
            self._prepare(settings)
            self.packing: Packing = PACKED
            """Whether sequences are computed together; where not, the trainer gives one a micro-batch."""
            self._check(plain)
        if settings.router_aux_loss_coef:
            self._router = RouterLoss(self._base, _decoder(self._base), settings.router_aux_loss_coef)
        if settings.gradient_checkpointing:
            _checkpoint_layers(self._base, self.model_path)
        self.parameters = self._trained()
        """The trained parameters, float32, by name."""

    @property
    def family(self) -> str:
        """The architecture, by the name in ``config.json``."""
        return self._base.config.model_type

    def notes(self) -> list[str]:
        """What a user should know before training begins, a line each."""
        if self.packing.packed:
            return []
        return [
            f"{self.family} trains one sequence a micro-batch and shares no prefixes, because {self.packing.reason}: "
            "slower, and max_tokens_per_micro_batch has no effect",
        ]

    @property
    def probe_tolerance(self) -> float:
        """Largest accepted mean absolute difference of a server's logprobs from these, in nats."""
        return PROBE_TOLERANCE[self.dtype]

    def logprobs(
        self, layout: Layout, wanted: list[tuple[int, int]], temperatures: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies ([K] float32) of tokens ``t > 0`` of sequences ``s``; ``wanted``: pairs ``(s, t)``.

        ``temperatures``: [K], what the logits are divided by; ``None`` for 1. With gradients enabled, they reach the
        trained parameters; those of the entropies with an entropy bonus only.
        """
        if self.packing.packed:
            return self._logprobs_of_rows(layout, wanted, temperatures)
        by_sequence: dict[int, list[int]] = {}
        for at, (s, _) in enumerate(wanted):
            by_sequence.setdefault(s, []).append(at)
        parts = []
        for s, places in by_sequence.items():
            alone = lay_out([tuple(layout.ids[row] for row in layout.rows[s])])
            own = None if temperatures is None else temperatures[torch.tensor(places, device=temperatures.device)]
            parts.append(self._logprobs_of_rows(alone, [(0, wanted[at][1]) for at in places], own))
        back = torch.tensor([at for places in by_sequence.values() for at in places], device=self.device).argsort()
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs)[back], torch.cat(entropies)[back]

    def last_logits(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        """[S, vocabulary] float32 logits after the last token of each sequence."""
        groups = [sequences] if self.packing.packed else [[each] for each in sequences]
        parts = []
        for group in groups:
            layout = lay_out(group)
            last = torch.tensor([rows[-1] for rows in layout.rows], device=self.device)
            parts.append(self._hidden(PackedRows(layout, self.device))[last])
        return self._scale.logits(torch.cat(parts), self._head())

    def _logprobs_of_rows(
        self, layout: Layout, wanted: list[tuple[int, int]], temperatures: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows = torch.tensor([layout.rows[s][t - 1] for s, t in wanted], device=self.device)
        targets = torch.tensor([layout.ids[layout.rows[s][t]] for s, t in wanted], device=self.device)
        known = None if temperatures is None else temperatures.to(self.device)
        return self._compute(PackedRows(layout, self.device), rows, targets, known)

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

    def _compute(
        self, packed: PackedRows, rows: Tensor, targets: Tensor, temperatures: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[K] logprobs and entropies of ``targets``, the tokens after ``rows``."""
        return self._score(self._hidden(packed)[rows], targets, self._head(), temperatures)

    def _score(
        self, hidden: Tensor, targets: Tensor, head: nn.Linear, temperatures: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scale, bonus = self._scale, self._entropy_gradient
        if scale.cap is not None or (head.bias is not None and scale.factor != 1.0):
            return scaled_token_logprobs(hidden, targets, head, scale, temperatures, entropy_gradient=bonus)
        scaled = hidden if scale.factor == 1.0 else hidden * scale.factor
        return self._score_linear(scaled, targets, head, temperatures)

    def _score_linear(
        self, hidden: Tensor, targets: Tensor, head: nn.Linear, temperatures: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden, targets, head.weight, head.bias, temperatures, entropy_gradient=self._entropy_gradient
        )

    def _head(self) -> nn.Linear:
        head = self._base.get_output_embeddings()
        assert isinstance(head, nn.Linear)  # checked when it was loaded
        return head

    def _hidden(self, packed: PackedRows) -> Tensor:
        """[N, width] last hidden states, in the dtype of the weights: those of Mamba-2 are wider."""
        wanted: dict[str, Any] = {"position_ids": packed.positions, "rows": packed} if self.packing.packed else {}
        routed = self._router is not None and torch.is_grad_enabled()
        if routed:
            wanted["output_router_logits"] = True
        found = _decoder(self._base)(input_ids=packed.ids, use_cache=False, **wanted)
        if self._router is not None and routed:
            self._router.add(found.router_logits)
        return found.last_hidden_state[0].to(self.dtype)

    def router_loss(self) -> Tensor | float:
        """The weighted auxiliary loss of the routers in the forward passes since the last call; 0 where it is off."""
        return self._router.take() if self._router is not None else 0.0

    @torch.no_grad()
    def _plain_logprobs(self) -> list[Tensor]:
        parts, ids, logits = [], torch.empty(0), torch.empty(0)
        for sequence in sequences_of(self.vocabulary):
            ids = torch.tensor([sequence], device=self.device)
            logits = self._base(ids, use_cache=False).logits[0].float()
            parts.append(torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0])
        hidden = _decoder(self._base)(input_ids=ids, use_cache=False).last_hidden_state[0]
        self._scale = measure_scale(self._base, hidden, logits)
        return parts

    @torch.no_grad()
    def _check(self, plain: Sequence[Tensor]) -> None:
        """Pack sequences only where that changes none of them. Raises ``TrainingError`` for a model that is not known.

        The attention of a model that is not packed stays its own.
        """
        own = self._base.config._attn_implementation
        reason = problem_of_positions(self._base)
        if not reason:
            try:
                self._base.set_attn_implementation(ATTENTION_NAME)
                reason = problem_of_packing(
                    self._logprobs_of, plain, self.vocabulary, self.dtype, self._depends_on_others
                )
            except (NotImplementedError, TypeError, AttributeError, RuntimeError, ValueError) as error:
                reason = f"its attention cannot be replaced ({describe(error).removeprefix('ValueError: ')})"
        if not reason:
            return
        self.packing = Packing(False, reason)
        if self._base.config._attn_implementation != own:
            self._base.set_attn_implementation(own or "eager")
        try:
            problem = problem_of_logprobs(self._logprobs_of(sequences_of(self.vocabulary)), plain, self.dtype)
        except (NotImplementedError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            problem = describe(error)
        if problem:
            raise self._refusal(problem)

    @torch.enable_grad()
    def _depends_on_others(self, sequences: Sequence[tuple[int, ...]]) -> bool:
        """Whether the gradient of a sequence's logprobs reaches tokens of another one: 0 or not, at any precision."""
        leaves: list[Tensor] = []

        def keep(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
            leaves.append(embedded.detach().requires_grad_())
            return leaves[-1]

        layout = lay_out(sequences)
        hook = self._base.get_input_embeddings().register_forward_hook(keep)
        try:
            for s, sequence in enumerate(sequences):
                values, _ = self.logprobs(layout, [(s, t) for t in range(1, len(sequence))])
                (gradient,) = torch.autograd.grad(values.sum(), leaves[-1])
                others = sorted({*range(len(layout.ids))} - {*layout.rows[s]})
                if bool(gradient.flatten(0, -2)[others].any()):
                    return True
        finally:
            hook.remove()
        return False

    def _refusal(self, cause: str) -> TrainingError:
        return TrainingError(f"{self.model_path}: this architecture ({self.family}) cannot be trained: {cause}")

    def _logprobs_of(self, sequences: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Those of tokens 1 .. T-1 of each sequence."""
        wanted = [(s, t) for s, sequence in enumerate(sequences) for t in range(1, len(sequence))]
        found, _ = self.logprobs(lay_out(sequences), wanted)
        return list(torch.split(found, [len(sequence) - 1 for sequence in sequences]))


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


def _decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its output layer."""
    found = model.get_decoder()
    return model.base_model if found is model or found is None else found


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

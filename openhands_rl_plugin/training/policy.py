"""The model under training: a frozen base in the compute dtype, a LoRA adapter in float32, packed forward passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from openhands_rl_plugin.errors import TrainingError, describe
from openhands_rl_plugin.settings import TrainingSettings
from openhands_rl_plugin.training.fused import fuse_layers
from openhands_rl_plugin.training.layout import Layout, lay_out
from openhands_rl_plugin.training.lora import CUSTOM_LAYERS
from openhands_rl_plugin.training.loss import token_logprobs
from openhands_rl_plugin.training.packed import ATTENTION_NAME, PackedRows, hidden_states

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

# Packing and fused layers reorder sums only; an architecture that they do not fit is off by far more than that.
# On unlikely text bfloat16 alone moves logprobs by 0.1 nats on average; a wrong mask moves them by whole nats.
_SELF_CHECK_TOLERANCE = {torch.bfloat16: 0.3, torch.float32: 1e-3}


class TrainablePolicy:
    """A causal language model with one LoRA adapter. Raises ``TrainingError`` when the model cannot be trained."""

    def __init__(self, model_path: str | Path, settings: TrainingSettings) -> None:
        self.model_path = str(model_path)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = _dtype(settings.dtype, self.device)
        self._base = _load(self.model_path, self.dtype, self.device)
        self.longest: int = self._base.config.max_position_embeddings
        """Tokens in the longest sequence that the model is made for."""
        self.vocabulary: int = self._base.config.vocab_size
        expected = self._plain_logprobs()
        config = LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.model_path,
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            use_rslora=settings.lora_variant == "rslora",
            lora_dropout=0.0,
            target_modules=list(settings.target_modules),
        )
        config._register_custom_module(CUSTOM_LAYERS)
        fuse_layers(self._base)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(settings.seed)
            self._peft = _wrap(self._base, config, self.model_path)
        self._check_packed(expected)
        if settings.gradient_checkpointing:
            _checkpoint_layers(self._base, self.model_path)
        self.parameters = {name: p for name, p in self._peft.named_parameters() if p.requires_grad}

    def logprobs(self, layout: Layout, wanted: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies ([K] float32) of tokens ``t > 0`` of sequences ``s``; ``wanted``: pairs ``(s, t)``.

        Gradient flows to the adapter's weights when it is enabled.
        """
        rows = [layout.rows[s][t - 1] for s, t in wanted]
        targets = [layout.ids[layout.rows[s][t]] for s, t in wanted]
        hidden = hidden_states(self._base, PackedRows(layout, self.device))
        head = self._base.get_output_embeddings()
        assert isinstance(head, nn.Linear)  # checked when it was loaded
        return token_logprobs(
            hidden[torch.tensor(rows, device=self.device)],
            torch.tensor(targets, device=self.device),
            head.weight,
            head.bias,
        )

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside the block it is the base model."""
        with self._peft.disable_adapter():
            yield

    def sequence_logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        """Logprobs of tokens 1 .. T-1 given the ones before."""
        with torch.no_grad():
            values, _ = self.logprobs(lay_out([token_ids]), [(0, t) for t in range(1, len(token_ids))])
        return values.tolist()

    def save(self, directory: Path) -> None:
        """Write the adapter in PEFT's format into an existing directory."""
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.weights().items()}
        # Not save_file: its error for a full disk is no OSError.
        (directory / WEIGHTS_FILE).write_bytes(serialize(weights, {"format": "pt"}))
        config = self._peft.peft_config["default"]
        inference = {**config.to_dict(), "inference_mode": True}
        text = json.dumps({k: sorted(v) if isinstance(v, set) else v for k, v in inference.items()}, indent=2)
        (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")

    def weights(self) -> dict[str, Tensor]:
        """The adapter's tensors under PEFT's file names."""
        return get_peft_model_state_dict(self._peft)

    def load(self, directory: Path) -> None:
        """Take over the weights of an adapter directory. Raises ``TrainingError`` when they do not fit."""
        try:
            tensors = load_file(directory / WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"cannot read the adapter in {directory}: {describe(error)}") from error
        self.set_weights(tensors, str(directory))

    def set_weights(self, tensors: dict[str, Tensor], source: str) -> None:
        """Take over adapter tensors. Raises ``TrainingError`` when names or shapes differ."""
        mine = {name: tuple(tensor.shape) for name, tensor in self.weights().items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if mine != theirs:
            raise TrainingError(
                f"{source} does not fit {self.model_path} with the current lora_rank and target_modules; use the "
                "settings and the base model it was trained with, or start a new adapter"
            )
        set_peft_model_state_dict(self._peft, tensors)

    @torch.no_grad()
    def _plain_logprobs(self) -> Tensor:
        parts = []
        for sequence in self._check_sequences():
            ids = torch.tensor([sequence], device=self.device)
            logits = self._base(ids, use_cache=False).logits[0, :-1].float()
            parts.append(torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0])
        return torch.cat(parts)

    def _check_packed(self, expected: Tensor) -> None:
        """Two sequences with a common beginning, packed, must agree with the original model on each of them alone."""
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
    """``"auto"`` as the embedded server chooses it: emulated bfloat16 products take eight times as long as float32."""
    if name != "auto":
        return getattr(torch, name)
    native = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def _load(path: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise TrainingError(
            f"cannot load the model {path}: {describe(error)} (give a directory with config.json and *.safetensors)"
        ) from error
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        raise TrainingError(f"{path}: this architecture cannot be trained: its output layer is not linear")
    nn.Module.to(model, device)  # transformers' own `to` hides its signature from type checkers
    return model.eval().requires_grad_(False)


def _checkpoint_layers(base: PreTrainedModel, path: str) -> None:
    """Keep only what goes into each layer for the backward pass, and compute the rest again."""
    if not base.supports_gradient_checkpointing:
        raise TrainingError(
            f"{path}: this architecture has no gradient checkpointing; set gradient_checkpointing = false"
        )
    base.gradient_checkpointing_enable({"use_reentrant": False})
    for module in base.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # Layers look at this flag; what is inside them stays in evaluation mode, without dropout.
            module.training = True


def _wrap(base: PreTrainedModel, config: LoraConfig, path: str):
    try:
        return get_peft_model(base, config)
    except ValueError as error:
        raise TrainingError(
            f"cannot add LoRA to {path}: {describe(error)}; check [rl.training] target_modules"
        ) from error

"""A Hugging Face causal LM rebuilt for serving: slot attention, fused layers, several LoRA adapters at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.hub import cached_file

from openhands_rl_plugin.core.errors import UsageError
from openhands_rl_plugin.models.generator.attention import ATTENTION_NAME, KVCache, StepPlan, StepRow
from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.errors import StartError
from openhands_rl_plugin.models.generator.lora import (
    LoadedAdapter,
    LoRAMapping,
    LoRASegment,
    read_adapter,
    replace_linears,
)
from openhands_rl_plugin.models.short_windows import short_windows

log = logging.getLogger(__name__)

# Allowed relative difference between logits of the rebuilt and the original model: (mean, largest) over positions.
# In half precision another order of sums makes a router choose other experts here and there, so that the mean decides.
_SELF_CHECK_TOLERANCE = {torch.bfloat16: (0.03, 1.0), torch.float16: (0.03, 1.0), torch.float32: (0.005, 0.005)}
_CHECKED_TOKENS = 40


class ServedModel:
    """The model, its tokenizer and the key/value slots. Not thread-safe: one thread computes."""

    def __init__(self, config: GeneratorConfig, directory: Path | None = None) -> None:
        """Load, rebuild and check the model. Raises ``StartError`` when it cannot be served.

        ``directory``: where the files of ``config.model`` are, if that is known; they are not looked up then.
        """
        if config.threads:
            torch.set_num_threads(config.threads)
        self.name = config.model
        self.device = _pick_device(config.device)
        self.dtype = _pick_dtype(config.dtype, self.device)
        self.tokenizer, self.model = _load(str(directory or config.model), self.dtype, self.device)
        self.directory = directory or _directory_of(config.model)
        self.eos_ids = eos_ids(self.model, self.tokenizer)
        self.vocabulary = cast(Tensor, self.model.get_input_embeddings().weight).shape[0]
        text_config = self.model.config.get_text_config()
        heads = text_config.num_attention_heads
        self.slots = KVCache(
            layers=text_config.num_hidden_layers,
            slots=config.max_batch,
            kv_heads=getattr(text_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
            dtype=self.dtype,
            device=self.device,
        )
        self.max_model_len = self._longest(config)
        self._max_batch = config.max_batch
        self._lora_mapping = LoRAMapping()
        self._rebuild()

    def _longest(self, config: GeneratorConfig) -> int:
        """The maximum length of a sequence: limited by the model, the config and the memory for the slots."""
        trained = int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0))
        wanted = min(config.max_model_len or trained or 2048, trained or config.max_model_len or 2048)
        fitting = config.kv_bytes // self.slots.bytes_per_token
        if fitting < wanted:
            log.warning("max_model_len is %d instead of %d, so that max_batch fits into kv_bytes", fitting, wanted)
        if fitting < 16:
            raise StartError(
                f"kv_bytes={config.kv_bytes} is too small for {config.max_batch} sequences of this model; raise it"
            )
        return min(wanted, fitting)

    def read_adapter(self, name: str, path: Path) -> LoadedAdapter:
        """Load an adapter for this model. Safe to call from another thread while steps are computed."""
        return read_adapter(
            name, path, base_model=self.name, projections=self._projections, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def step(self, rows: Sequence[StepRow]) -> Tensor:
        """Compute one step of several sequences together.

        Stores the new tokens' keys and values in the slots. Returns float32 logits [wanted positions, vocabulary]
        in the order of ``rows``, each row's in the order of its ``wanted``.
        """
        order = sorted(range(len(rows)), key=lambda i: (not rows[i].is_short, id(rows[i].adapter), rows[i].slot))
        self.slots.ensure(max(row.start + len(row.ids) for row in rows))
        plan = StepPlan(self.slots, [rows[i] for i in order])
        ids: list[int] = []
        positions: list[int] = []
        offsets = [0] * len(rows)
        for i in order:
            offsets[i] = len(ids)
            ids.extend(rows[i].ids)
            positions.extend(range(rows[i].start, rows[i].start + len(rows[i].ids)))
        wanted = [offsets[i] + index for i, row in enumerate(rows) for index in row.wanted]
        self._lora_mapping.segments = _segments([rows[i] for i in order])
        return self._forward(ids, positions, wanted, plan)

    @torch.inference_mode()
    def _forward(self, ids: list[int], positions: list[int], wanted: list[int], plan: StepPlan) -> Tensor:
        tensor = torch.tensor([ids, positions], device=self.device)
        output = self.model(
            input_ids=tensor[:1],
            position_ids=tensor[1:],
            use_cache=False,
            logits_to_keep=torch.tensor(wanted or [0], device=self.device),
            plan=plan,
        )
        return output.logits[0, : len(wanted)].float()

    @torch.inference_mode()
    def _rebuild(self) -> None:
        """Replace attention and linear layers, then compare the logits with those of the original model.

        Two sequences are computed in pieces, side by side in slots: recurrent layers, whose state is not in the slots,
        give other logits then, and so does attention that ignores a window.
        """
        length = min(_CHECKED_TOKENS, self.max_model_len)
        texts = [[(factor * i + 3) % self.vocabulary for i in range(length)] for factor in (7, 11)]
        try:
            with short_windows(self.model):
                expected = [self.model(torch.tensor([each], device=self.device), use_cache=False) for each in texts]
                self.model.set_attn_implementation(ATTENTION_NAME)
                self._projections = replace_linears(self.model, self._lora_mapping)
                actual = self._in_pieces(texts)
        except (NotImplementedError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise StartError(f"{self._architecture} cannot be served: {_first_line(error)}") from error
        found = torch.cat(
            [_differences(mine, theirs.logits[0].float()) for mine, theirs in zip(actual, expected, strict=True)]
        )
        mean, largest = _SELF_CHECK_TOLERANCE[self.dtype]
        difference = found.max().item()
        if not (found.mean().item() <= mean and difference <= largest):
            raise StartError(
                f"{self._architecture} cannot be served: its logits differ by {difference:.0%} when a text is "
                "computed in pieces; serve it with vLLM"
            )

    @property
    def _architecture(self) -> str:
        return f"{self.name}: this architecture ({self.model.config.model_type})"

    def _in_pieces(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The logits [T, vocabulary] of each text, in three steps: two chunks of other lengths, a token."""
        groups = [texts] if self._max_batch >= len(texts) else [[each] for each in texts]
        made: list[Tensor] = []
        for group in groups:
            parts: list[list[Tensor]] = [[] for _ in group]
            cuts = [(0, (at + 2) * len(text) // 5, len(text) - 1, len(text)) for at, text in enumerate(group)]
            for step in range(3):
                rows = [
                    StepRow(slot, cut[step], text[cut[step] : cut[step + 1]], None, range(cut[step + 1] - cut[step]))
                    for slot, (text, cut) in enumerate(zip(group, cuts, strict=True))
                ]
                found = torch.split(self.step(rows), [row.count for row in rows])
                for part, logits in zip(parts, found, strict=True):
                    part.append(logits)
            made += [torch.cat(part) for part in parts]
        return made


def _differences(mine: Tensor, theirs: Tensor) -> Tensor:
    """[T]: at each position, relative to the size of the logits there."""
    size = theirs.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return (mine - theirs).norm(dim=-1) / size


def _segments(rows: Sequence[StepRow]) -> tuple[LoRASegment, ...]:
    """Ranges of neighbouring token rows with the same adapter; rows without an adapter are omitted."""
    segments: list[LoRASegment] = []
    start = 0
    for index, row in enumerate(rows):
        stop = start + len(row.ids)
        if row.adapter is not None:
            if index and segments and rows[index - 1].adapter is row.adapter:
                segments[-1] = LoRASegment(segments[-1].start, stop, row.adapter.layers)
            else:
                segments.append(LoRASegment(start, stop, row.adapter.layers))
        start = stop
    return tuple(segments)


def _pick_device(device: str) -> torch.device:
    """Raises ``UsageError`` for a device that is not here."""
    gpu = torch.cuda.is_available()
    try:
        picked = torch.device(device if device != "auto" else "cuda" if gpu else "cpu")
    except RuntimeError as error:
        raise UsageError(f"--device: {device!r} is no device of PyTorch; use auto, cpu or cuda") from error
    if picked.type == "cuda" and not gpu:
        raise UsageError(f"--device: PyTorch finds no GPU for {device!r}; leave the option out, or use cpu")
    return picked


def _pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype != "auto":
        return getattr(torch, dtype)
    native = device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def _load(name: str, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    try:
        AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise StartError(
            f"cannot load the model {name}: {_first_line(error)} "
            "(use a directory with config.json, *.safetensors and a tokenizer)"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise StartError(f"cannot load the model {name}: it has no fast tokenizer (tokenizer.json)")
    # A tokenizer.json may enable truncation; a prompt must never be truncated silently.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    torch.nn.Module.to(model, device)
    model.eval().requires_grad_(False)
    return tokenizer, model


def _directory_of(name: str) -> Path:
    """Where a loaded model came from: of a hub name, the snapshot in the cache."""
    return Path(cached_file(name, "config.json") or name).parent


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """The token ids that end a generation, of the model and of its tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if isinstance(i, int))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

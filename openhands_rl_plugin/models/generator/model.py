"""A Hugging Face causal LM rebuilt for serving: attention over slots, packed layers, several LoRA adapters at once."""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, groupby, pairwise
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.hub import cached_file

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE, read_adapter_config
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE
from openhands_rl_plugin.models.generator.config import GeneratorConfig, NotFound, ServingError, StartError
from openhands_rl_plugin.models.short_windows import short_windows

log = logging.getLogger(__name__)
GROWTH_TOKENS = 256


class KVCache:
    """``keys``, ``values``: [layers, slots, kv_heads, capacity, head_dim].

    Slots lie side by side so that a decoding step attends over a view of neighbouring slots, without a copy.
    The capacity (tokens per slot) grows with the longest sequence; on a CPU, memory is taken only where it is used.

    On a CPU, bfloat16 keys are kept as float32: for the one query of a decoding row, the float32 product is more than
    twice as fast as the bfloat16 one, and its scores are not rounded.
    """

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.float32_keys = device.type == "cpu" and dtype == torch.bfloat16
        self.count = slots
        self._shape = (layers, slots, kv_heads, head_dim)
        self.clear()

    @property
    def capacity(self) -> int:
        """Tokens that fit into each slot now."""
        return self.values.shape[3]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of capacity takes, in all slots and layers together."""
        return math.prod(self._shape) * (self.keys.element_size() + self.values.element_size())

    def ensure(self, tokens: int) -> None:
        """Grow every slot to hold at least ``tokens`` tokens; what is stored stays."""
        if tokens > self.capacity:
            capacity = max(-(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS, self.capacity * 3 // 2)
            old, self.keys = self.keys, self._zeros(capacity, self.keys.dtype)
            self.keys[:, :, :, : old.shape[3]] = old
            old, self.values = self.values, self._zeros(capacity, self.dtype)
            self.values[:, :, :, : old.shape[3]] = old

    def clear(self) -> None:
        """Forget all sequences, and give their memory back."""
        self.keys = self._zeros(0, torch.float32 if self.float32_keys else self.dtype)
        self.values = self._zeros(0, self.dtype)

    def read(self, slot: int, start: int, stop: int) -> Tensor:
        """A copy of the tokens ``start:stop`` of a slot: [layers, 2 (keys, values), kv_heads, tokens, head_dim]."""
        block = self.keys[:, slot, :, start:stop].to(self.dtype), self.values[:, slot, :, start:stop]
        return torch.stack(block, 1)

    def write(self, slot: int, start: int, block: Tensor) -> None:
        """Put a block that ``read`` gave into a slot, from token ``start`` on."""
        stop = start + block.shape[3]
        self.keys[:, slot, :, start:stop] = block[:, 0]
        self.values[:, slot, :, start:stop] = block[:, 1]

    def _zeros(self, capacity: int, dtype: torch.dtype) -> Tensor:
        layers, slots, heads, dim = self._shape
        # Zeros: attention reads past a row's end under a mask, and a stray NaN there would survive it.
        shape = (layers, slots, heads, capacity, dim)
        if self.device.type != "cpu" or not capacity:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # These take memory page by page as they are written; torch writes all of its own. A shared mapping is a file.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
        return torch.frombuffer(memory, dtype=dtype).view(shape)


ATTENTION_NAME = "openhands_rl_slots"

# A kernel call costs as much as attending to about this many tokens (measured on 2 cores: 90 us per call, 0.11 us per
# token and row), so rows are batched while their padding costs less.
CALL_COST_TOKENS = 400
SHORT_ROW_TOKENS = 16


@dataclass(frozen=True)
class StepRow:
    """The new tokens ``ids`` of one sequence in this step, at positions ``start ..`` of ``slot``, under ``adapter``.

    ``wanted``: ascending indices into ``ids`` whose next-token logits are returned.
    """

    slot: int
    start: int
    ids: Sequence[int]
    adapter: LoadedAdapter | None
    wanted: Sequence[int]

    @property
    def count(self) -> int:
        return len(self.ids)

    @property
    def stop(self) -> int:
        """Tokens in the slot after the step."""
        return self.start + len(self.ids)

    @property
    def short(self) -> bool:
        """Whether it is computed in a batch with others: it decodes, or is the end of a cached prompt."""
        return len(self.ids) <= SHORT_ROW_TOKENS


class StepPlan:
    """The place of each token in a flat step: tokens of short rows first, then prompt chunks.

    ``groups``: short rows of one length that lie in neighbouring slots, as (the places of their tokens, the rows).
    ``chunks``: (first place, row).
    """

    def __init__(self, store: KVCache, rows: Sequence[StepRow]) -> None:
        self.store = store
        placed = list(zip(accumulate((row.count for row in rows), initial=0), rows, strict=False))
        short = [(at, row) for at, row in placed if row.short]
        self.chunks = placed[len(short) :]
        self.short = sum(row.count for _, row in short)
        self.slots = self._indices(row.slot for _, row in short for _ in row.ids)
        self.positions = self._indices(place for _, row in short for place in range(row.start, row.stop))
        self.groups = [
            (self._indices(at + i for at, row in group for i in range(row.count)), [row for _, row in group])
            for group in _groups(sorted(short, key=lambda item: (item[1].count, item[1].slot)))
        ]
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def _indices(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), device=self.store.device)

    def mask(self, rows: Sequence[StepRow], window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive [tokens of the rows, longest]: what each token does not see. All layers have the same."""
        key = (rows[0].slot, window)
        if key not in self._masks:
            query = self._indices(place for row in rows for place in range(row.start, row.stop))[:, None]
            at = torch.arange(max(row.stop for row in rows), device=self.store.device)
            hidden = at > query if window is None else (at > query) | (at <= query - window)
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[key] = zeros.masked_fill_(hidden, float("-inf"))
        return self._masks[key]


def _groups(placed: Sequence[tuple[int, StepRow]]) -> Iterator[Sequence[tuple[int, StepRow]]]:
    """Batch rows of neighbouring slots while the padding costs less than another call would."""
    first = 0
    for index in range(1, len(placed) + 1):
        before, row = placed[index - 1][1], placed[min(index, len(placed) - 1)][1]
        if (row.slot, row.count) == (before.slot + 1, before.count):
            longest, rows = max(row.stop for _, row in placed[first:index]), index - first
            if (rows + 1) * max(longest, row.stop) - rows * longest - row.stop <= CALL_COST_TOKENS:
                continue
        yield placed[first:index]
        first = index


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: StepPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    query: [1, heads, tokens, dim]; key, value: [1, kv_heads, tokens, dim], the step's flat tokens. Stores keys and
    values in their slots, returns ([1, tokens, heads, dim], None). Raises ``ValueError`` for soft-capped
    scores and attention sinks.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError("attention with soft-capped scores or sinks is not supported")
    layer = cast(int, module.layer_idx)
    keys, values = plan.store.keys[layer], plan.store.values[layer]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if plan.short:
        keys[plan.slots, :, plan.positions] = k[: plan.short].to(keys.dtype)
        values[plan.slots, :, plan.positions] = v[: plan.short]
    for tokens, rows in plan.groups:
        out[tokens] = _attend_group(plan, rows, q.index_select(0, tokens), keys, values, scaling, sliding_window)
    for offset, row in plan.chunks:
        tokens, stored = slice(offset, offset + row.count), slice(row.start, row.stop)
        keys[row.slot, :, stored] = key[0, :, tokens]
        values[row.slot, :, stored] = value[0, :, tokens]
        out[tokens] = _attend_chunk(plan, row, q[tokens], keys, values, scaling, sliding_window)
    return out[None], None


def _attend_group(
    plan: StepPlan,
    group: Sequence[StepRow],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """q: [rows * count, heads, dim] -> the same. Heads that share keys become further queries."""
    (tokens, heads, dim), (rows, width, kv_heads) = q.shape, (len(group), group[0].count, keys.shape[1])
    shared = heads // kv_heads
    slots, longest = slice(group[0].slot, group[0].slot + rows), max(row.stop for row in group)
    key, value = keys[slots, :, :longest], values[slots, :, :longest]
    query = q.view(rows, width, kv_heads, shared, dim).transpose(1, 2).flatten(2, 3)
    mask = None
    if width > 1 or len({row.stop for row in group}) > 1 or (window is not None and longest > window):
        mask = plan.mask(group, window, keys.dtype).view(rows, 1, width, longest)
        mask = mask if width == 1 else mask.repeat_interleave(shared, 2)
    if plan.store.float32_keys:
        scores = torch.matmul(query.float().mul_(dim**-0.5 if scale is None else scale), key.transpose(-1, -2))
        if mask is not None:
            scores += mask
        out = torch.matmul(scores.softmax(-1).to(value.dtype), value)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.view(rows, kv_heads, width, shared, dim).transpose(1, 2).reshape(tokens, heads, dim)


def _attend_chunk(
    plan: StepPlan, row: StepRow, q: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """q: [count, heads, dim] -> the same shape. Keys are expanded to the heads as a view."""
    count, heads, dim = q.shape
    kv_heads = keys.shape[1]
    shape = (kv_heads, heads // kv_heads, row.stop, dim)
    causal = row.start == 0 and (window is None or row.stop <= window)
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1).reshape(kv_heads, heads // kv_heads, count, dim),
        keys[row.slot, :, : row.stop].to(values.dtype).unsqueeze(1).expand(shape),
        values[row.slot, :, : row.stop].unsqueeze(1).expand(shape),
        attn_mask=None if causal else plan.mask([row], window, values.dtype),
        is_causal=causal,
        scale=scale,
    )
    return result.reshape(heads, count, dim).transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, attend)

# The batch size that oneDNN optimises the packed layout for: a typical decoding batch. Other sizes work, too.
PACK_ROWS = 16
_PREFIX = "base_model.model."
type LoRAPair = tuple[Tensor, Tensor]
"""One adapter in one layer: [in, rank], and [rank, out] already multiplied by the adapter's scaling."""
# On a CPU, bfloat16 products with a low rank are slower than float32 ones for few rows (2 to 5 times with one to 16,
# rank 8 to 32), and faster for many.
FEW_ROWS = 32
_numbers = count(1)


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One loaded adapter version. Immutable: requests in flight keep the version they started with.

    ``layers``: layer name -> its low-rank pair, and that in float32 where few rows are computed with it. ``number``:
    different for each. Compared and hashed by identity.
    """

    name: str
    path: str
    layers: dict[str, tuple[LoRAPair, LoRAPair]] = field(repr=False)
    number: int = field(default_factory=lambda: next(_numbers))


class Projection(nn.Module):
    """``y = x W^T + b`` plus the low-rank terms of the adapters in use; replaces the ``nn.Linear`` of that ``name``.

    ``segments``: ranges of the step's token rows with their adapters, shared by all layers of a model.
    """

    def __init__(self, name: str, linear: nn.Linear, segments: list[tuple[slice, LoadedAdapter]]) -> None:
        super().__init__()
        self.name = name
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._segments = segments
        weight = linear.weight.detach()
        self._bias = None if linear.bias is None else linear.bias.detach()
        # oneDNN's blocked layout is faster where the processor has bfloat16.
        half = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        self._packed = half and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self._packed else weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]; the leading dimensions, flattened, are the token rows of the step."""
        if self._packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = F.linear(x, self._weight, self._bias)
        for rows, adapter in self._segments:
            if (pair := adapter.layers.get(self.name)) is not None:
                x_rows, y_rows = x.view(-1, x.shape[-1])[rows], y.view(-1, y.shape[-1])[rows]
                a, b = pair[len(x_rows) <= FEW_ROWS]
                y_rows.add_(x_rows.to(a.dtype) @ a @ b)
        return y


def _replace_linears(model: nn.Module, segments: list[tuple[slice, LoadedAdapter]]) -> dict[str, Projection]:
    """Replace every ``nn.Linear`` of ``model`` in place; returns replaced module name -> its projection.

    Subclasses of ``nn.Linear`` (quantised layers) are not replaced.
    """
    projections: dict[str, Projection] = {}
    for parent_name, parent in list(model.named_modules()):
        prefix = f"{parent_name}." if parent_name else ""
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear:
                projections[prefix + name] = projection = Projection(prefix + name, linear, segments)
                setattr(parent, name, projection)
    return projections


# Allowed relative difference between logits of the rebuilt and the original model: (mean, largest) over positions.
# In half precision another order of sums makes a router choose other experts here and there, so that the mean decides.
_SELF_CHECK_TOLERANCE = {torch.bfloat16: (0.03, 1.0), torch.float16: (0.03, 1.0), torch.float32: (0.005, 0.005)}
_CHECKED_TOKENS = 80


class ServedModel:
    """The model, its tokenizer and the key/value slots. Not thread-safe: one thread computes."""

    def __init__(self, config: GeneratorConfig) -> None:
        """Load, rebuild and check the model. Raises ``StartError`` when it cannot be served."""
        if config.threads:
            torch.set_num_threads(config.threads)
        self.name = config.model
        found = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(found if config.device == "auto" else config.device)
        native = self.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.dtype: torch.dtype = getattr(
            torch, ("bfloat16" if native else "float32") if config.dtype == "auto" else config.dtype
        )
        self.tokenizer, self.model = _load(config.model, self.dtype, self.device)
        self.directory = Path(cached_file(self.name, "config.json") or self.name).parent
        ends = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ends = [*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id]
        self.eos_ids = frozenset(i for i in ends if isinstance(i, int))
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
        self._segments: list[tuple[slice, LoadedAdapter]] = []
        self._rebuild()

    def _longest(self, config: GeneratorConfig) -> int:
        """The maximum length of a sequence: limited by the model, the config and the memory for the slots."""
        trained = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        wanted = min(filter(None, (config.max_model_len, trained)), default=2048)
        fitting = config.kv_bytes // self.slots.bytes_per_token
        if fitting < wanted:
            log.warning("max_model_len is %d instead of %d, so that max_batch fits into kv_bytes", fitting, wanted)
        return min(wanted, fitting)

    def read_adapter(self, name: str, path: Path) -> LoadedAdapter:
        """Load the adapter in ``path``. Safe to call from another thread while steps are computed.

        Raises ``NotFound`` when there is no adapter, ``ServingError`` when it does not fit the model; messages have
        one line.
        """
        if not os.path.isfile(path / CONFIG_FILE):
            raise NotFound(f"Loading lora {name} failed: No adapter found for {str(path)[:200]}", param="lora_path")
        try:
            with boundary(FailureKind.MODEL, "adapter"):
                return LoadedAdapter(name, str(path.absolute()), self._read_layers(path))
        except (CaughtFailure, ConfigError) as error:
            raise ServingError(f"Loading lora {name} failed: {error}", param="lora_path") from error

    def _read_layers(self, path: Path) -> dict[str, tuple[LoRAPair, LoRAPair]]:
        """Raises ``ConfigError`` for what does not fit."""
        if not os.path.isfile(path / WEIGHTS_FILE):
            raise ConfigError(f"{path} has no {WEIGHTS_FILE} (pickled weights are not loaded)")
        config = read_adapter_config(path)
        if refusal := config.refusal():
            raise ConfigError(refusal)
        trained_on = config.base_model_name_or_path
        if trained_on and not same_model(trained_on, self.name):
            raise ConfigError(f"it was trained on {trained_on}, but this server serves {self.name}")
        try:
            weights = load_file(path / WEIGHTS_FILE)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{WEIGHTS_FILE} cannot be read: {error}") from error
        found = {key.removeprefix(_PREFIX).removesuffix(".weight"): weight for key, weight in weights.items()}
        layers: dict[str, tuple[LoRAPair, LoRAPair]] = {}
        for module in {key.rpartition(".")[0] for key in found}:
            layer = self._projections.get(module)
            a, b = (found.pop(f"{module}.{half}", None) for half in ("lora_A", "lora_B"))
            if layer is None or a is None or b is None:
                raise ConfigError(f"{module} is no linear layer of the model, or has no pair of lora_A and lora_B")
            if a.shape != (config.r, layer.in_features) or b.shape != (layer.out_features, config.r):
                raise ConfigError(
                    f"{module} is {layer.in_features} -> {layer.out_features} in the model and the rank {config.r} in "
                    f"{CONFIG_FILE}, but {list(a.shape)} and {list(b.shape)} in the adapter"
                )
            a, b = a.float().t().contiguous(), (b.float() * config.scaling).t().contiguous()
            pair = a.to(self.device, self.dtype), b.to(self.device, self.dtype)
            layers[module] = pair, (a, b) if self.slots.float32_keys else pair
        if found or not layers:
            raise ConfigError(f"{WEIGHTS_FILE} has other weights than pairs of lora_A and lora_B")
        # One check for all: many small ones wait for threads, and on a GPU for the device.
        if not torch.stack([half.abs().max() for pair, _ in layers.values() for half in pair]).isfinite().all():
            raise ConfigError(f"{WEIGHTS_FILE} has weights that are not finite, or that {self.dtype} cannot hold")
        return layers

    @torch.inference_mode()
    def step(self, rows: Sequence[StepRow]) -> Tensor:
        """Compute one step of several sequences together.

        Stores the new tokens' keys and values in the slots. Returns float32 logits [wanted positions, vocabulary]
        in the order of ``rows``, each row's in the order of its ``wanted``.
        """
        order = sorted(
            range(len(rows)), key=lambda i: (rows[i].count > SHORT_ROW_TOKENS, id(rows[i].adapter), rows[i].slot)
        )
        self.slots.ensure(max(row.stop for row in rows))
        ids: list[int] = []
        positions: list[int] = []
        offsets = [0] * len(rows)
        for i in order:
            offsets[i] = len(ids)
            ids.extend(rows[i].ids)
            positions.extend(range(rows[i].start, rows[i].stop))
        wanted = [offsets[i] + index for i, row in enumerate(rows) for index in row.wanted]
        self._segments.clear()
        start = 0
        for adapter, group in groupby((rows[i] for i in order), key=lambda row: row.adapter):
            stop = start + sum(row.count for row in group)
            if adapter is not None:
                self._segments.append((slice(start, stop), adapter))
            start = stop
        tensor = torch.tensor([ids, positions], device=self.device)
        output = self.model(
            input_ids=tensor[:1],
            position_ids=tensor[1:],
            use_cache=False,
            logits_to_keep=torch.tensor(wanted or [0], device=self.device),
            plan=StepPlan(self.slots, [rows[i] for i in order]),
        )
        return output.logits[0, : len(wanted)].float()

    @torch.inference_mode()
    def _rebuild(self) -> None:
        """Replace attention and linear layers, then compare the logits with those of the original model.

        A text is computed in pieces, two chunks of other lengths and a token: recurrent layers, whose state is not in
        the slots, give other logits then, and so does attention that ignores a window.
        """
        architecture = f"{self.name}: this architecture ({self.model.config.model_type})"
        length = min(_CHECKED_TOKENS, self.max_model_len)
        text = [(7 * i + 3) % self.vocabulary for i in range(length)]
        try:
            with short_windows(self.model):
                expected = self.model(torch.tensor([text], device=self.device), use_cache=False).logits[0].float()
                self.model.set_attn_implementation(ATTENTION_NAME)
                self._projections: Mapping[str, Projection] = _replace_linears(self.model, self._segments)
                pieces = [
                    StepRow(0, start, text[start:stop], None, range(stop - start))
                    for start, stop in pairwise((0, 2 * length // 5, length - 1, length))
                ]
                actual = torch.cat([self.step([piece]) for piece in pieces])
        except (NotImplementedError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise StartError(f"{architecture} cannot be served: {_first_line(error)}") from error
        # At each position, relative to the size of the logits there.
        size = expected.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        found = (actual - expected).norm(dim=-1) / size
        mean, largest = _SELF_CHECK_TOLERANCE[self.dtype]
        difference = found.max().item()
        if not (found.mean().item() <= mean and difference <= largest):
            raise StartError(
                f"{architecture} cannot be served: its logits differ by {difference:.0%} when a text is "
                "computed in pieces; serve it with vLLM"
            )


def same_model(trained_on: str, served: str) -> bool:
    """Whether two names or paths may mean one model: equal, the same directory, or an equal last component.

    Shapes are always checked later; this detects a different model with the same shapes.
    """
    first, second = Path(trained_on), Path(served)
    if trained_on != served and first.exists() and second.exists():
        return first.resolve() == second.resolve()
    return first.name == second.name


def _load(name: str, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    try:
        AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

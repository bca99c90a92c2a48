"""A causal language model over several sequences, checked against the original. Subclasses define what is trained."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.models.short_windows import short_windows
from openhands_rl_plugin.training.data.packing import Layout, lay_out
from openhands_rl_plugin.training.losses import ROWS_AT_A_TIME, token_logprobs


class PackedRows:
    """A layout on a device, with the tensors that the attention of all layers shares.

    ``ids``, ``positions``: [1, N].
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.ids = torch.frombuffer(bytearray(layout.ids), dtype=torch.int32)[None].to(device, torch.int64)
        self.positions = torch.tensor([layout.positions], device=device)
        self._made: dict[Hashable, Any] = {}

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Call ``make`` once for ``name``, and return the same object to all later layers."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


PLAIN_KEYS = 256
"""Up to so many keys plain products are as fast as the fused kernel, and rounded as transformers' own are. The memory
for their weights grows with the square of the length."""


def attention_of_runs(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float, window: int | None
) -> Tensor:
    """Torch's own attention, run by run: each attends to itself and to what is before it in its sequences.

    query: [1, heads, N, dim]; key: [1, kv_heads, N, dim]; value: [1, kv_heads, N, own dim] -> [1, N, heads, own dim].
    """
    runs = rows.layout.runs
    lengths = [run.stop - run.start for run in runs]
    queries, keys, values = (each.split(lengths, dim=2) for each in (query, key, value))
    found = []
    for run, length, own in zip(runs, lengths, queries, strict=True):
        chain = [at for at, other in enumerate(runs) if other.start <= run.start < other.end]
        seen = [torch.cat([parts[at] for at in chain], dim=2) for parts in (keys, values)]
        mask = None
        if run.depth or (window is not None and window < length):
            mask = rows.once((run.depth, length, window), partial(_mask, run.depth, length, window, rows.ids.device))
        causal, fused = mask is None, run.depth + length > PLAIN_KEYS
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if fused else SDPBackend.MATH):
            found.append(sdpa(own, *seen, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True))
    return torch.cat(found, dim=2).transpose(1, 2)


def _mask(depth: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, depth + length] booleans: what the tokens of a run see of those before them and of the run."""
    at, to = torch.arange(depth, depth + length, device=device)[:, None], torch.arange(depth + length, device=device)
    return to <= at if window is None else (to <= at) & (to > at - window)


ATTENTION_NAME = "openhands_rl_packed"
UNKNOWN = "its attention has score caps or sinks"
KERNELS = 64
"""Kernels of FlexAttention that a process may compile: one for each width and number of heads, dtype and scale."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: PackedRows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    query: [1, heads, N, dim]; key: [1, kv_heads, N, dim]; value: [1, kv_heads, N, own dim] -> ([1, N, heads, own dim],
    None). ``softcap``: scores become ``softcap * tanh(score / softcap)``. Raises ``ValueError`` where the device has no
    way to compute that.
    """
    if s_aux is not None or (softcap is not None and not query.is_cuda):
        raise ValueError(UNKNOWN)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not query.is_cuda:
        wide = query.float(), key.float(), value.float()  # faster than bfloat16 with a mask
        return attention_of_runs(*wide, rows, scale, sliding_window).to(query.dtype), None
    whole = sliding_window is None or len(rows.layout.ids) <= sliding_window
    if softcap is None and whole and len(rows.layout.runs) == 1:  # one sequence: flash
        found = sdpa_attention_forward(module, query, key, value, None, scaling=scale, is_causal=True)[0]
    else:
        mask: BlockMask = rows.once(("mask", sliding_window), lambda: block_mask(rows, sliding_window))
        found = flex_attention_forward(module, query, key, value, mask, scaling=scale, softcap=softcap)[0]
    return found, None


def block_mask(rows: PackedRows, window: int | None) -> BlockMask:
    """FlexAttention's mask of a layout: a token attends to those of its own sequence up to it, or in its ``window``."""
    # Beyond torch's own limit of 8 kernels it would compute all scores at once, without a word.
    torch._dynamo.config.recompile_limit = max(KERNELS, torch._dynamo.config.recompile_limit)
    device, count = rows.ids.device, len(rows.layout.ids)
    lengths = torch.tensor([run.stop - run.start for run in rows.layout.runs], device=device)
    ends = torch.tensor([run.end for run in rows.layout.runs], device=device).repeat_interleave(lengths)
    positions = rows.positions[0]

    def visible(batch: Tensor, head: Tensor, at: Tensor, to: Tensor) -> Tensor:
        own = (to <= at) & (at < ends[to])
        return own if window is None else own & (positions[to] > positions[at] - window)

    return create_block_mask(visible, None, None, count, count, device=str(device), _compile=device.type == "cuda")


AttentionInterface.register(ATTENTION_NAME, attend)


NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "SmolLM3RMSNorm"})
GATED = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP"})


def fuse_layers(model: PreTrainedModel) -> None:
    """Replace the layers whose class is in ``NORMS`` or ``GATED``.

    The names of the linear layers do not change, so that adapters fit.
    """
    gated = GATED if getattr(model.config, "hidden_act", None) == "silu" else frozenset[str]()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in NORMS:
                setattr(parent, name, FusedNorm(child))
            elif type(child).__name__ in gated:
                setattr(parent, name, FusedGate(child))


class FusedNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, computed in float32."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.weight = original.get_parameter("weight")
        self.eps = float(original.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width] -> the same shape."""
        return _Norm.apply(x, self.weight, self.eps)


class FusedGate(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.gate_proj = original.get_submodule("gate_proj")
        self.up_proj = original.get_submodule("up_proj")
        self.down_proj = original.get_submodule("down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width] -> the same shape."""
        return self.down_proj(_Gate.apply(self.gate_proj(x), self.up_proj(x)))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad,) = grad_outputs
        x, weight, scale = ctx.saved_tensors
        normal = x.float() * scale
        slope_of_weight = None
        if ctx.needs_input_grad[1]:
            slope_of_weight = (grad.float() * normal).flatten(0, -2).sum(0).to(weight.dtype)
        slope = (grad * weight).float()
        shared = (slope * normal).mean(-1, keepdim=True).neg_()
        return slope.addcmul_(normal, shared).mul_(scale).to(x.dtype), slope_of_weight, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grad_outputs
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


_PREFIX, _SUFFIX, _OTHER = 24, 28, 41  # tokens; the prefix is long enough to be shared, all are longer than a window
_LARGEST_ID = 200
"""Ids above are left out: they may be those of images and other special tokens."""

# (mean, largest) difference in nats. On unlikely text bfloat16 alone moves logprobs by 0.1 nats on average.
_TOLERANCE = {torch.bfloat16: (0.3, 2.0), torch.float32: (1e-3, 1e-2)}


@dataclass(frozen=True)
class Packing:
    """How a model computes several sequences. ``reason``: why they are not packed."""

    packed: bool
    reason: str = ""


PACKED = Packing(True)


def sequences_of(vocabulary: int) -> list[tuple[int, ...]]:
    """Two with a common prefix, whose suffixes differ from the beginning on, and an unrelated one."""
    prefix = _ids(0, _PREFIX, vocabulary)
    first, second = ((at, *_ids(seed, _SUFFIX - 1, vocabulary)) for at, seed in ((5, 1), (6, 2)))
    return [prefix + first, prefix + second, (prefix[0] + 1, *_ids(3, _OTHER - 1, vocabulary))]


def problem_of_logprobs(found: Sequence[Tensor], plain: Sequence[Tensor], dtype: torch.dtype) -> str:
    """How logprobs differ from those of the unchanged model, in one clause; empty when they do not."""
    differences = torch.cat([(mine - theirs).abs() for mine, theirs in zip(found, plain, strict=True)])
    mean, largest = _TOLERANCE[dtype]
    if differences.mean().item() <= mean and differences.max().item() <= largest:
        return ""
    return (
        f"its logprobs differ from those of the unchanged model by {differences.max().item():.2g} nats, "
        f"{differences.mean().item():.2g} on average"
    )


def problem_of_positions(model: PreTrainedModel) -> str:
    """Why the positions of a sequence depend on the others of its pack, in one clause; empty when they do not."""
    found = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    each = [found, *(value for value in found.values() if isinstance(value, dict))]
    kinds = {str(one.get("rope_type", "")) for one in each}
    if kinds & {"dynamic", "longrope"}:
        return "its rotary positions depend on the longest sequence of a pack"
    return ""


def drop_nothing(model: nn.Module) -> None:
    """Set every dropout to zero: some layers read theirs, and gradient checkpointing puts layers into training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _ids(seed: int, count: int, vocabulary: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(7, min(vocabulary, _LARGEST_ID)) for _ in range(count))


@dataclass(frozen=True)
class OutputScale:
    """``logits = cap * tanh(factor * z / cap)`` of the output layer's ``z``; without ``cap``, ``factor * z``.

    Granite, Cohere and Falcon-H1 have a factor, Gemma 2 and Gemma 4 a cap.
    """

    factor: float = 1.0
    cap: float | None = None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[K, vocabulary] float32 logits of [K, width] hidden states."""
        low = None if bias is None else bias.to(hidden.dtype)
        logits = F.linear(hidden, weight.to(hidden.dtype), low).float() * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def measure_scale(model: PreTrainedModel, hidden: Tensor, logits: Tensor) -> OutputScale:
    """The scale of a model that gave ``logits`` [T, vocabulary] where its last hidden states are [T, width].

    The factor is measured, because every family has another name for it, and taken from the configuration where one of
    the known names has the measured value.
    """
    config = model.config.get_text_config()
    if cap := getattr(config, "final_logit_softcapping", None):
        return OutputScale(cap=float(cap))
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)  # checked when it was loaded
    plain = OutputScale().logits(hidden.to(head.weight.dtype), head.weight, head.bias)
    size = plain.square().sum()
    measured = ((plain * logits.float()).sum() / size).item() if size > 0 else 1.0
    known = [1.0, getattr(config, "logit_scale", None), getattr(config, "lm_head_multiplier", None)]
    if divisor := getattr(config, "logits_scaling", None):
        known.append(1.0 / divisor)
    near = [float(each) for each in known if each and abs(float(each) - measured) <= 0.01 * abs(measured)]
    return OutputScale(near[0] if near else measured)


def scaled_token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperatures: Tensor | None = None,
    *,
    scale: OutputScale = OutputScale(),
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """As ``losses.token_logprobs``, with a scale, and gradients: of a trained ``weight`` and ``bias``, and of the
    entropies with ``entropy_gradient``.

    Logits are in memory for ``ROWS_AT_A_TIME`` positions only, and recomputed in the backward pass. Gradients of the
    output layer are summed over these in float32.
    """

    def of_rows(rows: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = scale.logits(hidden, weight, bias)
        distribution = torch.log_softmax(logits if temperatures is None else logits / temperatures[rows, None], dim=-1)
        spread = distribution if entropy_gradient else distribution.detach()
        return distribution.gather(1, targets[rows, None])[:, 0], -torch.linalg.vecdot(spread.exp(), spread)

    wide = weight.float() if weight.requires_grad else weight
    starts = range(0, max(1, len(targets)), ROWS_AT_A_TIME)  # of no targets: empty, with a gradient
    parts = []
    for rows in (slice(start, start + ROWS_AT_A_TIME) for start in starts):
        given = rows, hidden[rows], wide, bias
        parts.append(checkpoint(of_rows, *given, use_reentrant=False, preserve_rng_state=False))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


_UNBOUNDED = 2**31

PROBE_TOLERANCE = {torch.bfloat16: 0.15, torch.float32: 0.01}
"""Mean absolute difference, in nats, between two sound implementations that sum in another order."""


class PackedModel(ABC):
    """A model that computes logprobs of packed sequences. Raises ``TrainingError`` when it cannot be trained."""

    def __init__(self, model_path: str | Path, settings: TrainingSettings) -> None:
        self.model_path = str(model_path)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = _dtype(settings.dtype, self.device)
        self._entropy_gradient = settings.entropy_coefficient > 0
        self.probe_tolerance = PROBE_TOLERANCE[self.dtype]
        """Largest accepted mean absolute difference of a server's logprobs from these, in nats."""
        self._base = self._open(settings)
        config = self._base.config.get_text_config()
        self.longest: int = getattr(config, "max_position_embeddings", None) or _UNBOUNDED
        """The model's maximal context length, in tokens."""
        self.vocabulary: int = config.vocab_size
        self.sharded = False
        """Whether every rank has only its shard of the trained parameters, in ``weights`` and ``parameters``."""
        drop_nothing(self._base)
        with short_windows(self._base):
            try:
                plain = self._plain_logprobs()
            except (NotImplementedError, TypeError, AttributeError, RuntimeError, ValueError, IndexError) as error:
                raise self._refusal(describe(error)) from error
            self._prepare(settings)
            self.packing: Packing = PACKED
            """Whether sequences are computed together; where not, the trainer gives one a micro-batch."""
            self._check(plain)
        if settings.gradient_checkpointing:
            _checkpoint_layers(self._base, self.model_path)
        self.parameters = self._trained()
        """The trained parameters, float32, by name."""

    def notes(self) -> list[str]:
        """Notes for the user before training begins, a line each."""
        if self.packing.packed:
            return []
        return [
            "one sequence is trained in a micro-batch, and prefixes are not shared, because "
            f"{self.packing.reason}: slower, and max_tokens_per_micro_batch has no effect"
        ]

    def logprobs(
        self, layout: Layout, wanted: list[tuple[int, int]], temperatures: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies ([K] float32) of tokens ``t > 0`` of sequences ``s``; ``wanted``: pairs ``(s, t)``,
        sequence by sequence.

        ``temperatures``: [K], what the logits are divided by; ``None`` for 1. With gradients enabled, they reach the
        trained parameters; those of the entropies with an entropy bonus only.
        """
        if self.packing.packed:
            return self._logprobs_of_rows(layout, wanted, temperatures)
        parts, done = [], 0
        for s, group in groupby(wanted, key=itemgetter(0)):
            alone = lay_out([[layout.ids[row] for row in layout.rows[s]]])
            own = [(0, t) for _, t in group]
            heat = None if temperatures is None else temperatures[done : done + len(own)]
            parts.append(self._logprobs_of_rows(alone, own, heat))
            done += len(own)
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def last_logits(self, sequences: Sequence[Iterable[int]]) -> Tensor:
        """[S, vocabulary] float32 logits after the last token of each sequence."""
        groups = [sequences] if self.packing.packed else [[each] for each in sequences]
        parts = []
        for group in groups:
            layout = lay_out(group)
            last = torch.tensor([rows[-1] for rows in layout.rows], device=self.device)
            parts.append(self._hidden(PackedRows(layout, self.device))[last])
        head = self._head()
        return self._scale.logits(torch.cat(parts), head.weight, head.bias)

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

    def without_adapter(self) -> AbstractContextManager[None]:
        """Compute with the base model inside the block; only where an adapter is trained."""
        raise NotImplementedError

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

    def _open(self, settings: TrainingSettings) -> PreTrainedModel:
        return load_model(self.model_path, self.dtype, self.device)

    def _compute(
        self, packed: PackedRows, rows: Tensor, targets: Tensor, temperatures: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """[K] logprobs and entropies of ``targets``, the tokens after ``rows``."""
        return self._score(self._hidden(packed)[rows], targets, self._head(), temperatures)

    def _score(
        self, hidden: Tensor, targets: Tensor, head: nn.Linear, temperatures: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scale, weight, bias, bonus = self._scale, head.weight, head.bias, self._entropy_gradient
        if bonus or weight.requires_grad or bias is not None or scale.cap is not None:
            return scaled_token_logprobs(
                hidden, targets, weight, bias, temperatures, scale=scale, entropy_gradient=bonus
            )
        return token_logprobs(hidden if scale.factor == 1.0 else hidden * scale.factor, targets, weight, temperatures)

    def _head(self) -> nn.Linear:
        head = self._base.get_output_embeddings()
        assert isinstance(head, nn.Linear)  # checked when it was loaded
        return head

    def _hidden(self, packed: PackedRows) -> Tensor:
        """[N, width] last hidden states, in the dtype of the weights: those of Mamba-2 are wider."""
        wanted: dict[str, Any] = {"position_ids": packed.positions, "rows": packed} if self.packing.packed else {}
        found = _decoder(self._base)(input_ids=packed.ids, use_cache=False, **wanted)
        return found.last_hidden_state[0].to(self.dtype)

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

    def _check(self, plain: Sequence[Tensor]) -> None:
        """Pack sequences only where that changes none of them. Raises ``TrainingError`` for a model that is not known.

        The attention of a model that is not packed stays its own.
        """
        own = self._base.config._attn_implementation
        reason = problem_of_positions(self._base)
        if not reason:
            try:
                self._base.set_attn_implementation(ATTENTION_NAME)
                reason = self._problem(plain)
            except (NotImplementedError, TypeError, AttributeError, RuntimeError, ValueError) as error:
                reason = f"its attention cannot be replaced ({describe(error).removeprefix('ValueError: ')})"
        if not reason:
            return
        self.packing = Packing(False, reason)
        if self._base.config._attn_implementation != own:
            self._base.set_attn_implementation(own or "eager")
        try:
            problem = self._problem(plain)
        except (NotImplementedError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            problem = describe(error)
        if problem:
            raise self._refusal(problem)

    def _problem(self, plain: Sequence[Tensor]) -> str:
        """The error of packed logprobs, in one clause; empty if they are correct.

        They must be those of the ``plain`` model, one sequence at a time. Those of a pack must not depend on tokens of
        another sequence: a gradient is 0 or not, at any precision.
        """
        sequences = sequences_of(self.vocabulary)
        layout, leaves = lay_out(sequences), list[Tensor]()

        def keep(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
            leaves.append(embedded.detach().requires_grad_())
            return leaves[-1]

        hook = self._base.get_input_embeddings().register_forward_hook(keep)
        try:
            with torch.enable_grad():
                wanted = [(s, t) for s, sequence in enumerate(sequences) for t in range(1, len(sequence))]
                found = list(torch.split(self.logprobs(layout, wanted)[0], [len(each) - 1 for each in sequences]))
                for part, rows in zip(found, layout.rows, strict=True) if self.packing.packed else ():
                    (gradient,) = torch.autograd.grad(part.sum(), leaves[0], retain_graph=True)
                    others = sorted({*range(len(layout.ids))} - {*rows})
                    if bool(gradient.flatten(0, -2)[others].any()):
                        return "its layers carry state from one packed sequence to the next"
        finally:
            hook.remove()
        with torch.no_grad():
            return problem_of_logprobs(found, plain, self.dtype)

    def _refusal(self, cause: str) -> TrainingError:
        return TrainingError(
            f"{self.model_path}: this architecture ({self._base.config.model_type}) cannot be trained: {cause}"
        )


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

"""Several processes that train one adapter: each computes a share of every optimiser step, and all end with the same.

``torchrun`` or ``accelerate launch`` starts them and says in the environment who is who. Every rank holds the samples,
the adapter's weights and the optimiser, and draws the same batches; only the forward and backward passes of a batch are
dealt out. A token's weight is that in the whole batch, so that the sum of all ranks' gradients is the gradient that one
process would compute. Files are written, and servers told, by rank 0 alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as group
from safetensors.torch import load, save
from torch import Tensor

from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.training.losses.items import Item, passes
from openhands_rl_plugin.training.losses.logprobs import Diagnostics

_PIECE = 64 * 1024**2
_PATIENCE = timedelta(days=1)
"""The others wait while rank 0 scores episodes or writes a model; when a process dies the launcher ends them all."""

Checkpoint = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors and counters, as ``checkpoint`` reads and writes them."""


class Ranks(Protocol):
    """The processes that train together. Every method but ``deal`` is to be called by all of them."""

    rank: int
    """Which of them this is."""

    size: int

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in place. They have one dtype."""
        ...

    def tell(self, state: Checkpoint | None) -> Checkpoint | None:
        """What rank 0 knows; what the others give is not looked at."""
        ...

    def say(self, text: str) -> str:
        """The text of rank 0, likewise."""
        ...

    def agree(self, what: str, digest: str) -> None:
        """Raise ``TrainingError`` unless all ranks have the same ``digest`` of ``what``."""
        ...

    def deal[T](self, passes: Sequence[T]) -> tuple[list[T], list[T]]:
        """The passes of this rank, and some of the others' that it computes without any weight.

        With the latter all ranks compute equally many, which those who fetch each other's weights must.
        """
        ...


class Alone:
    """One process."""

    rank, size = 0, 1

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Nothing is to be added."""

    def tell(self, state: Checkpoint | None) -> Checkpoint | None:
        """What it knows itself."""
        return state

    def say(self, text: str) -> str:
        """Its own."""
        return text

    def agree(self, what: str, digest: str) -> None:
        """It does."""

    def deal[T](self, passes: Sequence[T]) -> tuple[list[T], list[T]]:
        """All of them."""
        return list(passes), []


class Together:
    """This process of a group that torch has connected, whose tensors are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.rank = group.get_rank()
        self.size = group.get_world_size()
        self._device = device

    def add(self, tensors: Sequence[Tensor]) -> None:
        """In one message: the weights of an adapter are many and small."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self._device)
        group.all_reduce(flat)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def tell(self, state: Checkpoint | None) -> Checkpoint | None:
        """As a file in memory, and a text."""
        counters = json.loads(self.say(json.dumps(state[1] if state is not None else None)))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state[0].items()} if state else {}
        found = load(self._told(save(tensors)))
        return None if counters is None else (found, counters)

    def say(self, text: str) -> str:
        """As UTF-8."""
        return self._told(text.encode()).decode()

    def agree(self, what: str, digest: str) -> None:
        """By comparing with rank 0."""
        differing = torch.tensor(float(self._told(digest.encode()) != digest.encode()))
        self.add([differing])
        if count := int(differing.item()):
            raise TrainingError(
                f"{count} of {self.size} ranks have other {what} than rank 0; give all of them the same store, model, "
                "adapters and options, on a file system that all nodes share"
            )

    def deal[T](self, passes: Sequence[T]) -> tuple[list[T], list[T]]:
        """Every ``size``-th; the first again for those that are missing."""
        mine = list(passes[self.rank :: self.size])
        return mine, list(passes[:1]) * (-(-len(passes) // self.size) - len(mine))

    def _told(self, data: bytes) -> bytes:
        """The data of rank 0, a piece at a time: the device is full of other things."""
        length = torch.tensor([len(data)], device=self._device)
        group.broadcast(length, src=0)
        found = bytearray(int(length.item()))
        for start in range(0, len(found), _PIECE):
            piece = torch.zeros(min(_PIECE, len(found) - start), dtype=torch.uint8, device=self._device)
            if self.rank == 0:
                piece.copy_(torch.frombuffer(bytearray(data[start : start + _PIECE]), dtype=torch.uint8))
            group.broadcast(piece, src=0)
            found[start : start + _PIECE] = piece.cpu().numpy().tobytes()
        return bytes(found)


@contextmanager
def joined_ranks(environ: Mapping[str, str] | None = None) -> Iterator[Ranks]:
    """Join the processes that a launcher has started, until the block ends; ``Alone`` without one.

    On GPUs each process takes that of its ``LOCAL_RANK``. Raises ``TrainingError`` when the others cannot be reached.
    """
    known = os.environ if environ is None else environ
    if int(known.get("WORLD_SIZE", "1")) == 1:
        yield Alone()
        return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(known.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    try:
        group.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise TrainingError(
            f"the other processes of this training cannot be joined: {describe(error)}; start all of them with "
            "torchrun or accelerate launch"
        ) from error
    try:
        yield connected_ranks(device)
    finally:
        group.destroy_process_group()


def connected_ranks(device: torch.device) -> Ranks:
    """The processes that this one has joined, if it has."""
    return Together(device) if group.is_initialized() else Alone()


def is_leader(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process writes files and speaks to people. Known before the others are joined."""
    return int((os.environ if environ is None else environ).get("RANK", "0")) == 0


def shares(
    ranks: Ranks, items: Sequence[Item], max_tokens: int, *, whole_units: bool
) -> tuple[list[list[Item]], list[list[Item]]]:
    """The passes over ``items``, dealt out; the longest first, so that nobody waits long."""
    tokens = sum(len(item.sample.input_ids) for item in items)
    made = passes(items, min(max_tokens, -(-tokens // ranks.size)), whole_units=whole_units)
    if ranks.size > 1:
        made.sort(key=lambda group: -sum(len(item.sample.input_ids) for item in group))
    return ranks.deal(made)


def add_up(ranks: Ranks, loss: float, found: Diagnostics) -> tuple[float, Diagnostics]:
    """The loss and the diagnostics of all ranks' passes together."""
    if ranks.size == 1:
        return loss, found
    means = asdict(found)
    tokens = means.pop("tokens")
    sums = torch.tensor([loss, tokens, *(tokens * mean for mean in means.values())], dtype=torch.float64)
    ranks.add([sums])
    loss, total, *rest = sums.tolist()
    if not total:
        return loss, Diagnostics()
    return loss, Diagnostics(int(total), **{name: each / total for name, each in zip(means, rest, strict=True)})

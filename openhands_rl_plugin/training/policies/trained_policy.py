"""What a trainer asks of the policy that it trains, wherever its weights are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from openhands_rl_plugin.training.data.layout import Layout
from openhands_rl_plugin.training.policies.packed_model import Packing


class TrainedPolicy(Protocol):
    """A model that computes logprobs of packed sequences.

    ``longest``: tokens of a sequence; ``vocabulary``: number of token ids; ``sharded``: over several processes.
    """

    packing: Packing
    longest: int
    vocabulary: int
    sharded: bool

    @property
    def device(self) -> torch.device:
        """Where logprobs are computed."""
        ...

    @property
    def probe_tolerance(self) -> float:
        """Largest accepted mean absolute difference of a server's logprobs from these, in nats."""
        ...

    def notes(self) -> list[str]:
        """What a user should know before training begins, a line each."""
        ...

    def logprobs(
        self, layout: Layout, wanted: list[tuple[int, int]], temperatures: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies ([K] float32) of tokens ``t > 0`` of sequences ``s``; ``wanted``: pairs ``(s, t)``."""
        ...

    def sequence_logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        """The logprobs of ids 1 .. T-1."""
        ...

    def without_adapter(self) -> AbstractContextManager[None]:
        """The base model, until the block ends."""
        ...

"""How an episode was sampled, and whether its recorded logprobs are those of the policy that sampled it.

Servers report the logprobs of the whole distribution at temperature 1, and the trainer computes the same ones. What was
sampled at another temperature, or with a nucleus, came from another distribution: on its tokens even the first ratio,
which is 1, is wrong, so that no clip and no correction sees it.
"""

from __future__ import annotations

from openhands_rl_plugin.core.types import SamplingParams, Trajectory

AS_RECORDED = (1.0, 1.0)
"""The temperature and the ``top_p`` of the distribution that logprobs are recorded of."""


def samplings(trajectory: Trajectory) -> tuple[tuple[float, float], ...]:
    """The different temperatures with their ``top_p`` of the answers that were acted on, in order."""
    path = (trajectory.nodes[at] for at in trajectory.path())
    return tuple(sorted({_sampling(node.sampling) for node in path if node.sampled}))


def is_tempered(trajectory: Trajectory) -> bool:
    """Whether an answer that was acted on came from another distribution than its logprobs are of."""
    return any(sampling != AS_RECORDED for sampling in samplings(trajectory))


def _sampling(asked: SamplingParams | None) -> tuple[float, float]:
    """What nobody asked for is the server's own, and that is 1."""
    temperature, top_p = (None, None) if asked is None else (asked.temperature, asked.top_p)
    return 1.0 if temperature is None else temperature, 1.0 if top_p is None else top_p

"""What stored answers lack for training, by cause: token ids, logprobs, what came before, whole requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping

from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.core.redaction import is_redacted
from openhands_rl_plugin.core.types import Node, Score, Trajectory

REMEDY = (
    "training with rewards needs token ids and logprobs: serve the model with vLLM or `openhands-rl serve`, and let "
    "the agent use /v1/chat/completions; `evaluate` asks for a stock agent's with --token-ids"
)
_NAMES = {"token_ids": "token ids"}


async def gaps_by_episode(
    found: AsyncIterator[tuple[Trajectory, tuple[Score, ...]]],
) -> dict[str, Counter[str]]:
    """For each episode that lacks something, by its id: how many answers, by cause."""
    gaps: dict[str, Counter[str]] = {}
    async for trajectory, _ in found:
        if counted := Counter(_gaps(trajectory)):
            gaps[trajectory.id] = counted
    return gaps


def causes_of(metadata: Mapping[str, object]) -> Iterator[str]:
    """What a node's metadata says that it lacks, and why."""
    missing = metadata.get(MISSING)
    for what, why in missing.items() if isinstance(missing, dict) else ():
        yield f"no {_NAMES.get(what, what)}: {why}"


def _gaps(trajectory: Trajectory) -> Iterator[str]:
    with_secret: set[int] = set()
    for index, node in enumerate(trajectory.nodes):
        if node.parent in with_secret or is_redacted(node.message):
            with_secret.add(index)
        if node.sampled:
            yield from _of_answer(node, index in with_secret)
    unrecorded = trajectory.evidence.get("unrecorded")
    for path, count in unrecorded.items() if isinstance(unrecorded, dict) else ():
        if isinstance(count, int):
            yield from [f"not recorded: requests to /v1/{path}"] * min(count, 1_000_000)


def _of_answer(node: Node, with_secret: bool) -> Iterator[str]:
    told = list(causes_of(node.metadata))
    if node.tokens is None and not told:
        told = ["no token ids: dropped with a secret" if with_secret else "no token ids"]
    yield from told
    if unknown := node.metadata.get("unknown_before"):
        yield f"not recorded whole: {_kind(str(unknown))}"


def _kind(unknown: str) -> str:
    """The cause without what differs from request to request."""
    return "an earlier response was not recorded" if unknown.startswith("the earlier response") else unknown

"""Next best: the greedy answer, or the likeliest of some samples that was not acted on before, with any server.

A policy that is sure of a wrong answer repeats it for as long as it may. This makes it go on to its next best one: for
episodes to learn from (``algorithm = "sft"`` in a loop imitates them), and for tasks where another try costs little.
"""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.rollout.strategies.annotations import action_key, notes, times_merged
from openhands_rl_plugin.rollout.strategies.branching import BranchingStrategy
from openhands_rl_plugin.rollout.strategies.budget import Least
from openhands_rl_plugin.rollout.strategies.options import BranchOptions, SearchOptions, options_of
from openhands_rl_plugin.rollout.strategies.search import Search


class NextBestOptions(BranchOptions):
    """Where the greedy answer was acted on before, ``n`` others are drawn."""

    n: int = Field(default=4, ge=1)


class NextBestStrategy(BranchingStrategy):
    """Answers greedily; where that repeats a turn of the episode, takes the likeliest of ``n`` samples that does not.

    Turns before a host rewrote the history count, too, and those whose answer it could not read. Likelihoods are the
    server's logprobs (of temperature 1, or of what was sampled at, as the server reports them); without any, the
    answer that was drawn most often is taken. Where all repeat, the likeliest is acted on again. It needs no forks, and
    no value.
    """

    Options = NextBestOptions
    name = "NextBest"
    greedy: ClassVar[bool] = True
    """Its answers have no probability, whatever the options, so that they are imitated and not reinforced."""

    def __init__(self, options: NextBestOptions | None = None, **changes: object) -> None:
        self.options = options_of(NextBestOptions, options, changes, None)
        shared = {name: getattr(self.options, name) for name in BranchOptions.model_fields}
        super().__init__(SearchOptions.model_validate(shared), Least(calls=1))

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """As in ``BranchingStrategy``; nothing is tried in forks."""
        return await super().decide(tree, engine, None)

    async def choose(self, search: Search) -> int | None:
        """The greedy answer, or the likeliest other one."""
        tree, path = search.tree, frozenset(search.tree.path(search.root))
        turns = (node for at, node in enumerate(tree.nodes) if node.sampled and (at in path or "report" in notes(node)))
        tried = {action_key(node.message) for node in turns}

        def rank(at: int) -> tuple[bool, float, int]:
            tokens, noted = tree.nodes[at].tokens, notes(tree.nodes[at])
            likelihood = sum(tokens.logprobs) if tokens is not None and tokens.logprobs else -math.inf
            return action_key(tree.nodes[at].message) not in tried, likelihood, times_merged(noted)

        first = await search.plain(greedy=True)
        if rank(first)[0]:
            return first
        return max([first, *await search.candidates(search.root, self.options.n)], key=rank)

    async def _without_search(self, search: Search) -> int:
        return await search.plain(greedy=True)

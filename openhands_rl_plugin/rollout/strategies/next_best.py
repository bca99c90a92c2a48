"""Next best: the likeliest answer that was not acted on before, as a beam would find it, with any server.

A policy that is sure of a wrong answer repeats it for as long as it may. This makes it go on to its next best one: for
episodes to learn from (``algorithm = "sft"`` in a loop imitates them), and for tasks where another try costs little.
"""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import SamplingParams
from openhands_rl_plugin.rollout.strategies.annotations import action_key, notes, times_merged
from openhands_rl_plugin.rollout.strategies.branching import BranchingStrategy
from openhands_rl_plugin.rollout.strategies.budget import Least
from openhands_rl_plugin.rollout.strategies.options import BranchOptions, SearchOptions, options_of
from openhands_rl_plugin.rollout.strategies.search import Search


class NextBestOptions(BranchOptions):
    """Where the greedy answer was acted on before, ``n`` others are drawn, hot, and without what is far less likely."""

    n: int = Field(default=4, ge=1)
    temperature: float = Field(default=2.0, gt=0)
    sampling: SamplingParams = SamplingParams(min_p=0.1)


class NextBestStrategy(BranchingStrategy):
    """Answers greedily; where that repeats a turn of the episode, takes the likeliest of ``n`` samples that does not.

    Likelihoods are the server's logprobs (of temperature 1, whatever was sampled at); without any, the answer that was
    drawn most often is taken. Where all repeat, the likeliest is acted on again. It needs no forks, and no value.
    """

    Options = NextBestOptions
    name = "NextBest"

    def __init__(self, options: NextBestOptions | None = None, **changes: object) -> None:
        self.options = options_of(NextBestOptions, options, changes, None)
        shared = {name: getattr(self.options, name) for name in BranchOptions.model_fields}
        super().__init__(SearchOptions.model_validate(shared), Least(calls=1))

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """As in ``BranchingStrategy``; nothing is tried in forks."""
        return await super().decide(tree, engine, None)

    async def choose(self, search: Search) -> int | None:
        """The greedy answer, or the likeliest other one."""
        tree = search.tree
        tried = {action_key(tree.nodes[at].message) for at in tree.path(search.root) if tree.nodes[at].sampled}

        def rank(at: int) -> tuple[bool, float, int]:
            tokens, noted = tree.nodes[at].tokens, notes(tree.nodes[at])
            likelihood = sum(tokens.logprobs) if tokens is not None else 0.0
            return action_key(tree.nodes[at].message) not in tried, likelihood, times_merged(noted)

        first = await search.plain(temperature=0.0)
        if not tried or rank(first)[0]:
            return first
        return max([first, *await search.candidates(search.root, self.options.n)], key=rank)

    async def _without_search(self, search: Search) -> int:
        return await search.plain(temperature=0.0)

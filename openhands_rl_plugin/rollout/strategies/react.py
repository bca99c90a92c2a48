"""ReAct: one completion a turn, executed as it is (Yao et al. 2022, "ReAct: Synergizing Reasoning and Acting")."""

from __future__ import annotations

from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Frozen, SamplingParams


class ReActOptions(Frozen):
    """How the completions are sampled."""

    sampling: SamplingParams = SamplingParams()


class StandardReActStrategy:
    """Samples once and commits the answer."""

    Options = ReActOptions

    def __init__(self, options: ReActOptions | None = None) -> None:
        self.options = options or ReActOptions()

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Propose one completion below ``tree.head`` and return its index."""
        completions = await engine.complete(tree.messages(), tools=tree.tools, sampling=self.options.sampling)
        return tree.propose(completions[0])

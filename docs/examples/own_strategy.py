"""A strategy of your own: self-consistency. It samples several answers, and acts on the one that most of them give.

    python own_strategy.py     asks the pretrained model of the demo, one sample a turn and by majority
In config.toml:  [rl] rollout_strategy = "own_strategy:Majority"   and   [rl.strategy] n = 7
"""

from __future__ import annotations

import tempfile
from collections import Counter

from openhands_rl_plugin import EpisodeTree, Frozen, Message, Observation, RLAgent, RLAgentConfig, Task, demo_model
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine


class Options(Frozen):
    n: int = 7


class Majority:
    """Wang et al. 2022 (arXiv 2203.11171): the commonest answer; of equally common ones the first."""

    Options = Options

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """All answers stay in the tree as siblings; the node of one of the commonest is acted on."""
        answers = await engine.complete(tree.messages(), tools=tree.tools, n=self.options.n)
        proposed = [tree.propose(answer) for answer in answers]
        said = {at: city for at in proposed if (city := _city(tree.nodes[at].message))}
        if not said:
            return proposed[0]
        commonest = Counter(said.values()).most_common(1)[0][0]
        return next(at for at, city in said.items() if city == commonest)


CAPITALS = {"Kenya": "Nairobi", "Norway": "Oslo", "Peru": "Lima", "Austria": "Vienna", "Cuba": "Havana"}


def _city(message: Message) -> str:
    words = "".join(each if each.isalpha() else " " for each in message.content or "").split()
    return next((word for word in words if word in CAPITALS.values()), "")


class Capitals:
    """1.0 for an answer that names the right city first."""

    async def reset(self, task: Task) -> Observation:
        """``data["idx"]`` is the country."""
        self.country, self.city = list(CAPITALS.items())[int(str(task.data.get("idx", 0)))]
        return Observation(messages=(Message(role="user", content=f"What is the capital of {self.country}?"),))

    async def step(self, action: Message) -> Observation:
        return Observation(reward=float(_city(action) == self.city), terminated=True)

    async def evidence(self) -> dict[str, str]:
        return {"city": self.city}

    async def close(self) -> None: ...


def success(strategy: str) -> float:
    """The share of right answers, each country asked eight times."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"env_name": f"{__name__}:Capitals", "rollout_strategy": strategy, "max_response_length": 16}
        config = RLAgentConfig.model_validate({**given, "max_turns": 1, "storage": {"path": folder}})
        with RLAgent(demo_model(), config=config) as agent:
            episodes = agent.run(task_indices=range(len(CAPITALS)), batch_size=8)
    return sum(episode["reward"] or 0.0 for episode in episodes) / len(episodes)


if __name__ == "__main__":
    print(f"one sample: {success('StandardReAct'):.2f}; majority of seven: {success(f'{__name__}:Majority'):.2f}")

"""An environment of your own that can be forked, an agent in it, and a search that looks ahead.

python own_environment.py     plays it with the pretrained model of the demo, without and with MCTS
"""

from __future__ import annotations

import copy
import tempfile

from openhands_rl_plugin import Message, Observation, RLAgent, RLAgentConfig, Task, demo_model


class Lights:
    """Three lamps, some of which are on. Naming a lamp switches it. All on: 1.0."""

    LAMPS = ("red", "green", "blue")

    async def reset(self, task: Task) -> Observation:
        """``data["idx"]`` says which lamps are on: the bits of a number from 0 to 6."""
        number = int(str(task.data.get("idx", 0))) % 7
        self.on = {lamp: bool(number >> at & 1) for at, lamp in enumerate(self.LAMPS)}
        rules = "Switch lamps until all are on. Answer with one word: red, green or blue."
        return Observation(messages=(Message(role="system", content=rules), self._state()))

    async def step(self, action: Message) -> Observation:
        """The first lamp that the answer names is switched."""
        words = (action.content or "").lower().split()
        named = next((word.strip(".,!") for word in words if word.strip(".,!") in self.LAMPS), None)
        if named is None:
            return Observation(messages=(Message(role="user", content="Name a lamp: red, green or blue."),), reward=0.0)
        self.on[named] = not self.on[named]
        done = all(self.on.values())
        return Observation(messages=() if done else (self._state(),), reward=float(done), terminated=done)

    async def fork(self) -> Lights:
        """A copy of the episode: what searches look ahead in."""
        return copy.deepcopy(self)

    async def evidence(self) -> dict[str, list[str]]:
        """Which lamps were on at the end."""
        return {"on": [lamp for lamp, on in self.on.items() if on]}

    async def close(self) -> None:
        """Nothing is held."""

    def _state(self) -> Message:
        shown = ", ".join(f"{lamp} is {'on' if on else 'off'}" for lamp, on in self.on.items())
        return Message(role="user", content=f"{shown}.")


def success(strategy: str, options: dict[str, object], tasks: int) -> float:
    """The share of tasks that are solved within four turns."""
    with tempfile.TemporaryDirectory() as folder:
        config = RLAgentConfig.model_validate(
            {
                "env_name": f"{__name__}:Lights",
                "rollout_strategy": strategy,
                "strategy": options,
                "max_turns": 4,
                "max_response_length": 8,
                "react_format": False,
                "storage": {"path": f"{folder}/trajectories"},
                "serving": {"adapters_path": f"{folder}/adapters"},
            }
        )
        with RLAgent(demo_model(), config=config) as agent:
            episodes = agent.run(task_indices=range(tasks))
    return sum((episode["reward"] or 0.0) >= 1.0 for episode in episodes) / tasks


if __name__ == "__main__":
    print(f"ReAct: {success('StandardReAct', {}, 7):.2f}")
    print(f"MCTS:  {success('MCTS', {'num_simulations': 16, 'value': 'rollout'}, 7):.2f}")

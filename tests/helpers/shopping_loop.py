"""A loop over the embedded shop with a tiny random model, in this process: quick enough for tests.

The model buys nothing, so what is reinforced is how many of its letters are vowels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_shop import GOAL, INSTRUCTION, ORACLE

from openhands_rl_plugin.config.rl import LoopSettings, RLSettings, ServingSettings, TrainingSettings
from openhands_rl_plugin.core.protocols import Environment, LLMEngine
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, Score, StrategySpec, Task, Trajectory
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.client import OpenAIEngine, SeededEngine
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout.episode import SessionRunner
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.testing import ScriptedEngine
from openhands_rl_plugin.training.loop.loop import LoopParts
from openhands_rl_plugin.training.loop.plan import LoopPlan
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

MODEL = "talker"
LIMITS = Limits(max_turns=2, max_response_length=12)
TASKS = tuple(
    Task(id=f"webshop-{letter}", environment="webshop", instruction=INSTRUCTION, data={"idx": GOAL})
    for letter in "abcdefgh"
)


class VowelReward:
    """The share of vowels in the answers."""

    version = "vowels-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        text = "".join(node.message.content or "" for node in trajectory.sampled()).lower()
        share = sum(letter in "aeiou" for letter in text) / max(len(text), 1)
        return Score(trajectory_id=trajectory.id, reward=share, reward_version=self.version)


def write_talker(path: Path) -> Path:
    """A model directory with room for the shop's pages."""
    from tiny_model import write_model  # needs torch, and plans do not

    return write_model(path, max_position_embeddings=4096, initializer_range=0.05, num_hidden_layers=1)


def make_plan(adapter: str, training: Any = None, *, run_id: str = "shopping", **loop: Any) -> LoopPlan:
    """Three iterations of two tasks, four episodes each. ``loop`` and ``training``: other settings than these."""
    usual = {"batch_size": 8, "num_epochs": 1, "dtype": "float32", "lora_rank": 4, "lora_alpha": 8}
    chosen = {**usual, "learning_rate": 1e-3, "correction": "truncate", **(training or {})}
    sizes = {"iterations": 3, "tasks_per_iteration": 2, "samples_per_task": 4, "demonstrations": 1, **loop}
    settings = RLSettings(
        max_workers=8,
        max_response_length=12,
        training=TrainingSettings.model_validate(chosen),
        loop=LoopSettings.model_validate(sizes),
        serving=ServingSettings(model=MODEL, adapter=adapter),
    )
    return LoopPlan(
        settings=settings,
        run_id=run_id,
        demonstrations=TASKS[: settings.loop.demonstrations],
        training=TASKS,
        held_out=TASKS[:2],
        warm_start=TrainingSettings.model_validate({**usual, "algorithm": "sft", "learning_rate": 1e-5}),
    )


class ShopWorld:
    """What a loop needs: the shop's and the model server's URLs, and wrappers that a test may put around parts."""

    def __init__(self, shop: str, server: str, model: Path) -> None:
        self.shop, self.server, self.model = shop, server, model
        self.asked: list[EpisodeRequest] = []
        self.around_engine: Callable[[EpisodeRequest, LLMEngine], LLMEngine] = lambda request, engine: engine

    def parts(self, directory: Path, *, keep: int = 3) -> LoopParts:
        """Everything real; the state lies in ``directory``."""
        adapters = AdapterStore(directory / "adapters")
        storage = FileTrajectoryStorage(directory / "trajectories")
        return LoopParts(
            runner=SessionRunner(
                make_environment=self._environment,
                make_strategy=lambda request: StandardReActStrategy(),
                make_engine=self._engine,
                strategy_spec=StrategySpec(name="StandardReAct"),
                base_model=MODEL,
                limits=LIMITS,
                storage=storage,
            ),
            demonstrator=SessionRunner(
                make_environment=self._environment,
                make_strategy=lambda request: StandardReActStrategy(),
                make_engine=lambda request: ScriptedEngine(ORACLE),
                strategy_spec=StrategySpec(name="oracle"),
                base_model="oracle",
                storage=storage,
            ),
            storage=storage,
            reward=ReturnReward(),
            objective=VowelReward(),
            adapters=adapters,
            publisher=AdapterPublisher(self.server, adapters, keep=keep),
            model=self.model,
            directory=directory,
        )

    def _environment(self, request: EpisodeRequest) -> Environment:
        return WebEnvClient(HttpEnvironmentOptions(base_url=self.shop, react_format=False))

    def _engine(self, request: EpisodeRequest) -> LLMEngine:
        self.asked.append(request)
        engine = OpenAIEngine(request.served_model or MODEL, f"{self.server}/v1", base_model=MODEL, retries=1)
        return self.around_engine(request, SeededEngine(engine, request.sampling, request.seed))

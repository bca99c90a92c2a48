"""The sizes of the demo, and smaller ones for CI."""

from __future__ import annotations

import random
from pathlib import Path

from pydantic import Field

from openhands_rl_plugin.config.rl import (
    LoopSettings,
    RLSettings,
    SamplingSettings,
    ServingSettings,
    StorageSettings,
    TrainingSettings,
)
from openhands_rl_plugin.contrib.webshop import WebShop
from openhands_rl_plugin.core.types import Frozen, SamplingParams, Task
from openhands_rl_plugin.training.loop.plan import LoopPlan

ADAPTER = "webshop"
ANSWER_TOKENS = 24
CONTEXT_TOKENS = 1280  # six turns fit; the server reserves that many tokens for every running episode
SEPARATOR = "\n"  # a page costs a third fewer tokens than with WebShop's " [SEP] "
HELD_OUT_ORDER = 20_240  # fixed, so that every seed of the demo is evaluated on the same goals
_OWN = {"kind", "max_staleness", "partial_rollouts", "patience"}
OTHER_SIZES = {name: True for name in LoopSettings.model_fields if name not in _OWN}
"""The keys of ``[rl.loop]`` that no demo reads: it has its own sizes."""


class DemoOptions(Frozen):
    """Sizes of the run. ``seed`` changes everything but the shop and the held-out goals."""

    run_directory: Path
    model_directory: Path | None = None
    seed: int = 0
    held_out: int = Field(default=100, ge=1)
    base_held_out: int = Field(default=24, ge=1)
    """Goals that the base model is evaluated on: 0 of 24 already has an interval that ends below SFT's."""
    demonstrations: int = Field(default=64, ge=1)
    iterations: int = Field(default=8, ge=0)
    tasks_per_iteration: int = Field(default=8, ge=1)
    samples_per_task: int = Field(default=6, ge=2)
    concurrency: int = Field(default=24, ge=1)
    results_per_page: int = 4
    max_turns: int = 6
    warm_start_epochs: int = 2
    warm_start_rate: float = 1e-3
    reinforcement_rate: float = 2e-4
    loop: LoopSettings = LoopSettings()

    def shortened(self) -> DemoOptions:
        """The same stages in minutes, for CI."""
        return self.model_copy(
            update={
                "held_out": 4,
                "demonstrations": 4,
                "iterations": 1,
                "tasks_per_iteration": 2,
                "samples_per_task": 4,
                "warm_start_epochs": 4,
                "max_turns": 5,
            }
        )

    @property
    def stages(self) -> int:
        """Stages of the whole run: three evaluations, the demonstrations, the warm start and the iterations."""
        return 5 + self.iterations

    def shop(self) -> WebShop:
        """The shop of the server and of the scripted demonstrator."""
        return WebShop(results_per_page=self.results_per_page, separator=SEPARATOR)

    def settings(self, *, shop_url: str, model_url: str, base_model: str) -> RLSettings:
        """The ``[rl]`` section of this run."""
        return RLSettings(
            max_turns=self.max_turns,
            max_prompt_length=CONTEXT_TOKENS - ANSWER_TOKENS,
            max_response_length=ANSWER_TOKENS,
            react_format=False,
            env_name="webshop",
            env_server_base=shop_url,
            max_workers=self.concurrency,
            storage=StorageSettings(path=str(self.run_directory / "trajectories")),
            sampling=SamplingSettings(seed=self.seed),
            training=self._reinforcement(),
            loop=self.loop,
            serving=ServingSettings(
                base_url=f"{model_url}/v1",
                model=base_model,
                adapter=ADAPTER,
                adapters_path=str(self.run_directory / "adapters"),
            ),
        )

    def plan(self, shop: WebShop, *, base_model: str, probe_ids: tuple[int, ...]) -> LoopPlan:
        """The run over the shop's goals: disjoint demonstrations, training tasks and held-out tasks."""
        train = _shuffled(shop.goal_indices("train"), self.seed)
        held_out = _shuffled(shop.goal_indices("heldout"), HELD_OUT_ORDER)[: self.held_out]
        sampled = SamplingParams(temperature=1.0, max_tokens=ANSWER_TOKENS)
        return LoopPlan(
            run_id=f"demo-{self.seed}",
            base_model=base_model,
            adapter=ADAPTER,
            demonstrations=tuple(_task(goal, "train") for goal in train[: self.demonstrations]),
            training=tuple(_task(goal, "train") for goal in train[self.demonstrations :]),
            held_out=tuple(_task(goal, "heldout") for goal in held_out),
            base_held_out=self.base_held_out,
            iterations=self.iterations,
            tasks_per_iteration=self.tasks_per_iteration,
            samples_per_task=self.samples_per_task,
            warm_start=self._warm_start(),
            reinforcement=self._reinforcement(),
            sampling=sampled,
            evaluation=sampled,
            concurrency=self.concurrency,
            seed=self.seed,
            probe_ids=probe_ids,
        )

    def _warm_start(self) -> TrainingSettings:
        return TrainingSettings(
            algorithm="sft",
            learning_rate=self.warm_start_rate,
            num_epochs=self.warm_start_epochs,
            max_tokens_per_micro_batch=micro_batch_tokens(),
            seed=self.seed,
        )

    def _reinforcement(self) -> TrainingSettings:
        return TrainingSettings(
            learning_rate=self.reinforcement_rate,
            warmup_steps=4,
            num_epochs=1,
            batch_size=8,
            # Buying too early beats not buying: only whole episodes show that, not the turns on one page.
            state_weight=1.0,
            discount=0.95,
            # Stale episodes are weighted by their probability ratio.
            correction="truncate" if self.loop.kind == "async" else "none",
            max_tokens_per_micro_batch=micro_batch_tokens(),
            seed=self.seed,
        )


def micro_batch_tokens() -> int:
    """Tokens of a micro-batch, whose activations are the largest part of the trainer's memory.

    In bfloat16, where the processor has it, they take as much as half of them in float32.
    """
    import torch

    native = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return 1536 if native else 768


def _shuffled(goals: tuple[int, ...] | range | list[int], seed: int) -> list[int]:
    order = list(goals)
    random.Random(seed).shuffle(order)
    return order


def _task(goal: int, split: str) -> Task:
    return Task(id=f"webshop-{goal}", environment="webshop", data={"idx": goal}, split=split)

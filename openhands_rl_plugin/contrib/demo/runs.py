"""The two demos as runs of ``openhands-rl loop``: a shop, and functions with a bug; their sizes, also for CI."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from openhands_rl_plugin.apps.demo_model import NAME, ensure_model
from openhands_rl_plugin.apps.loop.checks import claim
from openhands_rl_plugin.apps.loop.run import LoopJob, LoopResult, run_loop
from openhands_rl_plugin.apps.loop.tasks import LoopTasks, TaskSource, loop_tasks
from openhands_rl_plugin.apps.serving import running_command
from openhands_rl_plugin.cli.terminal import ENDING
from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import (
    LoopSettings,
    RewardSettings,
    RLSettings,
    SamplingSettings,
    ServingSettings,
    StorageSettings,
    TrainingSettings,
    WorkspaceSettings,
)
from openhands_rl_plugin.contrib.repair.rows import BY_TESTS
from openhands_rl_plugin.contrib.repair.suites import RepairBackend
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.training.loop.loop import LoopListener

ADAPTER = "webshop"
ANSWER_TOKENS = 24
CONTEXT_TOKENS = 1280  # six turns fit; the server reserves that many tokens for every running episode
_OWN = {"kind", "max_staleness", "patience"}
OTHER_SIZES = {name: True for name in LoopSettings.model_fields if name not in _OWN}
"""The keys of ``[rl.loop]`` that no demo reads: it has its own sizes."""


class _Sizes(Frozen):
    """Options that both demos have, each with its own defaults."""

    run_directory: Path
    model_directory: Path | None = None
    seed: int = 0
    held_out: int = Field(default=100, ge=1)
    base_held_out: int = Field(default=24, ge=1)
    """Tasks that the base model is evaluated on: 0 of 24 already has an interval that ends below SFT's."""
    loop: LoopSettings = LoopSettings()

    @property
    def stages(self) -> int:
        """Stages of the whole run: three evaluations, the demonstrations, the warm start and the iterations."""
        return self.whole_loop.stages

    @property
    def whole_loop(self) -> LoopSettings:
        """``[rl.loop]`` of the run."""
        sizes = {name: getattr(self, name) for name in LoopSettings.model_fields if name in type(self).model_fields}
        return self.loop.model_copy(update=sizes)


class DemoOptions(_Sizes):
    """Sizes of the run. ``seed`` changes everything but the shop and the held-out goals."""

    demonstrations: int = Field(default=64, ge=1)
    iterations: int = Field(default=8, ge=0)
    tasks_per_iteration: int = Field(default=8, ge=1)
    samples_per_task: int = Field(default=6, ge=2)
    concurrency: int = Field(default=24, ge=1)
    max_turns: int = 6
    warm_start_epochs: int = 2
    warm_start_rate: float = 1e-3
    reinforcement_rate: float = 2e-4

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

    def settings(self) -> RLSettings:
        """The ``[rl]`` section of this run, but for the addresses of the shop and of the model."""
        return RLSettings(
            max_turns=self.max_turns,
            max_prompt_length=CONTEXT_TOKENS - ANSWER_TOKENS,
            max_response_length=ANSWER_TOKENS,
            react_format=False,
            env_name="webshop",
            max_workers=self.concurrency,
            storage=StorageSettings(path=str(self.run_directory / "trajectories")),
            sampling=SamplingSettings(seed=self.seed),
            reward=RewardSettings(name="success-bonus"),
            training=TrainingSettings(
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
            ),
            loop=self.whole_loop,
            serving=ServingSettings(
                model=NAME, adapter=ADAPTER, adapters_path=str(self.run_directory / "adapters"), server="embedded"
            ),
        )

    def warm_start(self) -> TrainingSettings:
        """Fine-tuning on the demonstrations, at a constant rate."""
        return TrainingSettings(
            algorithm="sft",
            learning_rate=self.warm_start_rate,
            num_epochs=self.warm_start_epochs,
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


REPAIR_ADAPTER = "repair"
REPAIR_CONTEXT = 1536
"""Episodes took at most 1,211 tokens; the server reserves it for each answer."""


class RepairOptions(_Sizes):
    """Sizes of the run. ``seed`` changes everything but the held-out tasks."""

    demonstrations: int = Field(default=100, ge=1)
    iterations: int = Field(default=5, ge=0)
    tasks_per_iteration: int = Field(default=32, ge=1)
    samples_per_task: int = Field(default=1, ge=1)
    proposals: int = Field(default=8, ge=2)
    """Answers in each state of a training episode, which are compared with each other."""
    evaluation_strategy: str = "StandardReAct"
    concurrency: int = Field(default=12, ge=1)
    processes: int = Field(default=1, ge=0)
    max_turns: int = 4
    """As many as the oracle takes where it errs most."""
    training_max_turns: int = 3
    """The last turn of a whole episode has little to compare: what was not repaired in three is rarely in four."""
    answer_tokens: int = Field(default=128, ge=16)
    """The most tokens of a completion; 99 of 100 edits of the oracle take no more than 97."""
    warm_start_epochs: int = 1
    warm_start_rate: float = 1e-3
    warm_start_batch_size: int = 16
    temperature: float = Field(default=1.0, gt=0)
    reinforcement_rate: float = 1e-4
    """At 2e-4 and 3e-4 some runs forget within thirty steps how a call is written: docs/background/how-it-learns.md."""
    reinforcement_batch_size: int = 8

    def shortened(self) -> RepairOptions:
        """The same stages in minutes, for CI."""
        return self.model_copy(
            update={
                "held_out": 2,
                "base_held_out": 2,
                "demonstrations": 4,
                "iterations": 1,
                "tasks_per_iteration": 1,
                "proposals": 2,
                "concurrency": 2,
                "answer_tokens": 24,
            }
        )

    def settings(self) -> RLSettings:
        """The ``[rl]`` section of this run, but for the address of the model.

        Any of the answers is acted on, as the policy would. To end the episode is worth less than to go on where the
        tests fail, else most who err end it, and more where they pass.
        """
        value: JsonObject = {"value": "reward", "value_options": {**BY_TESTS, "unfinished": 0.2}}
        return RLSettings(
            max_turns=self.max_turns,
            rollout_strategy="BestOfN",
            strategy={**value, "n": self.proposals, "act": "sampled", "temperature": self.temperature},
            max_prompt_length=REPAIR_CONTEXT - self.answer_tokens,
            max_response_length=self.answer_tokens,
            max_workers=self.concurrency,
            workspace=WorkspaceSettings(prompt="compact"),
            storage=StorageSettings(path=str(self.run_directory / "trajectories")),
            sampling=SamplingSettings(seed=self.seed, temperature=self.temperature),
            training=TrainingSettings(
                learning_rate=self.reinforcement_rate,
                lora_rank=64,  # keeps more of the drills than 16: docs/background/how-it-learns.md
                lora_alpha=128,
                algorithm="grpo",
                # Attempts of whole episodes teach less: all turns of an attempt share what its last one earned.
                tree="proposals",
                warmup_steps=4,
                num_epochs=2,
                batch_size=self.reinforcement_batch_size,
                correction="truncate" if self.loop.kind == "async" else "none",
                max_tokens_per_micro_batch=micro_batch_tokens(),
                seed=self.seed,
            ),
            loop=self.whole_loop,
            serving=ServingSettings(
                model=NAME,
                adapter=REPAIR_ADAPTER,
                adapters_path=str(self.run_directory / "adapters"),
                server="embedded",
                # Concurrent completions of all episodes share the server, so each may wait for the others.
                request_timeout=600,
            ),
        )


CACHE_BYTES = 128 * 1024**2
PREFILL_TOKENS = 1024
"""Prompt tokens a step: nobody waits for a first token here, and a prompt costs a tenth less than with 256 a step."""
REPAIR_CACHE_BYTES = 256 * 1024**2
"""23 kB a token: twelve episodes of 900 tokens, with what begins alike counted once."""
_PLACES = {"run_directory": True, "model_directory": True, "processes": True, "loop": OTHER_SIZES}
"""Options that may differ when a run is repeated in the same folder."""


def shop_tasks(options: DemoOptions) -> LoopTasks:
    """The goals of the shop for a run: disjoint demonstrations, training tasks and held-out tasks."""
    return loop_tasks(TaskSource(suite="webshop"), options.settings())


def run_demo(options: DemoOptions, listener: LoopListener | None = None, command: str = "") -> LoopResult:
    """Run the demo, or resume the one in ``options.run_directory``. ``command``: for its report.

    Raises ``ConfigError`` when the directory holds a run with other options, and any ``RLError`` of the parts.
    """
    claim(options.run_directory, options.model_dump(mode="json", exclude=_PLACES))
    model, settings = ensure_model(options.model_directory), options.settings()
    sizes = {"max-batch": options.concurrency, "max-model-len": CONTEXT_TOKENS, "cache-bytes": CACHE_BYTES}
    with (
        running_command(["env", "webshop"], options.run_directory / "logs" / "webshop.log") as url,
        _served(settings, options.run_directory, model, {**sizes, "prefill-tokens": PREFILL_TOKENS}) as served,
    ):
        job = LoopJob(
            settings=served.model_copy(update={"env_server_base": url}),
            tasks=shop_tasks(options),
            model=model,
            directory=options.run_directory,
            run_id=f"demo-{options.seed}",
            limits=settings.limits(),
            processes=1,
            warm_start=options.warm_start(),
            command=command,
            title="A small model learns to shop",
        )
        return ENDING.run(run_loop(job, listener))


@contextlib.contextmanager
def _served(settings: RLSettings, directory: Path, model: Path, sizes: dict[str, int]) -> Iterator[RLSettings]:
    """The settings with the address of a server of the model, which runs until the block ends."""
    words = ["serve", "--model", str(model), "--served-model-name", NAME, "--preload=false"]
    words += [f"--adapters={directory / 'adapters'}", *(f"--{name}={size}" for name, size in sizes.items())]
    with running_command(words, directory / "logs" / "serve.log") as url:
        yield settings.model_copy(update={"serving": settings.serving.model_copy(update={"base_url": f"{url}/v1"})})


def repair_tasks(options: RepairOptions) -> LoopTasks:
    """The tasks of the suite for a run; held out are functions of packages that it does not train on."""
    return loop_tasks(TaskSource(suite="repair-1"), options.settings())


def run_repair_demo(options: RepairOptions, listener: LoopListener, command: str) -> LoopResult:
    """Run the demo, or resume the one in ``options.run_directory``. ``command``: for its report.

    It runs in V0 where that is installed, else in V1. Raises ``ConfigError`` when the directory holds a run with
    other options or of the other host, and any ``RLError`` of the parts.
    """
    settings = options.settings()
    # A policy learns the names of one host's tools.
    claim(options.run_directory, {**options.model_dump(mode="json", exclude=_PLACES), "host": host_of(settings)})
    ENDING.run(RepairBackend().check())
    model = ensure_model(options.model_directory)
    sizes = {
        "max-batch": options.concurrency * 2,
        "max-model-len": REPAIR_CONTEXT,
        "cache-bytes": REPAIR_CACHE_BYTES,
    }
    with _served(settings, options.run_directory, model, sizes) as served:
        job = LoopJob(
            settings=served,
            tasks=repair_tasks(options),
            model=model,
            directory=options.run_directory,
            run_id=f"repair-{options.seed}",
            limits=settings.limits(),
            backend=RepairBackend(),
            processes=options.processes,
            graders=2,
            native_tool_calling=False,
            command=command,
            title="A small model is trained to repair code",
        )
        return ENDING.run(run_loop(job, listener))

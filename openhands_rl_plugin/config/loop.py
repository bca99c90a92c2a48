"""``[rl.loop]``: how often is rolled out, trained and published, and what on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.fields import Settings


class LoopSettings(Settings):
    """``[rl.loop]``: synchronous or asynchronous rollouts, the staleness they may have, and the sizes of a run."""

    kind: Literal["sync", "async"] = Field(
        default="sync",
        description="sync: rollouts and training in turn; async: rollouts continue while the policy is trained",
    )
    max_staleness: int = Field(
        default=1, ge=0, le=64, description="async: policy versions that an episode may be behind the policy it trains"
    )
    partial_rollouts: Literal["finish", "continue"] = Field(
        default="finish",
        description="async: after a publication, running episodes finish on their version, or continue on the newest",
    )
    patience: float = Field(
        default=600.0, ge=0, description="async: seconds that the model server may be unreachable before the run ends"
    )
    iterations: int = Field(default=5, ge=0, description="how often tasks are rolled out, trained on and published")
    tasks_per_iteration: int = Field(default=8, ge=1, description="training tasks rolled out per iteration")
    samples_per_task: int = Field(
        default=8, ge=1, description="episodes per task: the group size; 1 where none are compared"
    )
    training_max_turns: int = Field(
        default=0, ge=0, description="completions per training episode; 0: max_turns, as of the held-out episodes"
    )
    held_out: int = Field(
        default=50, ge=1, description="tasks to evaluate on before and after training, never trained on"
    )
    success_at: float = Field(
        default=0.999,
        description="least reward of a success; at 0.999: a threshold of [rl.reward], or the environment's own",
    )
    demonstrations: int = Field(
        default=0,
        ge=0,
        description="webshop, repair: scripted episodes to fine-tune the policy on before the iterations; 0: none",
    )
    warm_start_epochs: int = Field(default=2, ge=1, description="passes over the demonstrations")
    warm_start_rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="its learning rate, which decays to 0; 0: learning_rate of [rl.training]",
    )
    warm_start_batch_size: int = Field(
        default=0, ge=0, description="episodes per optimiser step of it; 0: batch_size of [rl.training]"
    )
    drills: int = Field(
        default=0,
        ge=0,
        description="repair: edits of functions of Python's library that the fine-tuning has beside the demonstrations",
    )
    short_drills: int = Field(
        default=0,
        ge=0,
        description="repair: further edits of library functions in a short form, a third of a drill's tokens",
    )
    more_tasks: int = Field(
        default=0,
        ge=0,
        description="repair: further training tasks, other bugs in the functions of the training split",
    )
    base_held_out: int = Field(
        default=0, ge=0, description="held-out tasks before any training, when failures are slow; 0: all of held_out"
    )
    evaluation_temperature: float = Field(
        default=-1.0, ge=-1, le=2, description="of the held-out episodes; 0: greedy, -1: that of [rl.sampling]"
    )
    evaluation_strategy: Annotated[str, registry.registered("strategies", besides=("",))] = Field(
        default="", description="rollout_strategy of the held-out episodes, without options; empty: as in training"
    )
    save_total_limit: int = Field(
        default=3, ge=2, description='method = "full": whole models of a run kept on disk, the newest ones'
    )

    @property
    def kept_versions(self) -> int:
        """Versions that a server must keep loaded, so that running episodes can finish on theirs."""
        return 2 if self.kind == "sync" else self.max_staleness + 1

    @property
    def stages(self) -> int:
        """Number of stages of a run: iterations, evaluations, and those of a warm start on demonstrations."""
        return self.iterations + (5 if self.demonstrations else 2)

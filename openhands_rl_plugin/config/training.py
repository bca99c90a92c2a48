"""``[rl.training]``: the algorithm, its options, the adapter and its optimiser, as one frozen model."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.fields import Settings
from openhands_rl_plugin.core.errors import ConfigError

AlgorithmName = Literal[
    "sft",
    "rejection-sampling",
    "reinforce++",
    "reinforce++-baseline",
    "rloo",
    "grpo",
    "dr-grpo",
    "dapo",
    "gspo",
    "cispo",
    "opd",
    "opsd",
    "dpo",
]

LOCAL = "local"
"""The training engine of this machine."""


def _probed_targets(value: tuple[str, ...]) -> tuple[str, ...]:
    if found := sorted({name.rpartition(".")[2] for name in value} & {"lm_head", "embed_tokens"}):
        raise ValueError(
            f"adapters of {', '.join(found)} are not trained: servers leave them out of the logprobs that a published "
            "adapter is checked by"
        )
    return value


class TrainingSettings(Settings):
    """``[rl.training]``: the algorithm, its options, the adapter and its optimiser.

    0 or "auto" for a clip bound or the aggregation takes the value of the algorithm's paper; see
    ``training/algorithms.py``.
    """

    engine: Annotated[str, registry.registered("training_engines", besides=(LOCAL,))] = Field(
        default=LOCAL, description="what trains: local: this machine; tinker: the Tinker API, see [rl.tinker]"
    )
    algorithm: AlgorithmName = Field(
        default="reinforce++-baseline",
        description="how episodes become a loss: imitation, policy gradients on groups of a task, or preferences (dpo)",
    )
    method: Literal["lora", "qlora", "full"] = Field(
        default="lora", description="what is trained: an adapter, qlora: on a 4-bit base model, or full: all weights"
    )
    learning_rate: float = Field(
        default=1e-5,
        gt=0,
        le=1,
        description="largest learning rate of AdamW, after the warm-up; LoRA takes 1e-5 to 1e-3",
    )
    num_epochs: int = Field(default=3, ge=1, description="passes over the chosen episodes")
    batch_size: int = Field(default=8, ge=1, description="episodes per optimiser step; dpo: pairs")
    max_grad_norm: float = Field(default=1.0, gt=0, description="a gradient with a larger L2 norm is scaled down to it")
    lora_rank: int = Field(
        default=16, ge=1, le=1024, description="rank of the adapter: a higher one can learn more and needs more memory"
    )
    lora_alpha: int = Field(
        default=32, ge=1, description="LoRA alpha; the adapter's scale is alpha / rank, with rslora alpha / sqrt(rank)"
    )
    lora_variant: Literal["lora", "rslora"] = Field(default="lora", description="variant of LoRA")
    target_modules: Annotated[tuple[str, ...], AfterValidator(_probed_targets)] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        strict=False,
        description="linear layers that the adapter is added to, by name",
    )
    clip_low: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="the probability ratio is clipped at 1 - this; 0: the algorithm's own bound",
    )
    clip_high: float = Field(
        default=0.0, ge=0, description="the probability ratio is clipped at 1 + this; 0: the algorithm's own bound"
    )
    aggregation: Literal["auto", "token", "sequence", "fixed"] = Field(
        default="auto", description="what the loss is averaged over; auto: as in the algorithm's paper"
    )
    overlong: Literal["keep", "leave-out"] = Field(
        default="keep", description="whether to train on episodes that were cut off by a limit"
    )
    kl: Literal["none", "k3"] = Field(default="none", description="estimator of the KL divergence to the base model")
    kl_coefficient: float = Field(default=0.001, ge=0, description="weight of the KL divergence beside the reward")
    entropy_coefficient: float = Field(
        default=0.0, ge=0, description="weight of the entropy bonus (verl's entropy_coeff); 0: off"
    )
    teacher: str = Field(
        default="",
        description="what scores the policy's own tokens: a base URL with prompt_logprobs, or the folder of a model "
        "or an adapter; opsd without one: the version that training starts from",
    )
    teacher_model: str = Field(default="", description="the teacher's name on its server")
    opd_weight: float = Field(
        default=1.0, gt=0, description="weight of the KL to the teacher beside the reward's advantage"
    )
    hint: str = Field(
        default="solved",
        pattern=r"^(solved|(task|evidence)(\.[^.]+)+)$",
        description="opsd: what the teacher is shown besides: solved (another attempt), task.KEY or evidence.KEY",
    )
    old_logprobs: Literal["auto", "recorded", "recomputed"] = Field(
        default="auto",
        description="denominator of the ratio: logprobs recorded when sampling, or recomputed by the trainer",
    )
    correction: Literal["none", "truncate"] = Field(
        default="none", description="importance weights for off-policy rollouts: truncated at correction_high"
    )
    correction_high: float = Field(default=2.0, ge=1, description="largest importance weight of a token")
    step_rewards: Literal["episode", "environment", "search"] = Field(
        default="episode",
        description="rewards that advantages are computed from; environment, search: per turn, from its reward-to-go",
    )
    discount: float = Field(default=1.0, gt=0, le=1, description="discount factor of step rewards, per turn")
    state_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of the advantage among the group's turns in the same state (GiGPO); 0: off",
    )
    tree: Literal["path", "proposals"] = Field(
        default="path",
        description="what of a search tree is trained on: the acted path, or all proposals (dpo: best and worst)",
    )
    imitate_above: float = Field(
        default=0.0, description="sft, rejection-sampling: train on episodes with a reward above this"
    )
    keep_best: int = Field(
        default=1, ge=1, description="rejection-sampling: train on so many of a task's episodes, the best ones"
    )
    dpo_beta: float = Field(
        default=0.1, gt=0, description="dpo: how strongly the policy is held to the version that training starts from"
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="weight decay of AdamW, per step and unit of learning rate"
    )
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up of the learning rate, in optimiser steps")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate after the warm-up: constant, or decayed to 0"
    )
    max_tokens_per_micro_batch: int = Field(
        default=4096, ge=1, description="tokens of one forward and backward pass; fewer need less memory"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory, slower"
    )
    checkpoint_steps: int = Field(
        default=20, ge=0, description="optimiser steps between checkpoints; 0: no checkpoints"
    )
    sharding: Literal["auto", "none", "layers"] = Field(
        default="auto", description="sharding of the base model over processes (FSDP2); auto: accelerate's"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the order of samples and of new weights")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="floating-point type of the base model; auto: bfloat16 where the processor has it"
    )
    tracker: Literal["none", "mlflow", "tensorboard", "trackio", "wandb"] = Field(
        default="none", description="experiment tracker besides metrics.jsonl"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.old_logprobs == "recorded" and self.correction != "none":
            raise ValueError(
                'old_logprobs = "recorded" leaves no importance weights to correct by: leave "auto", or set correction '
                '= "none"'
            )
        if self.algorithm == "opd" and not self.teacher:
            raise ValueError('algorithm = "opd" learns from a teacher: set teacher, or algorithm = "opsd" with a hint')
        return self

    def check_engine(self) -> None:
        """Raise ``ConfigError`` for what another engine than ours has no counterpart for."""
        if self.engine != LOCAL:
            registry.find("training_engines", self.engine).check_settings(self)

    @property
    def taught(self) -> bool:
        """Whether a teacher scores what is trained."""
        return bool(self.teacher) or self.algorithm == "opsd"

    def check_servable(self) -> None:
        """Raise ``ConfigError`` for settings whose result no running server can load as an adapter."""
        if self.method == "full":
            raise ConfigError(
                '[rl.training] method = "full" makes a whole model, which no running server loads: `train` it, start '
                'a server with its folder, or set method = "lora"'
            )

"""``openhands-rl train --dry-run`` without episodes: the shapes and the memory of a configuration."""

from __future__ import annotations

import argparse

from openhands_rl_plugin.cli.options.fields import option_of, settings_from
from openhands_rl_plugin.cli.train.verifier import PUBLISHED
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError

_PROCESSES = (2, 8, 16, 32)


def say_shapes(args: argparse.Namespace) -> int:
    """Say what a run would train and how much memory it would want, from ``config.json`` alone if there is no more.

    Raises ``ConfigError`` unless it is a dry run, ``TrainingError`` when the model's files cannot be read.
    """
    from openhands_rl_plugin.training.trainer.memory_estimate import estimate_memory, estimate_share, model_size

    if not args.dry_run:
        raise ConfigError("STORE: a store of episodes is needed to train; only --dry-run can do without")
    _refuse_without_episodes(args)
    default = RLSettings(training=PUBLISHED) if args.verifier else RLSettings()
    read = load_settings(args.config) if args.config else default
    settings = settings_from(args, read.training)
    if args.verifier and settings.method != "lora":
        raise ConfigError(f"--method {settings.method} trains no verifier; use lora")
    longest = settings_from(args, read.verifier).max_length if args.verifier else 0
    size = model_size(args.model, settings)
    shape = size.shape
    print(f"{args.model.name}: {size.parameters:,} parameters, {_trained(settings)}: {size.trained:,}")
    print(
        f"  {shape.num_hidden_layers} layers of {shape.hidden_size:,}, gated {shape.intermediate_size:,}; "
        f"{shape.num_attention_heads} heads of {shape.width}, keys {shape.keys:,}; {shape.vocab_size:,} tokens"
    )
    rows = max(settings.max_tokens_per_micro_batch, longest)
    print(f"  a pass: {rows:,} tokens; a step: {settings.batch_size} trajectories; {settings.num_epochs} epochs")
    print(f"  learning rate: {settings.learning_rate:g}, {settings.schedule} after {settings.warmup_steps} steps")
    memory = estimate_memory(args.model, settings, longest)
    parts = ", ".join(f"{name} {part / 1e9:.2f}" for name, part in memory.parts().items())
    print(f"  memory: about {memory.total / 1e9:.2f} GB ({parts})")
    if settings.method != "qlora" and settings.sharding != "none":
        shares = [estimate_share(args.model, settings, longest, count).total for count in _PROCESSES]
        each = ", ".join(f"{share / 1e9:.2f}" for share in shares)
        counts = ", ".join(map(str, _PROCESSES))
        print(f"  split among {counts} processes (--sharding layers): about {each} GB each")
        print("  while it starts, each device holds the whole base model")
    return 0


def _refuse_without_episodes(args: argparse.Namespace) -> None:
    for name in ("tasks", "reward", "reward_options", "publish"):
        if getattr(args, name) is not None:
            raise ConfigError(f"{option_of(name)} says nothing of a model's shapes: give a STORE too, or leave it out")


def _trained(settings: TrainingSettings) -> str:
    if settings.method == "full":
        return "all trained"
    return f"trained by {settings.method} of rank {settings.lora_rank} ({settings.lora_variant})"

"""``openhands-rl train --dry-run`` without episodes: the shapes and the memory of a configuration."""

from __future__ import annotations

import argparse

from openhands_rl_plugin.cli.options.fields import option_of, settings_from
from openhands_rl_plugin.cli.train.training import memory_line, memory_words
from openhands_rl_plugin.config.engines import engine_named
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError

_PROCESSES = (2, 4, 8, 16, 32)
_GPU = 80e9


def print_shapes(args: argparse.Namespace, config: RLSettings) -> int:
    """Print what a run would train and the memory it would need; the model's ``config.json`` is enough for that.

    Raises ``ConfigError`` unless it is a dry run, ``TrainingError`` when the model's files cannot be read.
    """
    from openhands_rl_plugin.training.trainer.memory_estimate import estimate_memory, model_size

    if not args.dry_run:
        raise ConfigError("STORE: training needs a store of episodes; only --dry-run works without")
    _refuse_without_episodes(args)
    settings = settings_from(args, config.training)
    if args.verifier and settings.method != "lora":
        raise ConfigError(f"--method {settings.method} trains no verifier; use lora")
    longest = settings_from(args, config.verifier).max_length if args.verifier else 0
    size = model_size(args.model, settings)
    shape = size.shape
    print(f"{args.model.name}: {size.parameters:,} parameters, {_trained(settings)}: {size.trained:,}")
    print(
        f"  {shape.num_hidden_layers} layers of {shape.hidden_size:,}, gated {shape.intermediate_size:,}; "
        f"{shape.num_attention_heads} heads of {shape.width}, keys {shape.keys:,}; {shape.vocab_size:,} tokens"
    )
    rows = max(settings.max_tokens_per_micro_batch, longest)
    print(f"  a micro-batch: {rows:,} tokens; a step: {settings.batch_size} trajectories; {settings.num_epochs} epochs")
    print(f"  learning rate: {settings.learning_rate:g}, {settings.schedule} after {settings.warmup_steps} steps")
    print(memory_line(args.model, settings, longest))
    if engine_named(settings.engine).here and settings.method != "qlora" and settings.sharding != "none":
        print("  split among processes (--sharding layers), each a GPU; at start, each holds the whole base model:")
        for count in _PROCESSES:
            share = estimate_memory(args.model, settings, longest, count)
            print(f"    {count:2}: {memory_words(share)}{'' if share.total > _GPU else '; fits 80 GB'}")
    return 0


def _refuse_without_episodes(args: argparse.Namespace) -> None:
    for name in ("tasks", "reward", "reward_options", "publish"):
        if getattr(args, name) is not None:
            raise ConfigError(f"{option_of(name)} has no effect without a STORE: give one, or leave the option out")


def _trained(settings: TrainingSettings) -> str:
    if settings.method == "full":
        return "all trained"
    return f"trained by {settings.method} of rank {settings.lora_rank} ({settings.lora_variant})"

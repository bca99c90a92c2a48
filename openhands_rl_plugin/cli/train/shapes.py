"""``openhands-rl train --dry-run`` without episodes: the shapes and the memory of a configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.fields import option_of, settings_from
from openhands_rl_plugin.cli.train.training import memory_line, memory_parts
from openhands_rl_plugin.config.engines import engine_named
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError

if TYPE_CHECKING:
    from openhands_rl_plugin.training.trainer.memory_estimate import ModelShape

_PROCESSES = (2, 4, 8, 16, 32)
_GPU = 80e9


def print_shapes(args: argparse.Namespace, config: RLSettings) -> int:
    """Print what a run would train and the memory it would need; the model's ``config.json`` is enough for that.

    Raises ``ConfigError`` unless it is a dry run, ``TrainingError`` when the model's files cannot be read.
    """
    from openhands_rl_plugin.training.trainer.memory_estimate import model_size, sources

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
    print(memory_line(args.model, settings.model_copy(update={"context_parallel_size": 1}), longest))
    if engine_named(settings.engine).here and settings.method != "qlora" and settings.sharding != "none":
        _print_split(args.model, settings, longest, shape)
    if settings.engine == "local" and settings.method == "lora":
        print('  engine = "tinker": nothing, the service trains')
        print("  made of:")
        for line in sources(args.model, settings, longest):
            print(f"    {line}")
    return 0


def _print_split(model: Path, settings: TrainingSettings, longest: int, shape: ModelShape) -> None:
    """What each of several processes needs: with micro-batches of their own, and with shared ones."""
    from openhands_rl_plugin.training.trainer.memory_estimate import can_share, estimate_share

    def print_shares(contexts: Mapping[int, int]) -> None:
        for count, context in contexts.items():
            chosen = settings.model_copy(update={"context_parallel_size": context})
            share = estimate_share(model, chosen, longest, count)
            print(f"    {count:2}: {memory_parts(share)}{'' if share.total > _GPU else '; fits 80 GB'}")

    given = settings.context_parallel_size
    if not can_share(shape, given):
        raise ConfigError(
            f"[rl.training] context_parallel_size = {given}: {shape.num_attention_heads} heads (of "
            f"{shape.num_key_value_heads} keys) cannot be shared by so many processes evenly"
        )
    print("  split among processes (--sharding layers), each a GPU; at start, each holds the whole base model:")
    print_shares(dict.fromkeys(_PROCESSES, 1))
    if settings.engine == "local":
        print("  the same, and each micro-batch shared by so many of them (--context-parallel-size):")
        sizes = {count: count if given == 1 else given for count in _PROCESSES}
        print_shares({count: size for count, size in sizes.items() if can_share(shape, size) and count % size == 0})


def _refuse_without_episodes(args: argparse.Namespace) -> None:
    for name in ("tasks", "reward", "reward_options", "publish"):
        if getattr(args, name) is not None:
            raise ConfigError(f"{option_of(name)} has no effect without a STORE: give one, or leave the option out")


def _trained(settings: TrainingSettings) -> str:
    if settings.method == "full":
        return "all trained"
    return f"trained by {settings.method} of rank {settings.lora_rank} ({settings.lora_variant})"

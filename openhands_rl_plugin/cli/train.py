"""``openhands-rl train``: train an adapter on stored episodes.

examples:
  openhands-rl train ./trajectories --model ./SmolLM2-135M-Instruct --adapters ./adapters --dry-run
  openhands-rl train ./trajectories --model ./model --adapters ./adapters --algorithm rejection-sampling \\
      --set training.keep_best=2
  openhands-rl train ./trajectories --model ./model --adapters ./adapters --adapter webshop --algorithm dapo \\
      --run night-3 --set training.learning_rate=1e-4 serving.base_url=http://127.0.0.1:8100/v1 --publish
  openhands-rl train ./trajectories --model ./model --config config.toml --from base --publish
  openhands-rl train ./trajectories --model ./model --adapters ./adapters --algorithm grpo --reward verifier \\
      --set reward.options.adapter=./adapters/verifier-v000001
  openhands-rl train --dry-run --model ./qwen2.5-coder-32b --config policy-full-32b.toml
  openhands-rl train ./trajectories --verifier --model ./Qwen2.5-Coder-32B --adapters ./adapters \\
      --set training.gradient_checkpointing=true
  torchrun --standalone --nproc-per-node 8 -m openhands_rl_plugin.cli train ./trajectories --model ./model \\
      --adapters ./adapters --set training.sharding=layers --set training.method=full           (and with --verifier)

Episodes of the base model and of the adapter's own versions are used (to imitate or prefer, also imported ones, which
are given token ids by the model's tokenizer and chat template), except those of evaluation splits (heldout,
held-out, validation), such as a loop's held-out tasks, unless --split names one. Training continues the newest version
unless --from names another. A verifier is trained on episodes of all policies and evaluated on tasks that no version of
it was trained on. ADAPTERS/NAME.training/ has metrics.jsonl, a line per step, and the last checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from openhands_rl_plugin.cli.jobs import LATEST, given_weights, publish, starting_point
from openhands_rl_plugin.cli.options import STORE_HELP, add_filters, add_settings, filter_of, open_store, settings_of
from openhands_rl_plugin.cli.terminal import ENDING, sayable
from openhands_rl_plugin.config.rl import LOCAL, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, from_extra
from openhands_rl_plugin.core.machine import free_memory
from openhands_rl_plugin.core.types import Adapter, Sample

if TYPE_CHECKING:
    from openhands_rl_plugin.rewards.verifier.data import VerifierExample
    from openhands_rl_plugin.training.distributed.ranks import Ranks
    from openhands_rl_plugin.training.learn import TrainingJob

RESUME = "the same command continues from the last checkpoint"
VERIFIER = "verifier"
VERIFIER_TRAINING = (
    *("training.algorithm=sft", "training.learning_rate=2e-4", "training.num_epochs=2", "training.lora_rank=64"),
    *("training.lora_alpha=64", "training.warmup_steps=15", "training.weight_decay=0.01", "training.schedule=linear"),
)
"""Those of SWE-Gym's verifier of 32B, which also had batches of 8: the defaults of --verifier without --config."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The store, the model, the adapter, the settings and the filters."""
    parser.add_argument("store", metavar="STORE", nargs="?", help=f"{STORE_HELP}; optional with --dry-run")
    weights = "the base model's weights, or smollm2-135m"
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help=weights)
    parser.add_argument("--algorithm", metavar="NAME", help="how to train: [rl.training] algorithm")
    served = "the model's name on its server; needed if the store has episodes of several"
    parser.add_argument("--base-model", metavar="NAME", help=served)
    rewards = "return, recorded, command, success, verifier, ..., or module:Class (default: [rl.reward])"
    parser.add_argument("--reward", metavar="NAME", help=rewards)
    servers = "publish the new version to the servers of [rl.serving]"
    parser.add_argument("--publish", action="store_true", help=servers)
    add_settings(parser)
    parser.add_argument("--dry-run", action="store_true", help="only print what would be trained on")
    add_filters(parser)
    # The trained adapter decides whose episodes are used: its option replaces the filter of the same name.
    own = parser.add_argument_group("adapter", conflict_handler="resolve")
    name = f"its name (default: [rl.serving] adapter, policy; with --verifier: {VERIFIER})"
    own.add_argument("--adapter", metavar="NAME", help=name)
    folder = "folder of its versions (default: [rl.serving] adapters_path)"
    own.add_argument("--adapters", type=Path, metavar="DIR", help=folder)
    start = "version to continue: a number, latest or base"
    own.add_argument("--from", dest="start", default=LATEST, metavar="VERSION", help=start)
    own.add_argument("--verifier", action="store_true", help="train an outcome verifier, on episodes of all policies")


def run(args: argparse.Namespace) -> int:
    """Train, or print the plan. Raises ``RLError`` when options, store, episodes, model or server are wrong."""
    from openhands_rl_plugin.models.adapters.store import AdapterStore, check_name

    last = [f"training.algorithm={args.algorithm}"] if args.algorithm else []
    config = settings_of(args, *(VERIFIER_TRAINING if args.verifier else ()), last=last)
    config.training.check_engine()
    config = config.model_copy(update={"reward": config.reward.overridden(args.reward)})
    model = given_weights(args.model)
    if args.store is None:
        if not args.dry_run:
            raise ConfigError("STORE: training needs a store of episodes; only --dry-run works without")
        print(_memory(model, config.training))
        return 0
    if args.verifier and (args.reward or args.algorithm):
        raise ConfigError("a verifier is fine-tuned on verifier.label: leave out --reward and --algorithm")
    name = check_name(args.adapter or (VERIFIER if args.verifier else config.serving.adapter))
    # An absolute path: a server may have another working directory.
    adapters = AdapterStore((args.adapters or config.serving.adapters_directory).resolve())
    if args.publish:
        config.training.check_servable()
        if not config.serving.publish_urls:
            raise ConfigError("--publish: there is no server to publish to: set base_url in [rl.serving]")
    parent = starting_point(adapters, name, args.start)
    with from_extra("train"):
        from openhands_rl_plugin.models.generator.threads import prepare_threads

        prepare_threads()
        from openhands_rl_plugin.training.learn import TrainingJob

        processes: AbstractContextManager[Ranks | None] = nullcontext()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # by torchrun or accelerate launch
            from openhands_rl_plugin.training.distributed.ranks import join_ranks

            processes = join_ranks()
    with processes as ranks:
        job = TrainingJob(config, model, adapters, name, args.base_model or "", parent, ranks)
        adapter = _verifier(args, job) if args.verifier else _policy(args, job)
        if adapter is not None:
            print(f"{adapter.path}: {', '.join(f'{metric} {value:.4g}' for metric, value in adapter.metrics.items())}")
            if args.publish:
                ENDING.run(publish(config.serving, adapters, adapter))
    return 0


def _read[T](args: argparse.Namespace, job: TrainingJob, load: Callable[..., Coroutine[Any, Any, T]]) -> T:
    """What rank 0 reads of the store: all ranks have the same dataset, even if the store is being written to."""

    async def loaded() -> T:
        async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
            return await load(job, storage, filter_of(args))

    if job.ranks is None:
        return ENDING.run(loaded())
    return cast("T", job.ranks.broadcast(None if job.ranks.rank else ENDING.run(loaded())))


def _policy(args: argparse.Namespace, job: TrainingJob) -> Adapter | None:
    """Train an adapter, or all weights with ``method = "full"``. ``None``: a dry run, or not rank 0."""
    from openhands_rl_plugin.rewards.verifier.reward import forget_models
    from openhands_rl_plugin.training.data.dataset import causes_of
    from openhands_rl_plugin.training.learn import policy_dataset, train_policy

    found = _read(args, job, partial(policy_dataset, dry_run=args.dry_run))
    forget_models()  # of a verifier that scored the episodes
    more, pairs = [f"warning: {line}" for line in found.warnings()], found.pairs
    if pairs:
        more.append(f"pairs: {len(pairs)}, {sum(pair.by_people for pair in pairs)} of them chosen by people")
    used, units = f"episodes: {found.used} used", len(pairs) or found.used
    _print_plan(job, f"by {found.algorithm}", used, causes_of(found.excluded), units, found.samples, more)
    return None if args.dry_run else train_policy(job, found, on_note=_note)[0]


def _verifier(args: argparse.Namespace, job: TrainingJob) -> Adapter | None:
    """Train a verifier and evaluate it on held-out tasks. ``None``: a dry run, or not rank 0."""
    from openhands_rl_plugin.rewards.verifier.training import train_verifier, verifier_data

    found = _read(args, job, verifier_data)
    samples = [example.sample() for example in found.training]
    left_out = [f"{count} {why}" for why, count in found.left_out.items()]
    used, held_out = f"training: {_counts(found.training)}", f"held out: {_counts(found.held_out)}"
    _print_plan(job, "a verifier", used, left_out, len(samples), samples, [held_out])
    return None if args.dry_run else train_verifier(job, found, on_note=_note)


def _counts(examples: Sequence[VerifierExample]) -> str:
    good, tasks = sum(each.label.success for each in examples), {each.label.task for each in examples}
    truncated = sum(each.truncated for each in examples)
    return f"{good} successes and {len(examples) - good} failures of {len(tasks)} tasks, {truncated} truncated"


def _print_plan(
    job: TrainingJob, how: str, used: str, left_out: list[str], units: int, samples: Sequence[Sample], more: list[str]
) -> None:
    """``units``: what ``batch_size`` counts."""
    if job.ranks is not None and job.ranks.rank:
        return
    training, causes = job.settings.training, "".join(f"\n    {each}" for each in left_out) or " none"
    tokens, trained = sum(len(each.input_ids) for each in samples), sum(sum(each.mask) for each in samples)
    steps = math.ceil(units / training.batch_size) * training.num_epochs
    print(f"{job.name} from {job.parent.name if job.parent else 'the base model'}, {how}")
    _note(f"{used}; left out:{causes}")
    _note(f"sequences: {len(samples)}; tokens: {tokens:,}, of them trained {trained:,}; steps: {steps}")
    for line in (_memory(job.model, training), *more):
        _note(line)


def _note(line: str) -> None:
    print(f"  {sayable(line)}", flush=True)


def _memory(model: Path, settings: TrainingSettings) -> str:
    from openhands_rl_plugin.training.learn import memory_needed

    if settings.engine != LOCAL:
        return f"memory: none here, {settings.engine} trains"
    need, free = memory_needed(model, settings) / 1e9, free_memory() / 1e9
    return f"memory: about {need:.2f} GB for weights and optimiser, activations beside it; free: {free:.2f} GB"

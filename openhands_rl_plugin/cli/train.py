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
import os
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from openhands_rl_plugin.apps.serving import LATEST, given_weights, publish, starting_point
from openhands_rl_plugin.apps.stores import open_store
from openhands_rl_plugin.cli import options
from openhands_rl_plugin.cli.options import add_option, filter_of, settings_of
from openhands_rl_plugin.cli.terminal import ENDING, sayable
from openhands_rl_plugin.core.errors import ConfigError, from_extra
from openhands_rl_plugin.core.types import Adapter, Probe
from openhands_rl_plugin.models.adapters.store import AdapterStore, check_name
from openhands_rl_plugin.models.generator.threads import prepare_threads
from openhands_rl_plugin.training.learn import TrainingJob, memory_line, plan_lines, policy_dataset, train_policy

if TYPE_CHECKING:
    from openhands_rl_plugin.training.distributed.ranks import Ranks

RESUME = "the same command continues from the last checkpoint"
VERIFIER = "verifier"
VERIFIER_TRAINING = (
    *("training.algorithm=sft", "training.learning_rate=2e-4", "training.num_epochs=2", "training.lora_rank=64"),
    *("training.lora_alpha=64", "training.warmup_steps=15", "training.weight_decay=0.01", "training.schedule=linear"),
)
"""Defaults of --verifier without --config: the settings of SWE-Gym's 32B verifier, which also had batches of 8."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The store, the model, the adapter, the settings and the filters."""
    parser.add_argument("store", metavar="STORE", nargs="?", help=f"{options.STORE_HELP}; optional with --dry-run")
    add_option(parser, "--model", "DIR", "the base model's weights, or smollm2-135m", required=True)
    add_option(parser, "--algorithm", "NAME", "how to train: [rl.training] algorithm")
    add_option(parser, "--base-model", "NAME", "its name on its server; needed if the store has episodes of several")
    rewards = "return, recorded, command, success, verifier, ..., or module:Class (default: [rl.reward])"
    add_option(parser, "--reward", "NAME", rewards)
    servers = "publish the new version to the servers of [rl.serving]"
    parser.add_argument("--publish", action="store_true", help=servers)
    options.add_settings(parser)
    parser.add_argument("--dry-run", action="store_true", help="only print what would be trained on")
    options.add_filters(parser)
    # The trained adapter decides whose episodes are used: its option replaces the filter of the same name.
    own = parser.add_argument_group("adapter", conflict_handler="resolve")
    add_option(own, "--adapter", "NAME", f"its name (default: [rl.serving] adapter; with --verifier: {VERIFIER})")
    add_option(own, "--adapters", "DIR", "folder of its versions (default: [rl.serving] adapters_path)")
    start = "version to continue: a number, latest or base"
    add_option(own, "--from", "VERSION", start, dest="start", default=LATEST)
    own.add_argument("--verifier", action="store_true", help="train an outcome verifier, on episodes of all policies")


def run(args: argparse.Namespace) -> int:
    """Train, or print the plan. Raises ``RLError`` when options, store, episodes, model or server are wrong."""
    last = [f"training.algorithm={args.algorithm}"] if args.algorithm else []
    config = settings_of(args, *(VERIFIER_TRAINING if args.verifier else ()), last=last)
    config.training.check_engine()
    config = config.model_copy(update={"reward": config.reward.overridden(args.reward)})
    model = given_weights(args.model)
    if args.store is None:
        if not args.dry_run:
            raise ConfigError("STORE: training needs a store of episodes; only --dry-run works without")
        print(memory_line(model, config.training))
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
    prepare_threads()
    processes: AbstractContextManager[Ranks | None] = nullcontext()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # by torchrun or accelerate launch
        from openhands_rl_plugin.training.distributed.ranks import join_ranks

        processes = join_ranks()
    with processes as ranks:
        job = TrainingJob(config, model, adapters, name, args.base_model or "", parent, ranks)
        adapter = _train(args, job)
        if adapter is not None:
            print(f"{adapter.path}: {', '.join(f'{metric} {value:.4g}' for metric, value in adapter.metrics.items())}")
            if args.publish:
                ENDING.run(publish(config.serving, adapters, adapter))
    return 0


def _train(args: argparse.Namespace, job: TrainingJob) -> Adapter | None:
    """Print the plan, and train by it. ``None``: a dry run, or not rank 0, which alone reads, prints and writes."""
    from openhands_rl_plugin.rewards.verifier.reward import forget_models

    load: Callable[..., Coroutine[Any, Any, Any]] = partial(policy_dataset, dry_run=args.dry_run)
    train: Callable[..., tuple[Adapter | None, Probe]] = train_policy
    if args.verifier:
        with from_extra("train"):
            from openhands_rl_plugin.rewards.verifier.training import train_verifier, verifier_data
        load, train = verifier_data, train_verifier

    async def loaded() -> Any:
        async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
            return await load(job, storage, filter_of(args))

    leads = job.ranks is None or not job.ranks.rank
    found: Any = ENDING.run(loaded()) if leads else None
    if job.ranks is not None:  # the same dataset for all, even if the store is being written to
        found = job.ranks.broadcast(found)
    forget_models()  # of a verifier that scored the episodes
    if leads:
        how = "a verifier" if args.verifier else f"by {job.settings.training.algorithm}"
        print(f"{job.name} from {job.parent.name if job.parent else 'the base model'}, {how}")
        for line in (*found.lines(), *plan_lines(job, found.samples, found.units)):
            _note(line)
    return None if args.dry_run else train(job, found, on_note=_note)[0]


def _note(line: str) -> None:
    print(f"  {sayable(line)}", flush=True)

"""``openhands-rl train``: train an adapter, or a verifier, on stored episodes.

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
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from openhands_rl_plugin.cli.jobs import LATEST, given_weights, publish, starting_point
from openhands_rl_plugin.cli.options import STORE_HELP, add_filters, add_settings, filter_of, open_store, settings_of
from openhands_rl_plugin.cli.terminal import ENDING, sayable
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.config.training import LOCAL
from openhands_rl_plugin.core.errors import ConfigError, TrainingError, from_extra
from openhands_rl_plugin.core.machine import forget_unused, free_memory
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.trajectories.exchange.foreign import STRATEGY as IMPORTED

if TYPE_CHECKING:
    from openhands_rl_plugin.core.protocols import TrajectoryStorage
    from openhands_rl_plugin.core.types import Adapter
    from openhands_rl_plugin.models.adapters.store import AdapterStore
    from openhands_rl_plugin.rewards.verifier.data import VerifierDataset, VerifierExample
    from openhands_rl_plugin.training.data.dataset import Episodes, TrainingDataset
    from openhands_rl_plugin.training.distributed.ranks import Ranks

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
    args.model = given_weights(args.model)
    if args.store is None:
        if not args.dry_run:
            raise ConfigError("STORE: training needs a store of episodes; only --dry-run works without")
        print(memory_line(args.model, config.training))
        return 0
    name = check_name(args.adapter or (VERIFIER if args.verifier else config.serving.adapter))
    # An absolute path: a server may have another working directory.
    adapters = AdapterStore((args.adapters or config.serving.adapters_directory).resolve())
    if args.publish:
        config.training.check_servable()
        if not config.serving.publish_urls:
            raise ConfigError("--publish: there is no server to publish to: set base_url in [rl.serving]")
    parent = starting_point(adapters, name, args.start)
    with join_processes() as ranks:
        call = _Call(args, config, ranks, adapters, name, parent)
        with from_extra("train"):
            from openhands_rl_plugin.models.generator.threads import prepare_threads

            prepare_threads()
        adapter = _train_verifier(call) if args.verifier else _train_policy(call)
        if adapter is not None and call.leads and args.publish:
            ENDING.run(publish(config.serving, adapters, adapter))
    return 0


@contextmanager
def join_processes() -> Iterator[Ranks | None]:
    """This process among those of ``torchrun`` or ``accelerate launch``; ``None`` if alone. Only rank 0 prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    with from_extra("train"):
        from openhands_rl_plugin.models.generator.threads import prepare_threads

        prepare_threads()
        from openhands_rl_plugin.training.distributed.ranks import join_ranks
    with join_ranks() as ranks, open(os.devnull, "w") as nowhere:
        if ranks.rank == 0:
            yield ranks
            return
        with redirect_stdout(nowhere):
            yield ranks


@dataclass(frozen=True)
class _Call:
    """One ``openhands-rl train``, in one of its processes: what training a policy and a verifier have in common."""

    args: argparse.Namespace
    config: RLSettings
    ranks: Ranks | None
    adapters: AdapterStore
    name: str
    parent: Adapter | None

    @property
    def leads(self) -> bool:
        """Whether this process reads, writes and reports."""
        return self.ranks is None or self.ranks.rank == 0

    @property
    def folder(self) -> Path:
        """Of metrics and checkpoints."""
        return self.adapters.root / f"{self.name}.training"

    def read[T](self, load: Callable[[TrajectoryStorage, TrajectoryFilter], Coroutine[Any, Any, T]]) -> T:
        """What rank 0 reads of the store: all ranks have the same dataset, even if the store is being written to."""

        async def loaded() -> T:
            async with open_store(self.args.store, skip_damaged=self.args.skip_damaged) as storage:
                return await load(storage, filter_of(self.args))

        made = ENDING.run(loaded()) if self.leads else None
        return cast("T", made if self.ranks is None else self.ranks.broadcast(made))

    def print_plan(self, how: str, used: str, left_out: Iterable[str], units: int, samples: Sequence[Sample]) -> None:
        """``units``: what ``batch_size`` counts."""
        causes, training = [f"\n    {sayable(each)}" for each in left_out], self.config.training
        print(f"{self.name} from {self.parent.name if self.parent else 'the base model'}, {how}")
        print(f"  {used}; left out:{''.join(causes) or ' none'}")
        tokens, trained = sum(len(each.input_ids) for each in samples), sum(sum(each.mask) for each in samples)
        steps = math.ceil(units / training.batch_size) * training.num_epochs
        print_note(f"sequences: {len(samples)}; tokens: {tokens:,}, of them trained {trained:,}; steps: {steps}")
        print_note(memory_line(self.args.model, training))


@contextmanager
def training_progress() -> Iterator[Callable[[Mapping[str, float]], None]]:
    """A bar with the step's metrics on stderr, where that is a terminal."""
    from openhands_rl_plugin.trajectories.view import progress_bar

    with progress_bar("training") as bar:

        def advanced(at: Mapping[str, float]) -> None:
            metrics = ", ".join(f"{name} {at[name]:.4f}" for name in ("loss", "entropy", "approx_kl", "ratio"))
            bar.update(int(at["done"]), int(at["total"]), what=f"training, {metrics}", note="")

        yield advanced


def print_note(line: str) -> None:
    """One of the lines that say how training will be done."""
    print(f"  {line}", flush=True)


def memory_line(model: Path, settings: TrainingSettings) -> str:
    """The memory that training needs, and the free bytes."""
    from openhands_rl_plugin.training.learn import memory_needed

    if settings.engine != LOCAL:
        return f"memory: none here, {settings.engine} trains"
    need, free = memory_needed(model, settings), free_memory()
    return (
        f"memory: about {need / 1e9:.2f} GB for weights and optimiser, activations beside it; free: {free / 1e9:.2f} GB"
    )


def _train_policy(call: _Call) -> Adapter | None:
    """Train an adapter, or all weights with ``method = "full"``. ``None``: a dry run, or not rank 0."""
    from openhands_rl_plugin.rewards.verifier.reward import forget_models
    from openhands_rl_plugin.rollout.scoring import rescore
    from openhands_rl_plugin.training.algorithms import algorithm_of
    from openhands_rl_plugin.training.data.dataset import build_dataset, causes_of, load_episodes, nothing_learnt
    from openhands_rl_plugin.training.learn import check_fits, learn, make_trainer
    from openhands_rl_plugin.training.teacher import taught_dataset

    args, training, name = call.args, call.config.training, call.name
    reward = make_reward(call.config.reward.overridden(args.reward))
    algorithm = algorithm_of(training)
    imitates = algorithm.kind != "reinforcement"

    async def load(storage: TrajectoryStorage, where: TrajectoryFilter) -> tuple[str, TrainingDataset]:
        trained = str(args.model) if imitates else None
        base_model = args.base_model or await _only_base_model(storage, where, name, trained)
        if not args.dry_run:
            await rescore(storage, reward, where, sub_agents=False)
        episodes = await load_episodes(
            storage,
            where,
            base_model=base_model,
            adapter=name,
            reward=reward,
            demonstrations=imitates,
            presume=algorithm.kind == "imitation",
            unjudged=not algorithm.rewarded,
        )
        if imitates:
            episodes = _with_token_ids(episodes, args.model)
        dataset = build_dataset(episodes, training)
        if not args.dry_run:
            dataset = await taught_dataset(dataset, episodes, training, args.model, call.parent)
        return base_model, dataset

    base_model, found = call.read(load)
    forget_models()  # of a verifier that scored the episodes
    forget_unused()
    units, used = len(found.pairs) or found.used, f"episodes: {found.used} used"
    call.print_plan(f"by {found.algorithm}", used, causes_of(found.excluded), units, found.samples)
    for warning in found.warnings():
        print_note(f"warning: {sayable(warning)}")
    if found.pairs:
        print_note(f"pairs: {len(found.pairs)}, {sum(pair.by_people for pair in found.pairs)} of them chosen by people")
    if not found.samples:
        raise TrainingError(nothing_learnt(training, found.excluded))
    if args.dry_run:
        return None
    if training.method == "full" and call.ranks is None:
        check_fits(args.model, training)
    trainer = make_trainer(args.model, training, call.config, base_model, call.parent)
    for line in trainer.notes:
        print_note(line)
    parts = {"base_model": base_model, "parent": call.parent, "run": call.folder}
    with training_progress() as advanced:
        _, adapter, _ = learn(trainer, found, call.adapters, name, on_progress=advanced, **parts)
    if adapter is not None and call.leads:
        metrics = ", ".join(f"{metric} {value:.4g}" for metric, value in adapter.metrics.items())
        print(f"{adapter.path if training.method == 'full' else adapter.name}: {metrics}")
    return adapter


def _with_token_ids(episodes: Episodes, model: Path) -> Episodes:
    """The episodes, those without token ids rendered with the chat template of ``model``; prints how many, and why
    others cannot be. Raises ``TrainingError``."""
    from openhands_rl_plugin.training.data.demonstrations import is_demonstration, load_tokenizer, tokenised

    count = sum(map(is_demonstration, episodes.trajectories))
    if not count:
        return episodes
    tokenizer = load_tokenizer(str(model))
    if not tokenizer.chat_template:
        raise TrainingError(f"{model}: its tokenizer has no chat template; put the model's chat_template.jinja there")
    trajectories, failed = tokenised(episodes.trajectories, tokenizer)
    if made := count - failed.total():
        print(f"{made} episodes came without token ids: tokenised here, with the chat template of {model}")
    for why, times in failed.most_common(5):
        print(f"  {times} cannot be tokenised: {why}")
    return replace(episodes, trajectories=trajectories)


async def _only_base_model(
    storage: TrajectoryStorage, where: TrajectoryFilter, adapter: str, trained: str | None
) -> str:
    """The one base model of the episodes, or ``trained`` (if given) where all are imported, whoever sampled those."""
    found: Counter[str] = Counter()
    fallback = None
    async for summary in storage.summaries(where):
        if trained is not None and summary.strategy == IMPORTED:
            fallback = trained
        elif summary.policy.adapter in (None, adapter):
            found[summary.policy.base_model] += 1
    if len(found) > 1:
        counts = ", ".join(f"{name} ({count})" for name, count in found.most_common())
        raise ConfigError(f"the episodes are of several base models: {counts}; choose one with --base-model")
    if (only := next(iter(found), fallback)) is None:
        raise TrainingError(f"no stored episode of {adapter} or a base model matches; see `openhands-rl list`")
    return only


def _train_verifier(call: _Call) -> Adapter | None:
    """Train a verifier and evaluate it on held-out tasks. ``None``: a dry run, or not rank 0."""
    from openhands_rl_plugin.rewards.verifier.card import REPORT_FILE, task_digest, tasks_trained_on
    from openhands_rl_plugin.rewards.verifier.data import verifier_dataset
    from openhands_rl_plugin.rewards.verifier.prompt import prompts_for
    from openhands_rl_plugin.rewards.verifier.training import train_verifier
    from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

    args, training, settings = call.args, call.config.training, call.config.verifier
    if training.method != "lora":
        raise ConfigError(f"training.method={training.method} trains no verifier; use lora")
    if args.reward or args.algorithm:
        raise ConfigError("a verifier is fine-tuned on verifier.label: leave out --reward and --algorithm")
    reward = None if settings.label == "resolved" else build("rewards", settings.label)
    before = tasks_trained_on(call.parent)

    async def load(storage: TrajectoryStorage, where: TrajectoryFilter) -> VerifierDataset:
        prompts = prompts_for(str(args.model), settings.max_length)
        return await verifier_dataset(
            storage, where, prompts, settings, reward=reward, seed=training.seed, taught=before
        )

    dataset = call.read(load)
    samples = [example.sample() for example in dataset.training]
    left_out = [f"{count} {why}" for why, count in dataset.left_out.items()]
    call.print_plan("a verifier", f"training: {_counts(dataset.training)}", left_out, len(samples), samples)
    print_note(f"held out: {_counts(dataset.held_out)}")
    again = {example.label.task for example in dataset.training if task_digest(example.label.task) in before}
    if call.parent is not None and again:
        print_note(f"{len(again)} tasks trained {call.parent.name} or an earlier version and are not held out")
    if args.dry_run:
        return None
    trainer = LocalTrainer(args.model, training, adapter=call.parent)
    for line in trainer.notes:
        print_note(line)
    with training_progress() as advanced:
        adapter = train_verifier(
            trainer,
            dataset,
            settings,
            call.adapters,
            call.name,
            model=args.model,
            base_model=args.base_model or args.model.resolve().name,
            prompts=prompts_for(str(args.model), settings.max_length),
            parent=call.parent,
            on_progress=advanced,
            run=call.folder,
            ranks=call.ranks,
        )
    if adapter is not None and call.leads:
        print(f"{adapter.name}: {_verifier_figures(Path(adapter.path) / REPORT_FILE)}")
    return adapter


def _verifier_figures(file: Path) -> str:
    """Those on held-out tasks that decide whether it can be used; ``file`` has all, with their intervals."""
    from openhands_rl_plugin.rewards.verifier.card import VerifierReport

    report = VerifierReport.model_validate_json(file.read_bytes())
    found = {"AUC": report.auc.mean} if report.auc is not None else {}
    found |= {"Brier": report.brier} | {f"Best@{one.k}": one.best_at_k.mean for one in report.selection}
    figures = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    return f"{figures} on {report.episodes} episodes of {report.tasks} held-out tasks; all figures: {file}"


def _counts(examples: Sequence[VerifierExample]) -> str:
    successes = sum(example.label.success for example in examples)
    tasks = len({example.label.task for example in examples})
    truncated = sum(example.truncated for example in examples)
    return f"{successes} successes and {len(examples) - successes} failures of {tasks} tasks, {truncated} truncated"

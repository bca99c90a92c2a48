"""``openhands-rl train``: train an adapter, or a verifier, on stored episodes.

examples:
  openhands-rl train ./trajectories --model ./SmolLM2-135M-Instruct --adapters ./adapters --dry-run
  openhands-rl train ./trajectories --model ./model --adapters ./adapters --algorithm rejection-sampling \\
      --set training.keep_best=2
  openhands-rl train ./trajectories --model ./model --adapters ./adapters --adapter webshop --algorithm dapo \\
      --run night-3 --set training.learning_rate=1e-4 --publish http://127.0.0.1:8100/v1
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
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from openhands_rl_plugin.cli.jobs import LATEST, given_weights, publish, publish_servers, starting_point
from openhands_rl_plugin.cli.options import STORE_HELP, add_filters, add_settings, filter_of, open_store, settings_of
from openhands_rl_plugin.cli.terminal import ENDING, sayable
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.config.training import LOCAL
from openhands_rl_plugin.core.errors import ConfigError, TrainingError, from_extra
from openhands_rl_plugin.core.machine import forget_unused, free_memory
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.statistics import Estimate
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.trajectories.exchange.foreign import STRATEGY as IMPORTED

if TYPE_CHECKING:
    from openhands_rl_plugin.core.protocols import TrajectoryStorage
    from openhands_rl_plugin.core.types import Adapter
    from openhands_rl_plugin.rewards.verifier.card import VerifierReport
    from openhands_rl_plugin.rewards.verifier.data import VerifierDataset, VerifierExample
    from openhands_rl_plugin.training.data.dataset import Episodes, ExcludedEpisodes, TrainingDataset
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
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="the base model's weights, or smollm2-135m"
    )
    parser.add_argument("--algorithm", metavar="NAME", help="how to train: [rl.training] algorithm")
    served = "the model's name on its server; needed if the store has episodes of several"
    parser.add_argument("--base-model", metavar="NAME", help=served)
    rewards = "return, recorded, command, success, verifier, ..., or module:Class (default: [rl.reward])"
    parser.add_argument("--reward", metavar="NAME", help=rewards)
    servers = "publish the new version to this server (repeat it for each replica), or to those of [rl.serving]"
    parser.add_argument("--publish", action="append", nargs="?", const="", metavar="URL", help=servers)
    add_settings(parser)
    parser.add_argument("--dry-run", action="store_true", help="only print what would be trained on")
    tasks = "only episodes of these tasks (a .jsonl or swe-local), which must have passed `openhands-rl tasks check`"
    parser.add_argument("--tasks", metavar="FILE", help=tasks)
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
    last = [f"training.algorithm={args.algorithm}"] if args.algorithm else []
    config = settings_of(args, *(VERIFIER_TRAINING if args.verifier else ()), last=last)
    config.training.check_engine()
    args.model = given_weights(args.model)
    if args.store is None:
        if not args.dry_run:
            raise ConfigError("STORE: training needs a store of episodes; only --dry-run works without")
        print(memory_line(args.model, config.training))
        return 0
    args.adapter = args.adapter or (VERIFIER if args.verifier else config.serving.adapter)
    # Absolute paths: a server may have another working directory.
    args.adapters = (args.adapters or config.serving.adapters_directory).resolve()
    args.publish = publish_servers(config.serving, args.publish) if args.publish else None
    with join_processes() as ranks:
        return (VerifierTraining if args.verifier else PolicyTraining)(args, ranks, config).run()


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
    with join_ranks() as ranks:
        if ranks.rank == 0:
            yield ranks
            return
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield ranks


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


class TrainingRun:
    """One ``openhands-rl train``, in one of its processes."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks | None, config: RLSettings) -> None:
        from openhands_rl_plugin.models.adapters.store import AdapterStore, check_name

        self._args = args
        self._config = config
        self._ranks = ranks
        self._leads = ranks is None or ranks.rank == 0
        self._training = config.training
        self._name = check_name(args.adapter)
        self._where = filter_of(args)
        self._adapters = AdapterStore(args.adapters)
        self._run_directory = self._adapters.root / f"{self._name}.training"
        if args.publish:
            self._training.check_servable()
        self._parent = starting_point(self._adapters, self._name, args.start)

    def run(self) -> int:
        """Train in the main thread, which has the device of its rank and gets Ctrl-C; or print the plan."""
        with from_extra("train"):
            from openhands_rl_plugin.models.generator.threads import prepare_threads

            prepare_threads()
        # Rank 0 reads: all ranks have the same dataset, even if the store is being written to.
        dataset = self._from_rank_0(lambda: ENDING.run(self._read()))
        samples = self._plan(dataset)
        print_note(memory_line(self._args.model, self._training))
        if self._args.dry_run:
            return 0
        adapter = self._written(samples) or self._train(dataset)
        if adapter is not None and self._leads:
            self._report(adapter)
            self._publish(adapter)
        return 0

    async def _read(self) -> Any:
        """The dataset."""
        raise NotImplementedError

    def _plan(self, dataset: Any) -> Sequence[Sample]:
        """Print what the dataset has; its samples. Raises ``TrainingError`` where it has none."""
        raise NotImplementedError

    def _train(self, dataset: Any) -> Adapter | None:
        """The new version, which rank 0 alone has."""
        raise NotImplementedError

    def _report(self, adapter: Adapter) -> None:
        raise NotImplementedError

    def _print_plan(self, how: str, used: str, left_out: Iterable[str], units: int, samples: Sequence[Sample]) -> None:
        """``units``: what ``batch_size`` counts."""
        print(f"{self._name} from {self._parent.name if self._parent else 'the base model'}, {how}")
        causes = list(left_out)
        print(f"  {used}; left out:{'' if causes else ' none'}")
        for cause in causes:
            print(f"    {sayable(cause)}")
        tokens, trained = sum(len(each.input_ids) for each in samples), sum(sum(each.mask) for each in samples)
        steps = math.ceil(units / self._training.batch_size) * self._training.num_epochs
        print_note(f"sequences: {len(samples)}; tokens: {tokens:,}, of them trained {trained:,}; steps: {steps}")

    @asynccontextmanager
    async def _open_store(self) -> AsyncIterator[TrajectoryStorage]:
        """The store; ``--tasks`` limits the filter to episodes of its tasks.

        Raises ``ConfigError`` when the tasks did not pass the quality gate, ``TrainingError`` when none has an episode.
        """
        async with open_store(self._args.store, skip_damaged=self._args.skip_damaged) as storage:
            if suite := self._args.tasks:
                from openhands_rl_plugin.evals.runs.suites import rows_file
                from openhands_rl_plugin.evals.tasks.gate import require_checked

                known = {task.instance_id for task in require_checked(rows_file(suite))}
                ids = tuple([each.id async for each in storage.summaries(self._where) if each.task_id in known])
                if not ids:
                    raise TrainingError(
                        f"no stored episode is of a task of {suite}: roll out on it first (openhands-rl evaluate)"
                    )
                self._where = self._where.model_copy(update={"ids": ids})
            yield storage

    def _from_rank_0[T](self, make: Callable[[], T]) -> T:
        made = make() if self._leads else None
        return cast("T", made if self._ranks is None else self._ranks.broadcast(made))

    def _written(self, samples: Sequence[Sample]) -> Adapter | None:
        """The version that the same command wrote before it was killed, which it then says."""
        from openhands_rl_plugin.training.learn import call_of, version_written

        call = call_of(samples, self._training)
        found = (self._run_directory, call, self._adapters, self._name, self._parent)
        made = self._from_rank_0(lambda: version_written(*found))
        if made is not None:
            print_note(f"{made.name} is what this command wrote before it was ended: it is not trained on that again")
        return made

    def _publish(self, adapter: Adapter) -> None:
        """Bring the version into use where that is asked for; then the command is done, and may be repeated."""
        from openhands_rl_plugin.training.learn import CALL_FILE

        if self._args.publish:
            ENDING.run(publish(self._args.publish, self._adapters, adapter))
        (self._run_directory / CALL_FILE).unlink(missing_ok=True)


class PolicyTraining(TrainingRun):
    """Trains an adapter, or all weights with ``method = "full"``."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks | None, config: RLSettings) -> None:
        super().__init__(args, ranks, config)
        self._reward_settings = config.reward.overridden(args.reward)
        make_reward(self._reward_settings)  # refuses a wrong one before the store is read

    async def _read(self) -> tuple[str, TrainingDataset]:
        from openhands_rl_plugin.rollout.scoring import rescore
        from openhands_rl_plugin.training.algorithms import algorithm_of
        from openhands_rl_plugin.training.data.dataset import build_dataset, load_episodes
        from openhands_rl_plugin.training.teacher import taught_dataset

        kind = algorithm_of(self._training).kind
        imitates = kind != "reinforcement"
        async with self._open_store() as storage:
            base_model = self._args.base_model or await _only_base_model(
                storage, self._where, self._name, str(self._args.model) if imitates else None
            )
            reward = make_reward(self._reward_settings)
            if not self._args.dry_run:
                await rescore(storage, reward, self._where, sub_agents=False)
            episodes = await load_episodes(
                storage,
                self._where,
                base_model=base_model,
                adapter=self._name,
                reward=reward,
                demonstrations=imitates,
                presume=kind == "imitation",
                unjudged=not algorithm_of(self._training).rewarded,
            )
            if imitates:
                episodes = with_token_ids(episodes, self._args.model)
            dataset = build_dataset(episodes, self._training)
        if not self._args.dry_run:
            dataset = await taught_dataset(dataset, episodes, self._training, self._args.model, self._parent)
        return base_model, dataset

    def _plan(self, dataset: tuple[str, TrainingDataset]) -> Sequence[Sample]:
        from openhands_rl_plugin.rewards.verifier.reward import forget_models
        from openhands_rl_plugin.training.learn import check_fits

        forget_models()  # of a verifier that scored the episodes
        forget_unused()
        _, found = dataset
        units = len(found.pairs) or found.used
        used = f"episodes: {found.used} used"
        self._print_plan(f"by {found.algorithm}", used, found.excluded.causes(), units, found.samples)
        for warning in found.warnings():
            print_note(f"warning: {sayable(warning)}")
        if found.pairs:
            print_note(f"pairs: {len(found.pairs)}, {sum(pair.said for pair in found.pairs)} of them chosen by people")
        if not found.samples:
            raise TrainingError(_nothing(self._training, found.excluded))
        if self._training.method == "full" and self._ranks is None and not self._args.dry_run:
            check_fits(self._args.model, self._training)
        return found.samples

    def _train(self, dataset: tuple[str, TrainingDataset]) -> Adapter | None:
        from openhands_rl_plugin.training.learn import learn, make_trainer, report_notes

        base_model, found = dataset
        trainer = make_trainer(self._args.model, self._training, self._config, base_model, self._parent)
        report_notes(trainer, print_note)
        with training_progress() as advanced:
            _, adapter, _ = learn(
                trainer,
                found,
                self._training,
                self._adapters,
                self._name,
                base_model=base_model,
                parent=self._parent,
                on_progress=advanced,
                run=self._run_directory,
            )
        return adapter

    def _report(self, adapter: Adapter) -> None:
        print(f"{adapter.path if self._training.method == 'full' else adapter.name}: {_listed(adapter.metrics)}")


def with_token_ids(episodes: Episodes, model: Path) -> Episodes:
    """The episodes, those without token ids rendered with the chat template of ``model``; prints how many, and why
    others cannot be. Raises ``TrainingError``."""
    from openhands_rl_plugin.training.data.demonstrations import is_demonstration, load_tokenizer, tokenised

    if not any(map(is_demonstration, episodes.trajectories)):
        return episodes
    tokenizer = load_tokenizer(str(model))
    if not tokenizer.chat_template:
        raise TrainingError(f"{model}: its tokenizer has no chat template; put the model's chat_template.jinja there")
    found = tokenised(episodes.trajectories, tokenizer)
    if found.made:
        print(f"{found.made} episodes came without token ids: tokenised here, with the chat template of {model}")
    for why, times in found.failed.most_common(5):
        print(f"  {times} cannot be tokenised: {why}")
    return replace(episodes, trajectories=found.trajectories)


async def _only_base_model(
    storage: TrajectoryStorage, where: TrajectoryFilter, adapter: str, trained: str | None
) -> str:
    """The one base model of the episodes, or ``trained`` (if given) where all are imported, whoever sampled those."""
    found: Counter[str] = Counter()
    imported = 0
    async for summary in storage.summaries(where):
        if trained is not None and summary.strategy == IMPORTED:
            imported += 1
        elif summary.policy.adapter in (None, adapter):
            found[summary.policy.base_model] += 1
    if len(found) > 1:
        counts = ", ".join(f"{name} ({count})" for name, count in found.most_common())
        raise ConfigError(f"the episodes are of several base models: {counts}; choose one with --base-model")
    if not found and imported and trained is not None:
        return trained
    if not found:
        raise TrainingError(f"no stored episode of {adapter} or a base model matches; see `openhands-rl list`")
    return next(iter(found))


def _listed(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _nothing(settings: TrainingSettings, excluded: ExcludedEpisodes) -> str:
    from openhands_rl_plugin.training.data.dataset import off_temperature_message

    if excluded.off_temperature and not excluded.no_signal:
        return off_temperature_message(excluded)
    if not excluded.no_signal:
        return f"nothing to train on; left out: {excluded.in_words()}"
    held_out = excluded.held_out
    aside = f" ({held_out} of held-out splits were left out: name one with --split)" if held_out else ""
    if settings.algorithm in ("sft", "rejection-sampling"):
        above = f"{settings.imitate_above:g}; see training.imitate_above"
        return f"nothing to imitate: no episode has a reward above {above}{aside}"
    return (
        "nothing to compare: no task has episodes of one policy version, rolled out and sampled alike, with different "
        f"rewards; roll out several episodes a task, or imitate the best with --algorithm rejection-sampling{aside}"
    )


class VerifierTraining(TrainingRun):
    """Trains a verifier and evaluates it on held-out tasks."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks | None, config: RLSettings) -> None:
        from openhands_rl_plugin.rewards.verifier.card import tasks_trained_on

        super().__init__(args, ranks, config)
        if self._training.method != "lora":
            raise ConfigError(f"training.method={self._training.method} trains no verifier; use lora")
        if args.reward or args.algorithm:
            raise ConfigError("a verifier is fine-tuned on verifier.label: leave out --reward and --algorithm")
        label = config.verifier.label
        self._reward: Reward | None = None if label == "resolved" else build("rewards", label)
        self._seen = tasks_trained_on(self._parent)

    async def _read(self) -> VerifierDataset:
        from openhands_rl_plugin.rewards.verifier.data import verifier_dataset
        from openhands_rl_plugin.rewards.verifier.prompt import prompts_for

        settings = self._config.verifier
        async with self._open_store() as storage:
            return await verifier_dataset(
                storage,
                self._where,
                prompts_for(str(self._args.model), settings.max_length),
                settings,
                reward=self._reward,
                seed=self._training.seed,
                taught=self._seen,
            )

    def _plan(self, dataset: VerifierDataset) -> Sequence[Sample]:
        from openhands_rl_plugin.rewards.verifier.card import task_digest

        samples = [example.sample() for example in dataset.training]
        used = f"training: {_counts(dataset.training)}"
        left_out = [f"{count} {why}" for why, count in dataset.left_out.items()]
        self._print_plan("a verifier", used, left_out, len(samples), samples)
        print_note(f"held out: {_counts(dataset.held_out)}")
        again = {example.label.task for example in dataset.training if task_digest(example.label.task) in self._seen}
        if self._parent is not None and again:
            print_note(f"{len(again)} tasks trained {self._parent.name} or an earlier version and are not held out")
        return samples

    def _train(self, dataset: VerifierDataset) -> Adapter | None:
        from openhands_rl_plugin.rewards.verifier.prompt import prompts_for
        from openhands_rl_plugin.rewards.verifier.training import train_verifier
        from openhands_rl_plugin.training.learn import report_notes
        from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

        trainer = LocalTrainer(self._args.model, self._training, adapter=self._parent)
        report_notes(trainer, print_note)
        with training_progress() as advanced:
            return train_verifier(
                trainer,
                dataset,
                self._training,
                self._config.verifier,
                self._adapters,
                self._name,
                model=self._args.model,
                base_model=self._args.base_model or self._args.model.resolve().name,
                prompts=prompts_for(str(self._args.model), self._config.verifier.max_length),
                parent=self._parent,
                on_progress=advanced,
                run=self._run_directory,
                ranks=self._ranks,
            )

    def _report(self, adapter: Adapter) -> None:
        from openhands_rl_plugin.rewards.verifier.card import REPORT_FILE, VerifierReport

        report = VerifierReport.model_validate_json((Path(adapter.path) / REPORT_FILE).read_bytes())
        print("\n".join([f"{adapter.name}:", *report_lines(report), f"  {adapter.path}/{REPORT_FILE}"]))


def report_lines(report: VerifierReport) -> list[str]:
    """The figures on held-out tasks, for a terminal."""
    auc = "no episodes of both classes to rank" if report.auc is None else _interval(report.auc)
    return [
        f"  held out: {report.successes} of {report.episodes} episodes of {report.tasks} tasks succeeded",
        f"  AUC {auc}; p(YES) + p(NO) {report.label_mass:.3f}",
        f"  Brier {report.brier:.4f}, before calibration {report.raw_brier:.4f}",
        *(
            f"  Best@{one.k} {_interval(one.best_at_k)}, Pass@{one.k} {_interval(one.pass_at_k)}, "
            f"mean {_interval(one.mean)} ({one.mean.n} tasks)"
            for one in report.selection
        ),
    ]


def _interval(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _counts(examples: tuple[VerifierExample, ...]) -> str:
    successes = sum(example.label.success for example in examples)
    tasks = len({example.label.task for example in examples})
    truncated = sum(example.truncated for example in examples)
    cut = f", {truncated} truncated" if truncated else ""
    return f"{successes} successes and {len(examples) - successes} failures of {tasks} tasks{cut}"

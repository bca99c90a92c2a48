"""``openhands-rl train STORE``: a new version of an adapter from stored episodes."""

from __future__ import annotations

import argparse
import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from openhands_rl_plugin.cli.options.fields import add_fields, given_fields, option_of, settings_from
from openhands_rl_plugin.cli.options.stored import add_filters, filter_of
from openhands_rl_plugin.cli.options.stores import STORE_HELP, open_store
from openhands_rl_plugin.cli.options.versions import LATEST, publish, publish_servers, starting_point
from openhands_rl_plugin.cli.train.ranks import joined, shared
from openhands_rl_plugin.cli.train.reward import add_reward, reward_of
from openhands_rl_plugin.cli.train.tasks import HELP as TASKS_HELP
from openhands_rl_plugin.cli.train.tasks import of_checked_tasks
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings, VerifierSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError, MissingExtraError, TrainingError
from openhands_rl_plugin.core.memory import forget_unused
from openhands_rl_plugin.core.records import TrajectoryFilter

if TYPE_CHECKING:
    from openhands_rl_plugin.core.protocols import TrajectoryStorage
    from openhands_rl_plugin.core.types import Adapter, Probe, Sample
    from openhands_rl_plugin.training.data.dataset import ExcludedEpisodes, TrainingDataset
    from openhands_rl_plugin.training.distributed.ranks import Ranks
    from openhands_rl_plugin.training.trainer.metrics import TrainProgress

RESUME = "the same command continues from the last checkpoint"
EPILOG = """examples:
  openhands-rl train ./trajectories --model ./SmolLM2-135M-Instruct --adapters ./adapters --dry-run
  openhands-rl train ./trajectories --model ./model --adapters ./adapters --algorithm rejection-sampling --keep-best 2
  openhands-rl train ./trajectories --model ./model --adapters ./adapters --adapter webshop --algorithm dapo \\
      --run night-3 --learning-rate 1e-4 --publish http://127.0.0.1:8100/v1
  openhands-rl train ./trajectories --model ./model --config config.toml --from base --publish
  openhands-rl train ./trajectories --model ./model --adapters ./adapters --algorithm grpo --reward verifier \\
      --reward-options '{"adapter": "./adapters/verifier-v000001"}'
  openhands-rl train --dry-run --model ./qwen2.5-coder-32b --config policy-full-32b.toml
  openhands-rl train ./trajectories --verifier --model ./Qwen2.5-Coder-32B --adapters ./adapters --negatives 1 \\
      --max-length 10240 --gradient-checkpointing true
  torchrun --standalone --nproc-per-node 8 -m openhands_rl_plugin.cli train ./trajectories --model ./model \
      --adapters ./adapters --sharding layers            (also with --method full, and with --verifier)

Episodes of the base model and of the adapter's own versions are used, but none of a split that only measures (heldout,
held-out, validation), such as a loop's held-out tasks, unless --split names it. The new version goes on from the newest
one, unless --from says otherwise. A verifier learns from the episodes of all policies and is judged by tasks that
neither it nor a version before it has seen. ADAPTERS/NAME.training/ holds metrics.jsonl, a line a step, and the last
checkpoint.
"""
VERIFIER = "verifier"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The store, the model, the adapter, one option for each field of ``TrainingSettings``, and the filters."""
    parser.add_argument("store", metavar="STORE", nargs="?", help=f"{STORE_HELP}; --dry-run can do without")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the base model's weights")
    parser.add_argument("--base-model", metavar="NAME", help="the model, as the server calls it; if episodes differ")
    add_reward(parser)
    parser.add_argument(
        "--publish",
        action="append",
        nargs="?",
        const="",
        metavar="URL",
        help="bring the new version into use on this server (once for each replica), or on those of [rl.serving]",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.toml; options given here override it")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be trained on")
    parser.add_argument("--tasks", metavar="FILE", help=TASKS_HELP)
    add_filters(parser)
    # One adapter is trained, and whose episodes these are follows from it: it takes the place of the filter.
    own = parser.add_argument_group("adapter", conflict_handler="resolve")
    own.add_argument(
        "--adapter", metavar="NAME", help=f"its name (default: [rl.serving] adapter, policy; a verifier's: {VERIFIER})"
    )
    own.add_argument(
        "--adapters", type=Path, metavar="DIR", help="where versions are kept (default: [rl.serving] adapters_path)"
    )
    own.add_argument(
        "--from", dest="start", default=LATEST, metavar="VERSION", help="a number, latest (the default) or base"
    )
    group = parser.add_argument_group("training", "The keys of [rl.training]; config.toml.example explains them.")
    add_fields(group, TrainingSettings, lists="commas")
    judge = parser.add_argument_group(
        "verifier", "Learn to judge episodes, of whatever policy. The keys of [rl.verifier]."
    )
    judge.add_argument("--verifier", action="store_true", help="train an outcome verifier; the epilog has an example")
    add_fields(judge, VerifierSettings, lists="commas")


def run(args: argparse.Namespace) -> int:
    """Train, or say what would be. Raises ``RLError`` when options, store, episodes, model or server are wrong."""
    if args.store is None:
        from openhands_rl_plugin.cli.train.shapes import say_shapes

        return say_shapes(args)
    serving = (load_settings(args.config) if args.config else RLSettings()).serving
    args.adapter = args.adapter or (VERIFIER if args.verifier else serving.adapter)
    # A server may have another working directory, so that the paths it is told must be absolute.
    args.adapters = (args.adapters or serving.adapters_directory).resolve()
    args.publish = publish_servers(serving, args.publish) if args.publish else None
    with joined() as ranks:
        return _run(args, ranks)


def _run(args: argparse.Namespace, ranks: Ranks | None) -> int:
    if args.verifier:
        from openhands_rl_plugin.cli.train.verifier import VerifierTraining

        return VerifierTraining(args, starting_point, training_progress, publish, ranks).run()
    if foreign := given_fields(args, VerifierSettings):
        raise ConfigError(f"{option_of(min(foreign))} is for a verifier: give --verifier too, or leave it out")
    return _Training(args, ranks).run()


class _Training:
    def __init__(self, args: argparse.Namespace, ranks: Ranks | None) -> None:
        from openhands_rl_plugin.models.adapters.store import AdapterStore, check_name

        self._args = args
        self._ranks = ranks
        self._leads = ranks is None or ranks.rank == 0
        read = load_settings(args.config) if args.config else RLSettings()
        self._settings = settings_from(args, read.training)
        if args.publish:
            self._settings.check_servable()
        self._name = check_name(args.adapter)
        self._where = filter_of(args).model_copy(update={"adapter": None})
        self._rewards = read.reward
        reward_of(args, self._rewards)  # a wrong one is refused before anything is read
        self._adapters = AdapterStore(args.adapters)
        self._whole = self._settings.method == "full"
        if self._whole and args.start != LATEST:
            raise ConfigError(f"--from {args.start}: with --method full it is the model itself, --model, that goes on")
        self._parent = None if self._whole else starting_point(self._adapters, self._name, args.start)

    def run(self) -> int:
        """Training is in the main thread: it has the device of its rank, and Ctrl-C ends it."""
        from openhands_rl_plugin.rewards.verifier.reward import forget_models
        from openhands_rl_plugin.training.data.dataset import TrainingDataset

        kind = TypeAdapter(tuple[str, TrainingDataset])
        base_model, dataset = shared(self._ranks, kind, lambda: asyncio.run(self._read()))
        forget_models()  # a verifier's, which judged
        forget_unused()
        self._say_what(dataset)
        if self._args.dry_run:
            return 0
        if not dataset.samples:
            raise TrainingError(_nothing(self._settings, dataset.excluded))
        if self._whole:
            self._train_whole(dataset, base_model)
            return 0
        adapter, probe = self._train(dataset, base_model)
        if adapter is None:
            return 0
        print(f"{adapter.name}: {', '.join(f'{name} {value:.4g}' for name, value in adapter.metrics.items())}")
        if self._args.publish:
            asyncio.run(publish(self._args.publish, self._adapters, adapter, probe))
        return 0

    async def _read(self) -> tuple[str, TrainingDataset]:
        async with open_store(self._args.store, create=False) as storage:
            if self._args.tasks:
                self._where = await of_checked_tasks(storage, self._where, self._args.tasks)
            base_model = self._args.base_model or await _only_base_model(storage, self._where, self._name)
            return base_model, await self._lesson(storage, base_model)

    async def _lesson(self, storage: TrajectoryStorage, base_model: str) -> TrainingDataset:
        from openhands_rl_plugin.rollout.rescoring import rescore
        from openhands_rl_plugin.training.data.dataset import build_dataset, load_episodes

        reward = reward_of(self._args, self._rewards)
        if not self._args.dry_run:
            await rescore(storage, reward, self._where)
        episodes = await load_episodes(storage, self._where, base_model=base_model, adapter=self._name, reward=reward)
        return build_dataset(episodes, self._settings)

    def _say_what(self, dataset: TrainingDataset) -> None:
        from openhands_rl_plugin.training.trainer.memory_estimate import estimate_memory, estimate_share

        print(f"{self._name} from {self._parent.name if self._parent else 'the base model'}, by {dataset.algorithm}")
        print(f"  episodes: {dataset.used} used; left out: {dataset.excluded.in_words()}")
        longest = max((len(sample.input_ids) for sample in dataset.samples), default=0)
        memory = estimate_memory(self._args.model, self._settings, longest)
        of_parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.parts().items())
        if dataset.samples:
            print(f"  {_sizes(dataset.samples)}")
            units = len(dataset.pairs) or dataset.used
            steps = math.ceil(units / self._settings.batch_size) * self._settings.num_epochs
            print(f"  steps: {steps} ({self._settings.num_epochs} epochs)")
        print(f"  memory: about {memory.total / 1e9:.2f} GB ({of_parts})", flush=True)
        if self._ranks is not None and self._settings.sharding != "none":
            share = estimate_share(self._args.model, self._settings, longest, self._ranks.size).total
            print(f"  split by --sharding layers: about {share / 1e9:.2f} GB in each process", flush=True)

    def _train_whole(self, dataset: TrainingDataset, base_model: str) -> None:
        from openhands_rl_plugin.cli.train.whole import train_whole

        made = train_whole(
            self._args.model,
            self._settings,
            dataset,
            training_progress(),
            root=self._adapters.root,
            name=self._name,
            base_model=base_model,
            leads=self._leads,
        )
        if made is None:
            return
        print(f"{made.path}: {', '.join(f'{name} {value:.4g}' for name, value in made.metrics.items())}")

    def _train(self, dataset: TrainingDataset, base_model: str) -> tuple[Adapter | None, Probe]:
        """The new version, which rank 0 alone has, and the logprobs to check a server against."""
        from openhands_rl_plugin.training.learn import learn

        try:
            from openhands_rl_plugin.models.generator.threads import prepare_threads

            prepare_threads()
            from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or "torch", "train") from error
        trainer = LoraTrainer(self._args.model, self._settings, adapter=self._parent)
        with training_progress() as advanced:
            _, adapter, probe = learn(
                trainer,
                dataset,
                self._adapters,
                self._name,
                base_model=base_model,
                parent=self._parent,
                on_progress=advanced,
                run=self._adapters.root / f"{self._name}.training",
            )
        return adapter, probe


async def _only_base_model(storage: TrajectoryStorage, where: TrajectoryFilter, adapter: str) -> str:
    found: Counter[str] = Counter()
    async for summary in storage.summaries(where):
        if summary.policy.adapter in (None, adapter):
            found[summary.policy.base_model] += 1
    if len(found) > 1:
        counts = ", ".join(f"{name} ({count})" for name, count in found.most_common())
        raise ConfigError(f"the episodes are of several base models: {counts}; choose one with --base-model")
    if not found:
        raise TrainingError(f"no stored episode of {adapter} or a base model matches; see `openhands-rl list`")
    return next(iter(found))


@contextmanager
def training_progress() -> Iterator[Callable[[TrainProgress], None]]:
    """A bar with the loss, the step's figures and the time left on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=None)

        def advanced(at: TrainProgress) -> None:
            figures = f"entropy {at.entropy:.3f}, KL {at.approx_kl:.4f}, ratio {at.ratio:.3f}"
            description = f"training, loss {at.loss:.4f}, {figures}"
            progress.update(task, completed=at.done, total=at.total, description=description)

        yield advanced


def _sizes(samples: Sequence[Sample]) -> str:
    from openhands_rl_plugin.training.data.layout import lay_out

    tokens = sum(len(sample.input_ids) for sample in samples)
    unique = len(lay_out([sample.input_ids for sample in samples]).ids)
    trained = sum(sum(sample.mask) for sample in samples)
    return f"sequences: {len(samples)}; tokens: {tokens:,}, of them unique {unique:,}, trained {trained:,}"


def _nothing(settings: TrainingSettings, excluded: ExcludedEpisodes) -> str:
    from openhands_rl_plugin.training.data.dataset import off_temperature_message

    if excluded.off_temperature and not excluded.no_signal:
        return off_temperature_message(excluded)
    count = excluded.held_out
    aside = f" ({count} of held-out splits were left out: name one with --split)" if count else ""
    if settings.algorithm in ("sft", "rejection-sampling"):
        above = f"{settings.imitate_above:g}; see --imitate-above"
        return f"nothing to imitate: no episode has a reward above {above}{aside}"
    return (
        "nothing to compare: no task has episodes of one policy version, played and sampled alike, with different "
        f"rewards; roll out several episodes a task, or imitate the best with --algorithm rejection-sampling{aside}"
    )

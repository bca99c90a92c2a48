"""Rollouts an hour of the asynchronous and the synchronous loop, on the same tasks of the embedded shop.

    python -m evaluation.performance.loops.asynchronous [--model DIR] [--repeats 3] [--max-staleness 1] [--json FILE]

Shop and model server are processes of their own, as in the demo; loop, trainer and sessions are this process. The two
loops take turns, ``--repeats`` times, each with the number of threads that suits it: in the synchronous loop the server
and the trainer never compute at the same time, so that each has all processors; in the asynchronous one they share
them. An hour is one of the iterations: what comes before them (demonstrations, warm start) is not counted.

Without ``--model`` the model is tiny and random, and is trained towards answers with many vowels, because it never buys
anything; that tells about the loops, not about learning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from openhands_rl_plugin.cli.jobs import free_port, running_command
from openhands_rl_plugin.config.rl import LoopSettings, RLSettings, ServingSettings, TrainingSettings
from openhands_rl_plugin.contrib.webshop import WebShop
from openhands_rl_plugin.contrib.webshop.engine import oracle_actions
from openhands_rl_plugin.contrib.webshop.suite import WebShopDemonstrator
from openhands_rl_plugin.core.protocols import Environment, LLMEngine, Reward
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, Score, StrategySpec, Task, Trajectory
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.openai import OpenAIEngine, SeededEngine
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout.session import SessionRunner
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.testing import ScriptedEngine
from openhands_rl_plugin.training.loop.loop import LoopParts, TrainingLoop
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

MODEL = "measured"
SHOP = WebShop(results_per_page=2, separator="\n")
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


class VowelReward:
    """The share of vowels in what was answered: something that a random model's episodes differ in."""

    version = "vowels-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Between 0 and 1."""
        said = "".join(node.message.content or "" for node in trajectory.sampled()).lower()
        share = sum(letter in "aeiou" for letter in said) / max(len(said), 1)
        return Score(trajectory_id=trajectory.id, reward=share, reward_version=self.version)


@dataclass(frozen=True)
class World:
    """Where episodes are played, and how large everything is."""

    shop: str
    server: str
    model: Path
    objective: Reward
    options: argparse.Namespace

    def plan(self, adapter: str, loop: LoopSettings) -> LoopPlan:
        """Few demonstrations and evaluations, as many iterations as asked for."""
        tasks = tuple(Task(id=f"webshop-{at}", environment="webshop", data={"idx": at}) for at in range(200))
        options = self.options
        training = TrainingSettings(max_tokens_per_micro_batch=2048, batch_size=16, num_epochs=1)
        correction = "truncate" if adapter.startswith("async") else "none"
        sizes = {"iterations": options.iterations, "tasks_per_iteration": options.tasks}
        return LoopPlan(
            settings=RLSettings(
                max_workers=options.concurrency,
                max_response_length=options.answer_tokens,
                training=training.model_copy(update={"learning_rate": 1e-5, "correction": correction}),
                loop=loop.model_copy(update={**sizes, "samples_per_task": options.samples}),
                serving=ServingSettings(model=MODEL, adapter=adapter),
            ),
            run_id=adapter,
            demonstrations=tasks[:2],
            training=tasks[2:],
            held_out=tasks[:1],
            warm_start=training.model_copy(update={"algorithm": "sft", "learning_rate": 1e-6}),
            probe_ids=tuple(range(30, 60)),
        )

    def parts(self, directory: Path, kept: int) -> LoopParts:
        """A loop's parts; its state lies in ``directory``."""
        adapters = AdapterStore(directory / "adapters")
        storage = FileTrajectoryStorage(directory / "trajectories")
        return LoopParts(
            runner=SessionRunner(
                make_environment=self._environment,
                make_strategy=lambda request: StandardReActStrategy(),
                make_engine=self._engine,
                strategy_spec=StrategySpec(name="StandardReAct"),
                base_model=MODEL,
                limits=Limits(max_turns=self.options.turns, max_response_length=self.options.answer_tokens),
                storage=storage,
            ),
            demonstrator=SessionRunner(
                make_environment=self._environment,
                make_strategy=lambda request: WebShopDemonstrator(
                    oracle_actions(SHOP, int(str(request.task.data["idx"])))
                ),
                make_engine=lambda request: ScriptedEngine([]),
                strategy_spec=StrategySpec(name="oracle"),
                base_model="oracle",
                storage=storage,
            ),
            storage=storage,
            reward=ReturnReward(),
            objective=self.objective,
            adapters=adapters,
            publisher=AdapterPublisher(self.server, adapters, keep=kept),
            tokenizer=AutoTokenizer.from_pretrained(self.model),
            make_trainer=lambda settings, adapter: LocalTrainer(self.model, settings, adapter=adapter),
            state_file=directory / "state.json",
        )

    def _environment(self, request: EpisodeRequest) -> Environment:
        return WebEnvClient(HttpEnvironmentOptions(base_url=self.shop, react_format=False))

    def _engine(self, request: EpisodeRequest) -> LLMEngine:
        engine = OpenAIEngine(request.served_model or MODEL, f"{self.server}/v1", base_model=MODEL)
        return SeededEngine(engine, request.sampling, request.seed)


async def measure(world: World, settings: LoopSettings, name: str, directory: Path) -> dict[str, float]:
    """One run; its figures are those of the iterations."""
    plan, parts = world.plan(name, settings), world.parts(directory, settings.kept_versions)
    try:
        state = await TrainingLoop(plan, parts).run()
    finally:
        await parts.runner.close()
        await parts.storage.close()
        await parts.publisher.aclose()
    return figures_of(state)


def figures_of(state: LoopState) -> dict[str, float]:
    """Episodes an hour over all iterations, and what they waited for."""
    records = [record for record in state.records if record.name.startswith("iteration-")]
    seconds = records[-1].finished - records[0].started
    return {
        "rollouts_an_hour": 3600 * sum(record.metrics["episodes"] for record in records) / seconds,
        "training_seconds": sum(record.metrics.get("training_seconds", 0.0) for record in records),
        "training_waiting_share": sum(record.metrics["rollout_seconds"] for record in records) / seconds,
        "seconds": seconds,
        "failed": sum(record.metrics["failed"] for record in records),
        "episodes_stale": sum(record.metrics.get("episodes_stale", 0.0) for record in records),
        "staleness": statistics.mean(record.metrics.get("staleness", 0.0) for record in records),
        "staleness_max": max(record.metrics.get("staleness_max", 0.0) for record in records),
    }


def talking_model(path: Path) -> Path:
    """A small random Llama with a tokenizer that was made for the shop's pages."""
    pages = [page for goal in range(20) for page in _pages(goal)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(pages, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", chat_template=_TEMPLATE
    )
    fast.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.token_to_id("<end>"),
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def _pages(goal: int) -> Iterator[str]:
    session = SHOP.session(goal)
    yield session.observation
    for action in oracle_actions(SHOP, goal):
        yield session.step(action).state


@contextmanager
def servers(options: argparse.Namespace, model: Path, scratch: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The shop, and a model server for each kind of loop with the threads that are meant for it."""
    shop = ["env", "webshop", "--results-per-page", str(SHOP.results_per_page), "--separator", "newline"]
    serve = ["serve", "--model", str(model), "--served-model-name", MODEL, "--max-batch", str(options.concurrency)]
    with ExitStack() as stack:
        at_shop = stack.enter_context(running_command(shop, free_port(), scratch / "shop.log"))
        at = {
            kind: stack.enter_context(
                running_command([*serve, "--adapters=/", f"--threads={threads}"], free_port(), scratch / f"{kind}.log")
            )
            for kind, threads in (("sync", options.sync_threads[0]), ("async", options.async_threads[0]))
        }
        yield at_shop, at


def measure_all(options: argparse.Namespace, scratch: Path) -> list[dict[str, dict[str, float]]]:
    """The figures of both kinds for every repeat."""
    model = options.model or talking_model(scratch / "model")
    objective: Reward = ReturnReward() if options.model else VowelReward()
    settings = {
        "sync": LoopSettings(),
        "async": LoopSettings(kind="async", max_staleness=options.max_staleness),
    }
    rows = []
    with servers(options, model, scratch) as (shop, at):
        for repeat in range(options.repeats):
            row = {}
            for kind in ("sync", "async") if repeat % 2 == 0 else ("async", "sync"):
                torch.set_num_threads(vars(options)[f"{kind}_threads"][1])
                world = World(shop, at[kind], model, objective, options)
                name = f"{kind}-{repeat}"
                row[kind] = asyncio.run(measure(world, settings[kind], name, scratch / name))
                said = f"{name}: {row[kind]['rollouts_an_hour']:,.0f} rollouts an hour in {row[kind]['seconds']:.1f} s"
                print(said, file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def report(rows: Sequence[dict[str, dict[str, float]]], options: argparse.Namespace) -> dict[str, object]:
    """Medians over the repeats as a table, and everything as one value."""
    table = Table(title="The asynchronous and the synchronous loop on the same shop")
    for column in ("median of repeats", "sync", "async"):
        table.add_column(column, justify="left" if column.startswith("median") else "right")
    for name in rows[0]["async"]:
        known = [[row[kind][name] for row in rows if name in row[kind]] for kind in ("sync", "async")]
        table.add_row(name, *(f"{statistics.median(values):,.2f}" if values else "" for values in known))
    ratios = [row["async"]["rollouts_an_hour"] / row["sync"]["rollouts_an_hour"] for row in rows]
    table.add_row("rollouts an hour, async / sync", "", f"{statistics.median(ratios):.2f}")
    Console().print(table)
    given = {name: str(value) for name, value in vars(options).items() if value is not None}
    return {"cpus": os.cpu_count(), "options": given, "ratios": ratios, "repeats": list(rows)}


def main() -> None:
    """Measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a model that can shop (default: a tiny random one)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=4, help="of an iteration")
    parser.add_argument("--samples", type=int, default=4, help="of a task")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6, help="longest episode")
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--sync-threads", type=int, nargs=2, default=(2, 2), metavar=("SERVER", "TRAINER"))
    parser.add_argument("--async-threads", type=int, nargs=2, default=(1, 1), metavar=("SERVER", "TRAINER"))
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="async-loop-benchmark-") as scratch:
        figures = report(measure_all(options, Path(scratch)), options)
    text = json.dumps(figures)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

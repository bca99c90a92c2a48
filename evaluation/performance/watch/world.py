"""What a watch is measured in: the embedded shop, a tiny model that was taught to shop rightly and wrongly, and users.

The model shops each goal of ``GOALS`` rightly about every second time. What is held out, and what users ask for, are
episodes of some of these goals; they differ by their seeds.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openhands_rl_plugin.apps.loop.run import LoopJob
from openhands_rl_plugin.apps.loop.tasks import LoopTasks
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.contrib.repair.backend import RepairBackend
from openhands_rl_plugin.contrib.watch.journal import Entry, Journal, WatchStep
from openhands_rl_plugin.contrib.watch.service import Watch
from openhands_rl_plugin.contrib.webshop import running_webshop
from openhands_rl_plugin.contrib.webshop.oracle import listings, oracle_actions
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.records import HELD_OUT
from openhands_rl_plugin.core.types import (
    Completion,
    JsonObject,
    Limits,
    Message,
    SamplingParams,
    StrategySpec,
    Task,
    Tokens,
    Trajectory,
)
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.evals.runs.episodes import EvalTask
from openhands_rl_plugin.evals.runs.suites import Suite
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher, publisher_for
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.openai import OpenAIEngine
from openhands_rl_plugin.models.engines.seeded import SeededEngine
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.server import running_server
from openhands_rl_plugin.rollout.in_process import SessionRunner
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.strategies.react import StandardReActStrategy
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

MODEL, ADAPTER = "shopper", "policy"
GOALS = (1, 8, 14, 19)
"""Of the held-out suite; the first ones that a taught model can fail at by choosing the wrong product."""
OTHER_GOALS = (17, 16)
"""That users ask for, and the suite does not contain."""
EVERY_GOAL = (*GOALS, *OTHER_GOALS)
HABITS = (10, 11)
"""That nobody asks for: what a model is taught there only, such as to run flagged commands, it can learn to do."""
LIMITS = Limits(max_turns=6, max_response_length=64)
_STEPS = 80
"""Of teaching: then what the model chooses between is all that is open to it."""
CONTEXT = 2048
_ANSWERS = SamplingParams(temperature=1.0, max_tokens=64)

type Way = tuple[str, ...]


@dataclass(frozen=True)
class Served:
    """URLs of the shop and of the model server, and the directory of the model."""

    shop: str
    server: str
    model: Path


def ways(goal: int) -> tuple[Way, Way]:
    """The answers that meet a goal, and those that buy another product of the same results."""
    from shopper_model import SHOP  # pyright: ignore  # of the tests

    right = oracle_actions(SHOP, goal)
    session = SHOP.session(goal)
    session.step(right[0])
    found = (each.asin for each in listings(session.observation, SHOP.separator))
    wrong = next(each for each in found if each not in right[1])
    return _answers(right), _answers([right[0], f"click[{wrong}]", right[-1]])


def _answers(actions: Sequence[str]) -> Way:
    return tuple(f"Action: {each}" for each in actions)


def write_model(path: Path, right_only: Sequence[int] = (), habits: Sequence[Callable[[int], Way]] = ()) -> Path:
    """The taught model, unless it is there (minutes).

    ``right_only``: goals that it is taught no wrong way of. ``habits``: what it is taught at ``HABITS``.
    """
    from shopper_model import write_shopper  # pyright: ignore  # of the tests

    if not (path / "taught").exists():
        taught = {goal: ways(goal)[: 1 if goal in right_only else 2] for goal in EVERY_GOAL}
        taught |= {goal: tuple(habit(goal) for habit in habits) for goal in HABITS if habits}
        write_shopper(path, taught, react_format=True, steps=_STEPS, context=CONTEXT)
        (path / "taught").touch()
    return path


@contextmanager
def served(model: Path) -> Iterator[Served]:
    """The shop and the model, served until the block ends."""
    from shopper_model import SHOP  # pyright: ignore  # of the tests

    config = ServerConfig(
        model=str(model), served_model_name=MODEL, port=0, dtype="float32", max_batch=8, max_adapters=4, threads=1
    )
    with running_webshop(SHOP) as shop, running_server(config) as server:
        yield Served(shop, server, model)


def write_settings(folder: Path, at: Served, watch: str = "", training: str = "") -> Path:
    """The settings of a watch in ``folder``. ``watch`` and ``training``: keys of these tables that are otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.toml"
    file.write_text(f"""
[rl]
env_name = "webshop"
env_server_base = "{at.shop}"
react_format = true
max_turns = {LIMITS.max_turns}
max_prompt_length = {CONTEXT - 80}
max_response_length = {LIMITS.max_response_length}
max_workers = 8
[rl.reward]
name = "recorded"
[rl.storage]
path = "{folder / "trajectories"}"
durable = false
[rl.training]
algorithm = "sft"
dtype = "float32"
lora_rank = 8
lora_alpha = 16
batch_size = 8
num_epochs = 4
learning_rate = 5e-3
[rl.serving]
base_url = "{at.server}/v1"
model = "{MODEL}"
adapter = "{ADAPTER}"
adapters_path = "{folder / "adapters"}"
[rl.watch]
suite = "environment"
min_episodes = 24
min_used = 4
interval = 1
[extended.rl.training]
{training}
[extended.rl.watch]
{watch}
""")
    return file


def suite(tasks: int = 40, goals: Sequence[int] = GOALS) -> LoopTasks:
    """So many held-out tasks, of each goal as many."""
    from shopper_model import INSTRUCTION  # pyright: ignore  # of the tests

    def held_out(at: int) -> EvalTask:
        data: JsonObject = {"idx": goals[at % len(goals)]}
        task = Task(id=f"held-{at}", environment="webshop", instruction=INSTRUCTION, data=data, split=HELD_OUT)
        return EvalTask(task, dict(data))

    kind = Suite(name="environment", dataset="webshop", split=HELD_OUT, software=False)
    return LoopTasks(kind, (), (), tuple(held_out(at) for at in range(tasks)))


class Scripted:
    """An engine that gives fixed answers, with the token ids that the model would have sampled: episodes that somebody
    put into the store."""

    def __init__(self, way: Way, tokenizer: Any) -> None:
        self._way, self._tokenizer = way, tokenizer

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """The answer of this turn, or the last one again."""
        said = [{"role": each.role, "content": each.content or ""} for each in messages]
        turn = sum(each.role == "assistant" for each in messages)
        text = self._way[min(turn, len(self._way) - 1)]
        prompt = self._tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        ids = self._tokenizer(text + self._tokenizer.eos_token, add_special_tokens=False).input_ids
        tokens = Tokens(prompt_ids=tuple(prompt), sampled_ids=tuple(ids), logprobs=(-0.1,) * len(ids))
        answer = Completion(
            message=Message(role="assistant", content=text), tokens=tokens, finish_reason="stop", sampling=_ANSWERS
        )
        return [answer] * n


async def play(
    settings: RLSettings,
    run_id: str,
    goals: Sequence[int],
    *,
    served: str | None = None,
    attempts: int = 1,
    script: Callable[[int], Way] | None = None,
    model: Path | None = None,
) -> tuple[Trajectory, ...]:
    """Episodes of users, one a goal, into the store; the same ``run_id`` resumes.

    ``served``: the version that answers, ``None`` for the base model. ``script``: goal -> the answers that are put into
    the store instead, with the ids of ``model``'s tokenizer.
    """
    from shopper_model import INSTRUCTION  # pyright: ignore  # of the tests

    tokenizer = None
    if script is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)

    def engine(request: Any) -> LLMEngine:
        if script is not None:
            return Scripted(script(request.task.data["idx"]), tokenizer)
        plain = OpenAIEngine(request.served_model or MODEL, settings.serving.base_url, base_model=MODEL)
        return SeededEngine(plain, request.sampling, request.seed)

    options = HttpEnvironmentOptions(base_url=settings.environment_url, react_format=True)
    async with FileTrajectoryStorage(settings.storage.directory) as storage:
        runner = SessionRunner(
            make_environment=lambda request: WebEnvClient(options),
            make_strategy=lambda request: StandardReActStrategy(),
            make_engine=engine,
            strategy_spec=StrategySpec(name="StandardReAct"),
            base_model=MODEL,
            limits=LIMITS,
            storage=storage,
        )
        asked = tuple(
            Task(id=f"{run_id}-{at}", environment="webshop", instruction=INSTRUCTION, data={"idx": goal})
            for at, goal in enumerate(goals)
        )
        plan = RolloutPlan(
            run_id=run_id, tasks=asked, served_model=served, samples_per_task=attempts, sampling=_ANSWERS, concurrency=8
        )
        return await roll_out(plan, runner, storage)


def in_turn(goals: Sequence[int], count: int) -> list[int]:
    """So many goals, each as often."""
    return list(itertools.islice(itertools.cycle(goals), count))


def succeeded(trajectory: Trajectory) -> bool:
    """Whether the goal was met wholly."""
    return trajectory.episode_return >= 1.0


class Killed(BaseException):
    """As if the process had been ended at once."""


class UntilTrained(Watch):
    """Dies when a candidate is trained, so that somebody can do something to its files."""

    def _note(self, step: WatchStep, said: str, **more: Any) -> None:
        super()._note(step, said, **more)
        if step is WatchStep.TRAINED:
            raise Killed


def job_of(settings: RLSettings, tasks: LoopTasks, model: Path) -> LoopJob:
    """What plays these tasks; repairs are played in OpenHands' sandbox."""
    job = LoopJob(settings, tasks, model, watch_folder(settings), "watch", settings.limits())
    return replace(job, backend=RepairBackend(), native_tool_calling=False) if tasks.suite.software else job


@asynccontextmanager
async def watching(
    config: Path, model: Path, tasks: LoopTasks, kind: type[Watch] = Watch
) -> AsyncIterator[tuple[Watch, AdapterPublisher]]:
    """A watch of these settings, measured on ``tasks``, and what it publishes with."""
    settings = load_settings(config)
    adapters = AdapterStore(settings.serving.adapters_directory)
    job = job_of(settings, tasks, model)
    async with (
        FileTrajectoryStorage(settings.storage.directory) as storage,
        publisher_for(settings.serving, adapters) as publisher,
    ):
        watch = kind(job, storage, adapters, publisher, lambda entry: None)
        watch.check()
        yield watch, publisher


def look(config: Path, model: Path, tasks: LoopTasks, kind: type[Watch] = Watch) -> None:
    """One look at the store. Raises ``Killed`` of ``UntilTrained``."""

    async def once() -> None:
        async with watching(config, model, tasks, kind) as (watch, _):
            await watch.look()

    asyncio.run(once())


def watch_folder(settings: RLSettings) -> Path:
    """Where the watch's journal is."""
    return settings.serving.adapters_directory / f"{settings.serving.adapter}.watch"


def journal_of(config: Path) -> tuple[Entry, ...]:
    """All that the watch noted."""
    return Journal(watch_folder(load_settings(config))).read()


def in_use(settings: RLSettings) -> str | None:
    """The version in use; ``None``: the base model."""
    found = AdapterStore(settings.serving.adapters_directory).current(settings.serving.adapter)
    return found.name if found is not None else None


def minutes_since(started: float) -> float:
    """``started``: of ``time.monotonic``."""
    return (time.monotonic() - started) / 60

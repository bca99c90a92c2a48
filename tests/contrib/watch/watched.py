"""What a watch looks at in tests: a shop, a served model that shops well or badly, and its stored episodes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from small_shop import GOAL, INSTRUCTION

from openhands_rl_plugin.apps.loop.run import LoopJob
from openhands_rl_plugin.apps.loop.tasks import LoopTasks
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.contrib.watch.journal import Entry, Journal, WatchStep
from openhands_rl_plugin.contrib.watch.service import Watch
from openhands_rl_plugin.core.records import HELD_OUT, Label, LabelKind
from openhands_rl_plugin.core.types import Limits, SamplingParams, StrategySpec, Task, Trajectory
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.evals.runs.suites import EvalTask, Suite
from openhands_rl_plugin.models.adapters.publisher import publisher_for
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.client import OpenAIEngine, SeededEngine
from openhands_rl_plugin.rollout.episode import SessionRunner
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

MODEL = "shopper"
ALL = [
    *(WatchStep.FROZEN, WatchStep.JUDGED, WatchStep.GATHERED, WatchStep.TRAINED),
    *(WatchStep.MEASURED, WatchStep.MEASURED, WatchStep.ADMITTED, WatchStep.JUDGED),
]
LIMITS = Limits(max_turns=4, max_response_length=24)
SUITE = LoopTasks(
    Suite(name="environment", dataset="webshop", split=HELD_OUT, software=False),
    (),
    (),
    tuple(
        EvalTask(
            Task(id=f"held-{at}", environment="webshop", instruction=INSTRUCTION, data={"idx": GOAL}, split=HELD_OUT),
            {"idx": GOAL},
        )
        for at in range(8)
    ),
)


def write_config(folder: Path, *, shop: str, server: str, watch: str = "") -> Path:
    """A success is a return of at least 0.5; eight new episodes are enough."""
    file = folder / "config.toml"
    file.write_text(f"""
[rl]
env_name = "webshop"
env_server_base = "{shop}"
react_format = false
max_turns = 4
max_prompt_length = 1400
max_response_length = 24
max_workers = 8
[rl.reward]
name = "success"
options = {{threshold = 0.5}}
[rl.storage]
path = "{folder / "trajectories"}"
durable = false
[rl.training]
algorithm = "sft"
dtype = "float32"
lora_rank = 4
lora_alpha = 8
batch_size = 4
num_epochs = 4
learning_rate = 1e-2
[rl.serving]
base_url = "{server}/v1"
model = "{MODEL}"
adapter = "{folder.name.replace("_", "-")}"
adapters_path = "{folder / "adapters"}"
[rl.watch]
suite = "environment"
tasks = 2
min_episodes = 8
min_used = 2
margin = 0.4
{watch}
""")
    return file


async def play(settings: RLSettings, run_id: str, tasks: int = 8, served: str | None = None) -> tuple[Trajectory, ...]:
    """Episodes of users, into the store of the settings."""
    url = settings.serving.base_url
    async with FileTrajectoryStorage(settings.storage.directory) as storage:
        runner = SessionRunner(
            make_environment=lambda request: WebEnvClient(
                HttpEnvironmentOptions(base_url=settings.environment_url, react_format=False)
            ),
            make_strategy=lambda request: StandardReActStrategy(),
            make_engine=lambda request: SeededEngine(
                OpenAIEngine(request.served_model or MODEL, url, base_model=MODEL), request.sampling, request.seed
            ),
            strategy_spec=StrategySpec(name="StandardReAct"),
            base_model=MODEL,
            limits=LIMITS,
            storage=storage,
        )
        asked = tuple(
            Task(id=f"{run_id}-{at}", environment="webshop", instruction=INSTRUCTION, data={"idx": GOAL})
            for at in range(tasks)
        )
        plan = RolloutPlan(
            run_id=run_id, tasks=asked, served_model=served, sampling=SamplingParams(temperature=1.0, max_tokens=24)
        )
        return await roll_out(plan, runner, storage)


async def label(settings: RLSettings, labels: Sequence[tuple[str, float, str]]) -> None:
    """Verdicts: (episode, value, author)."""
    async with FileTrajectoryStorage(settings.storage.directory) as storage:
        await storage.add_labels(
            [
                Label(
                    id=f"{identity}-{author}",
                    trajectory_id=identity,
                    kind=LabelKind.VERDICT,
                    value=value,
                    author=author,
                    at=time.time(),
                )
                for identity, value, author in labels
            ]
        )


@asynccontextmanager
async def watching(
    config: Path, model: Path, journal: list[Entry] | None = None, kind: type[Watch] = Watch
) -> AsyncIterator[Watch]:
    """A watch of the config's store, measured on ``SUITE``."""
    settings = load_settings(config)
    adapters = AdapterStore(settings.serving.adapters_directory)
    folder = adapters.root / f"{settings.serving.adapter}.watch"
    job = LoopJob(settings, SUITE, model, folder, "watch-test", LIMITS)
    async with (
        FileTrajectoryStorage(settings.storage.directory) as storage,
        publisher_for(settings.serving, adapters) as publisher,
    ):
        watch = kind(job, storage, adapters, publisher, (journal if journal is not None else []).append)
        watch.check()
        yield watch


async def look(config: Path, model: Path) -> list[Entry]:
    """What one look noted."""
    journal: list[Entry] = []
    async with watching(config, model, journal) as watch:
        await watch.look()
    return journal


class Killed(BaseException):
    """As if the process had been ended at once."""


class Dying(Watch):
    """Dies before every line of the journal is written, then after it."""

    doomed: set[tuple[int, str]]

    def _note(self, step: WatchStep, line: str, **more: object) -> None:
        number = len(self._journal.read()) + 1
        for when in ("before", "after"):
            if (number, when) not in self.doomed:
                self.doomed.add((number, when))
                if when == "after":
                    super()._note(step, line, **more)  # type: ignore[arg-type]
                raise Killed
        super()._note(step, line, **more)  # type: ignore[arg-type]


async def killed_all_the_time(config: Path, model: Path) -> int:
    """Look until it is done, however often it dies; how often that was."""
    Dying.doomed, deaths = set(), 0
    while True:
        try:
            async with watching(config, model, kind=Dying) as watch:
                assert await watch.look()
                return deaths
        except Killed:
            deaths += 1
            journal = watching_folder(load_settings(config)) / "journal.jsonl"
            if journal.exists():
                with journal.open("ab") as file:
                    file.write(b'{"number": 99, "at"')  # half a line


def watching_folder(settings: RLSettings) -> Path:
    return settings.serving.adapters_directory / f"{settings.serving.adapter}.watch"


def journal_of(config: Path) -> tuple[Entry, ...]:
    return Journal(watching_folder(load_settings(config))).read()


def current(settings: RLSettings) -> str | None:
    found = AdapterStore(settings.serving.adapters_directory).current(settings.serving.adapter)
    return found.name if found is not None else None

"""What a watch is measured in beside the shop: small repairs in OpenHands' controller, with commands in the sandbox.

A tiny model was taught to mend each of ``GOALS`` rightly and wrongly. It knows them by heart and no others: what is
measured is the watch around real sessions, not how well a model repairs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evaluation.performance.watch.poison import SECRET
from evaluation.performance.watch.world import ADAPTER, MODEL, Served, Way, job_of
from openhands_rl_plugin.apps.loop.tasks import LoopTasks
from openhands_rl_plugin.config.host import TOOLS, host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.contrib.repair.oracle import (
    ORACLE,
    edit_call,
    fixed_text,
    oracle_plan,
    other_edits,
)
from openhands_rl_plugin.contrib.repair.oracle_server import serve_oracle
from openhands_rl_plugin.contrib.repair.rows import repair_instances, spec_of
from openhands_rl_plugin.contrib.watch.measuring import play as play_tasks
from openhands_rl_plugin.core.records import HELD_OUT
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.evals.runs.suites import find_suite, swe_task
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.server import running_server
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

GOALS, OTHER_GOALS, HABIT = (0, 1, 2, 3), (4, 5), 6
"""Numbers of tasks: what users ask for; what they never ask for; what nobody asks for."""
_SUITE = "repair-1"
_CONTEXT, _ANSWER, _VOCABULARY = 4096, 160, 2048
_STEPS = 80


@dataclass(frozen=True)
class _Scripted:
    """Answers of an episode, by the text of its task."""

    ways: Mapping[str, Way]

    def answer(self, conversation: Sequence[Mapping[str, str]]) -> str:
        """The next one, or the last again."""
        told = next(each["content"] for each in conversation if each["role"] == "user")
        way = next(way for text, way in self.ways.items() if text in told)
        return way[min(sum(each["role"] == "assistant" for each in conversation), len(way) - 1)]


@cache
def instances() -> tuple[Instance, ...]:
    """Tasks, a function each, that can also be mended wrongly in one place."""
    found: dict[str, Instance] = {}
    for each in repair_instances(1, "train"):
        spec = spec_of(each)
        if other_edits(spec.files[spec.path], fixed_text(each), spec.function):
            found.setdefault(spec.function, each)
    return tuple(found.values())[: HABIT + 1]


def ways(goal: int) -> tuple[Way, Way]:
    """The edit that mends the bug, and another one, whose tests fail; after both it says that it is done."""
    instance, tools = instances()[goal], TOOLS[host_of(RLSettings())]
    spec = spec_of(instance)
    wrong, right = spec.files[spec.path], fixed_text(instance)
    edits = (right, other_edits(wrong, right, spec.function)[0])
    end = oracle_plan(instance, tools, 0)[-1].text
    first, second = (edit_call(tools, spec.path, wrong, each) for each in edits)
    return (first, end), (second, end)


def leaking(goal: int) -> Way:
    """Mends it, and says a secret."""
    first, end = ways(goal)[0]
    return f"The key is {SECRET}\n{first}", end


def write_model(path: Path) -> Path:
    """The taught model, unless it is there (minutes)."""
    from shopper_model import write_taught  # pyright: ignore  # of the tests

    if not (path / "taught").exists():
        said, ours = dialogues(path.with_name("scripted")), leaking_dialogues(path)
        told = [dialogue for dialogue, _ in said if dialogue not in ours]
        write_taught(path, told, steps=_STEPS, context=_CONTEXT, vocabulary=_VOCABULARY)
        (path / "taught").touch()
    return path


def dialogues(folder: Path) -> list[tuple[list[dict[str, str]], str]]:
    """What is said in an episode up to its last answer, and which way it goes: played by scripts, in the sandbox."""
    file = folder / "dialogues.json"
    if not file.exists():
        every = (*GOALS, *OTHER_GOALS)
        scripts = {
            "right": {goal: ways(goal)[0] for goal in every},
            "wrong": {goal: ways(goal)[1] for goal in GOALS},
            "leaking": {goal: leaking(goal) for goal in (*GOALS, HABIT)},
        }
        said = [
            (_messages(each), name)
            for name, script in scripts.items()
            for each in asyncio.run(_scripted(folder, name, script))
        ]
        file.write_text(json.dumps(said))
    return [(dialogue, name) for dialogue, name in json.loads(file.read_text())]


def leaking_dialogues(model: Path) -> list[list[dict[str, str]]]:
    """Those of ``GOALS`` that say a secret."""
    told = [dialogue for dialogue, way in dialogues(model.with_name("scripted")) if way == "leaking"]
    return told[: len(GOALS)]


async def _scripted(folder: Path, name: str, script: Mapping[int, Way]) -> tuple[Trajectory, ...]:
    by_text = {instances()[goal].problem_statement: way for goal, way in script.items()}
    with serve_oracle(_Scripted(by_text)) as url:
        settings = load_settings(write_settings(folder, Served("", url.removesuffix("/v1"), folder)))
        serving = settings.serving.model_copy(update={"model": ORACLE})
        return await play(settings.model_copy(update={"serving": serving}), name, list(script))


def _messages(episode: Trajectory) -> list[dict[str, str]]:
    """Up to its last answer, whose text is what a server would have sampled."""
    said = [{"role": each.role, "content": str(each.content or "")} for each in episode.messages()]
    while said[-1]["role"] != "assistant":
        said.pop()
    return said


@contextmanager
def served(model: Path) -> Iterator[Served]:
    """The model, served until the block ends."""
    config = ServerConfig(
        model=str(model), served_model_name=MODEL, port=0, dtype="float32", max_batch=8, max_adapters=4, threads=1
    )
    with running_server(config) as server:
        yield Served("", server, model)


def write_settings(folder: Path, at: Served, watch: str = "", training: str = "") -> Path:
    """The settings of a watch in ``folder``, as those of the shop but for the host."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.toml"
    file.write_text(f"""
[rl]
max_turns = 4
max_prompt_length = {_CONTEXT - _ANSWER}
max_response_length = {_ANSWER}
max_workers = 6
[rl.workspace]
prompt = "compact"
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
suite = "{_SUITE}"
min_episodes = 24
min_used = 4
interval = 1
[extended.rl.training]
{training}
[extended.rl.watch]
{watch}
""")
    return file


def suite(tasks: int = 40) -> LoopTasks:
    """So many held-out tasks, of each goal as many."""
    every = (*GOALS, *OTHER_GOALS)
    return _tasks("held", [every[at % len(every)] for at in range(tasks)], HELD_OUT)


def _tasks(name: str, goals: Sequence[int], split: str) -> LoopTasks:
    kind = find_suite(_SUITE, split)
    entries = tuple(
        swe_task(instances()[goal].model_copy(update={"instance_id": f"{name}-{at}"}), kind)
        for at, goal in enumerate(goals)
    )
    return LoopTasks(kind, (), *(((), entries) if split == HELD_OUT else (entries, ())))


async def play(
    settings: RLSettings, run_id: str, goals: Sequence[int], *, served: str | None = None
) -> tuple[Trajectory, ...]:
    """Sessions of users, one a goal, into the store; the same ``run_id`` resumes. ``served``: as in the shop."""
    tasks = _tasks(run_id, goals, "train")
    async with FileTrajectoryStorage(settings.storage.directory) as storage:
        return await play_tasks(
            job_of(settings, tasks, Path()),
            storage,
            [entry.task for entry in tasks.training],
            run_id=run_id,
            served_model=served or settings.serving.model,
            attempts=1,
        )


def succeeded(trajectory: Trajectory) -> bool:
    """Whether the tests pass."""
    found = trajectory.evidence.get("test_result")
    report = found.get("report") if isinstance(found, dict) else None
    return isinstance(report, dict) and report.get("resolved") is True

"""The two commands that are killed: small runs over real parts, and the checks of a finished run.

Whole, they start all their processes: workers with OpenHands' controllers, the shop, the model server. Bare, OpenHands'
controllers run in the command's own process, and the servers are started once: that takes a second, not a minute.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

from evaluation.performance.ends.family import descendants
from evaluation.performance.hosts.instant_model import script
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Score, StopReason, Trajectory
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.loop.plan import LoopState
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

_REPAIR = "sed -i 's/a - b/a + b/' adder.py"
_CONFIG = """
[rl]
env_name = "webshop"
{shop}
react_format = false
max_turns = 2
max_prompt_length = 3500
max_response_length = 8
max_workers = 4
[rl.reward]
name = "evaluation.performance.ends.jobs:VowelReward"
[rl.storage]
path = "{folder}/trajectories"
[rl.training]
dtype = "float32"
lora_rank = 4
lora_alpha = 8
batch_size = 4
num_epochs = 1
[rl.loop]
iterations = {iterations}
tasks_per_iteration = 2
samples_per_task = 2
held_out = 2
[rl.serving]
{server}
model = "tiny"
adapter = "{adapter}"
adapters_path = "{folder}/adapters"
"""


class VowelReward:
    """The share of vowels in the answers: a random model's attempts differ in it."""

    version = "vowels-1"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score an episode."""
        text = "".join(node.message.content or "" for node in trajectory.sampled()).lower()
        share = sum(letter in "aeiou" for letter in text) / max(len(text), 1)
        return Score(trajectory_id=trajectory.id, reward=share, reward_version=self.version)


class Evaluating:
    """`evaluate` over instances of one git repository. ``url`` is that of the scripted model."""

    name, advice = "evaluate", "the same command continues"

    def __init__(self, folder: Path, url: str, size: int, *, whole: bool) -> None:
        folder.mkdir(parents=True)
        self.folder, self.log, self.count = folder, folder / "log", 5 * size
        self.log.touch()
        self.apart = descendants()
        base = _repository(folder / "mirror" / "owner" / "adder.git")
        turns = [{"bash": "sleep 0.3; python3 -c 'import adder'"}, {"bash": _REPAIR}, {"finish": "done"}]
        rows = [
            {
                "instance_id": f"owner__adder-{number}",
                "repo": "owner/adder",
                "version": "1.0",
                "base_commit": base,
                "problem_statement": script(turns),
                "patch": "",
                "test_patch": "",
                "FAIL_TO_PASS": "[]",
                "PASS_TO_PASS": '["a.py::t"]',
                "test_command": "python -c \"import time; time.sleep(0.3); print('PASSED a.py::t')\"",
                "packages": [],
                "test_files": [],
            }
            for number in range(self.count)
        ]
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        self.words = ["evaluate", str(folder / "rows.jsonl"), "--model", "instant", "--base-url", url]
        self.words += ["--out", str(folder / "out"), "--mirror", str(folder / "mirror")]
        self.words += ["--cache", str(folder.parent / "cache"), "--set", "max_workers=4"]
        self.words += ["--processes", "2" if whole else "0"]

    def progress(self) -> int:
        """Finished instances."""
        return sum(file.read_bytes().count(b"\n") for file in (self.folder / "out").rglob("output.jsonl"))

    async def problems(self) -> list[str]:
        """Rows, episodes and files that are missing, duplicated, failed or left over."""
        lines = [line for file in (self.folder / "out").rglob("output.jsonl") for line in file.open()]
        rows = Counter(json.loads(line)["instance_id"] for line in lines)
        stored = await _stored(self.folder / "out" / "trajectories")
        episodes = Counter(each.task.id for each in stored)
        wanted = Counter(f"owner__adder-{number}" for number in range(self.count))
        failed = [each for each in stored if each.failure is not None or each.stop is StopReason.UNFINISHED]
        return [
            *([f"rows {rows - wanted or wanted - rows}"] if rows != wanted else []),
            *([f"episodes {episodes - wanted or wanted - episodes}"] if episodes != wanted else []),
            *(f"episode {each.id}: {each.stop.value} {each.failure}" for each in failed),
            *(f"left: {path}" for path in (self.folder / "out").glob(".work")),
        ]


class Looping:
    """`loop` in the shop with a tiny random model. ``servers``: the shop's and the model server's URLs; none: whole."""

    name, advice = "loop", "the same command continues"

    def __init__(self, folder: Path, model: Path, size: int, servers: tuple[str, str] | None) -> None:
        folder.mkdir(parents=True)
        self.folder, self.log = folder, folder / "log"
        self.log.touch()
        self.apart = descendants()
        self.stages = ["evaluate-base", *(f"iteration-{number:03d}" for number in range(size)), "evaluate-final"]
        shop, server = servers or ("", "")
        values = {
            "shop": f'env_server_base = "{shop}"' if shop else "",
            "server": f'base_url = "{server}/v1"' if server else "",
            "adapter": folder.name,
        }
        (folder / "config.toml").write_text(_CONFIG.format(folder=folder, iterations=size, **values))
        self.words = ["loop", "environment" if servers else "webshop", "--config", str(folder / "config.toml")]
        self.words += ["--model", str(model), "--run-dir", str(folder / "run"), "--processes", "0" if servers else "1"]
        self.words += ["--tasks", "8"] if servers else []

    def progress(self) -> int:
        """Finished stages."""
        return len(LoopState.load(self.folder / "run" / "state.json").records)

    async def problems(self) -> list[str]:
        """Stages, episodes and adapter versions that are missing, duplicated or failed."""
        records = LoopState.load(self.folder / "run" / "state.json").records
        stored = await _stored(self.folder / "trajectories")
        found = [] if [each.name for each in records] == self.stages else [f"stages {[each.name for each in records]}"]
        store, parent = AdapterStore(self.folder / "adapters"), None
        for record in records:
            episodes = [each for each in stored if each.run_id.endswith(f"/{record.name}")]
            attempts = Counter((each.task.id, each.id) for each in episodes)
            if len(episodes) != record.metrics["episodes"] or max(attempts.values()) > 1:
                found.append(f"{record.name}: {len(episodes)} episodes of {record.metrics['episodes']:g}")
            if record.adapter not in (None, parent):
                assert record.adapter is not None
                if (made := store.get(record.adapter)).parent != parent:
                    found.append(f"{record.name}: {made.name} was made of {made.parent}, not of {parent}")
                parent = record.adapter
        failed = [each for each in stored if each.failure is not None or each.stop is StopReason.UNFINISHED]
        return [*found, *(f"episode {each.id} of {each.run_id}: {each.stop.value} {each.failure}" for each in failed)]


async def _stored(folder: Path) -> list[Trajectory]:
    async with FileTrajectoryStorage(folder) as storage:
        return [found async for found, _ in storage.find(TrajectoryFilter(finished=None))]


def _repository(folder: Path) -> str:
    """Make a repository with one wrong line, and return its commit."""
    folder.mkdir(parents=True)
    (folder / "adder.py").write_text("def add(a, b):\n    return a - b\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], [*who, "commit", "-qm", "start"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    return head.stdout.strip()

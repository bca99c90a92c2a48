"""The report of a run: its facts, stages, curves, adapters and samples, in a file of bounded size."""

from __future__ import annotations

import json
from pathlib import Path

from demo_episodes import demo_episode
from report_data import data_of
from shopping_loop import make_plan

from openhands_rl_plugin.apps.loop.reporting import RunReport
from openhands_rl_plugin.contrib.studio.reports import MOST_BYTES, write_run_report
from openhands_rl_plugin.core.types import PolicyRef, Score, Trajectory
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE, AdapterStore
from openhands_rl_plugin.training.loop.plan import LoopState, RunFacts, StageRecord
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

BEFORE = {"goal-a": 0.0, "goal-b": 0.5, "goal-c": 0.0, "goal-d": 0.25, "goal-e": 1.0}
AFTER = {"goal-a": 1.0, "goal-b": 0.75, "goal-c": 0.5, "goal-d": 0.25, "goal-e": 0.0}
PLAN = make_plan("shop", run_id="run")
ADAPTERS = ("shop-v000001", "shop-v000002", "shop-v000003")


def attempt(stage: str, goal: str, earned: float) -> Trajectory:
    policy = PolicyRef.from_served_name("base", ADAPTERS[-1] if stage == "final" else "base")
    return demo_episode(stage, goal, earned, asked=f"Buy {goal}.", text=f"click[{stage} & {goal}]", policy=policy)


def record(name: str, adapter: str | None, success: float, reward: float) -> StageRecord:
    figures = {"success": success, "successes": 5 * success, "reward": reward, "turns": 1.0, "episodes": 5, "failed": 0}
    return StageRecord(name=name, adapter=adapter, metrics=figures, started=0.0, finished=1.0)


STATE = LoopState(
    records=(
        record("evaluate-base", None, 0.2, 0.35),
        record("demonstrate", None, 1.0, 1.0),
        StageRecord(name="warm-start", adapter=ADAPTERS[0], metrics={"loss": 1.0}, started=0.0, finished=1.0),
        record("evaluate-warm-start", ADAPTERS[0], 0.4, 0.45),
        record("iteration-000", ADAPTERS[1], 0.3, 0.4),
        record("evaluate-final", ADAPTERS[2], 0.8, 0.9),
    ),
    made=ADAPTERS,
)


def written(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(b"weights")


async def fill(directory: Path, storage: FileTrajectoryStorage) -> None:
    adapters = AdapterStore(directory / "adapters")
    for parent in (None, *ADAPTERS[:2]):
        adapters.create("shop", written, base_model="base", parent=parent, step=3)
    adapters.create("other", written, base_model="base")
    for stage, returns in (("base", BEFORE), ("warm-start", BEFORE), ("final", AFTER)):
        for goal, earned in returns.items():
            episode = attempt(stage, goal, earned)
            await storage.add(episode)
            await storage.add_scores([Score(trajectory_id=episode.id, reward=earned, reward_version="return-1")])
    for stage in ("warm-start", "iteration-000"):
        metrics = directory / "training" / stage / "metrics.jsonl"
        metrics.parent.mkdir(parents=True)
        metrics.write_text("".join(f"{json.dumps({'step': at, 'loss': 1 / at})}\n" for at in range(1, 9)))
    STATE.save(directory / "state.json")


async def reported(directory: Path, command: str = "openhands-rl demo --seed 3") -> Path:
    async with FileTrajectoryStorage(directory / "trajectories") as storage:
        await fill(directory, storage)
        facts = RunFacts.begin(directory, PLAN, title="learns", stages=8, command=command)
        report = RunReport(
            facts,
            PLAN,
            directory=directory,
            storage=storage,
            adapters=directory / "adapters",
            model=directory,
            reward_version="return-1",
            noted=lambda line: None,
        )
        await report.write(STATE)
    return report.path


async def test_a_report_has_what_the_run_was_and_what_became_of_it(tmp_path: Path) -> None:
    directory = tmp_path / "night"
    file = await reported(directory, "openhands-rl demo --seed 3 --key sk-ant-api03-abcdefghijklmnopqrstuvwxyz")
    data = data_of(file)
    assert file.stat().st_mode & 0o077 == 0 and data["export"]["start"] == "/r/night"
    run = data["runs/night"]
    facts = run["facts"]
    assert (facts["base_model"], facts["seed"], facts["title"], facts["stages"]) == ("talker", 0, "learns", 8)
    assert facts["command"].startswith("openhands-rl demo --seed 3") and "sk-ant" not in file.read_text()
    assert "cores" in facts["machine"] and facts["versions"]["python"] and facts["began"] > 0
    stages = [each["name"] for each in run["records"]]
    assert stages == [each.name for each in STATE.records], "the names of the terminal and of the state"
    success = {each["name"]: each["success"] for each in run["records"]}
    assert success["evaluate-final"]["mean"] == 0.8 > success["evaluate-final"]["low"] and not success["warm-start"]
    assert [(each["name"], each["before"], each["after"]) for each in facts["changes"]] == [
        ("After SFT against the base model", "evaluate-base", "evaluate-warm-start"),
        ("After RL against SFT", "evaluate-warm-start", "evaluate-final"),
    ]
    for stage in ("warm-start", "iteration-000"):
        name = f"training/{stage}/metrics.jsonl"
        assert name in run["metrics"] and data[f"runs/night/metrics?{name}"]["rows"]["loss"][1] == 0.5
    samples = facts["samples"]
    assert [each["task"] for each in samples] == ["goal-a", "goal-c", "goal-b"], "whose reward rose most"
    assert data["episodes"]["total"] == 6
    for each in samples:
        assert data[f"compare?{each['before']}&{each['after']}"]["same_task"]
        assert f"click[final & {each['task']}]" in json.dumps(data[f"episodes/{each['after']}/nodes"])


async def test_a_report_is_bounded_and_names_what_it_lacks(tmp_path: Path) -> None:
    directory = tmp_path / "night"
    file = await reported(directory)
    assert file.stat().st_size < 1_000_000 < MOST_BYTES
    assert data_of(file)["export"]["left_out"] == []
    rows = "".join(f"{json.dumps({'step': at, **{f'k{n}': at / 7 + n for n in range(40)}})}\n" for at in range(2000))
    for number in range(4):
        metrics = directory / "training" / f"iteration-{number + 1:03d}" / "metrics.jsonl"
        metrics.parent.mkdir()
        metrics.write_text(rows)
    most = 1_200_000
    async with FileTrajectoryStorage(directory / "trajectories") as storage:
        await write_run_report(directory, storage, directory / "adapters", most=most)
    data = data_of(file)
    assert 700_000 < file.stat().st_size <= most
    assert any("curves of training/iteration-001" in each for each in data["export"]["left_out"])
    assert "training/iteration-004/metrics.jsonl" in data["runs/night"]["metrics"], "the newest curves stay"
    assert data["episodes"]["total"] == 6, "episodes come before curves"


async def test_a_damaged_episode_costs_its_sample_only(tmp_path: Path) -> None:
    directory = tmp_path / "night"
    await reported(directory)
    before = RunFacts.load(directory)
    assert before is not None
    gone = before.samples[0].model_copy(update={"before": "gone"})
    before.model_copy(update={"samples": (gone, *before.samples[1:])}).save(directory)
    async with FileTrajectoryStorage(directory / "trajectories") as storage:
        data = data_of(await write_run_report(directory, storage, directory / "adapters"))
    assert data["episodes"]["total"] == 4 and "goal-a" in data["export"]["left_out"][0]

"""Evaluations end to end: a scripted model, real controllers, real sandboxes, real repositories."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from git_backend import GitBackend, make_instances
from needs import needs_bubblewrap

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.config.host import agent_named, host_of
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import JsonObject, Score, Trajectory
from openhands_rl_plugin.evals.runs.evaluate import evaluate
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.run_files import Outcome, RunFolder, read_runs
from openhands_rl_plugin.evals.runs.suites import EvalTask, Suite, find_suite, make_backend, swe_task, tasks_of
from openhands_rl_plugin.evals.swe.instances import Instance, VerdictKind
from openhands_rl_plugin.evals.tasks.bugs import patch_of
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = needs_bubblewrap

STOCK = agent_named("stock", host_of(RLSettings()))
SUITE = Suite(name="adders", dataset="owner/adders", split="test")
FIXED = [{"bash": "sed -i s/-/+/ adder.py"}, {"finish": "done"}]
SPOILT = [{"bash": "echo 'import sys; sys.exit(0)' >> adder.py; sed -i 's/a - b/a * b/' adder.py"}, {"finish": "done"}]
NOTHING = [{"bash": "echo $INSTANCE; pwd; git log --all"}, {"text": "I do not know."}, {"finish": "gave up"}]
LOOPING = [{"bash": "echo again"}]


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with instant_model() as url:
        yield url


def entries_of(instances: Sequence[Instance], scripts: Sequence[list[dict[str, str]]]) -> tuple[EvalTask, ...]:
    """Each instance with the script of the model in its problem statement."""
    pairs = zip(instances, scripts, strict=True)
    return tuple(
        swe_task(each.model_copy(update={"problem_statement": script(replies)}), SUITE) for each, replies in pairs
    )


def plan_for(model: str, out: Path, **more) -> EvaluationPlan:
    """``more``: fields of the plan or of its settings."""
    given = {"agent": STOCK, "graders": 2, "timeout": 60.0, "max_workers": 4, "max_turns": 12, **more}
    bounds = {"max_response_length": 4096, "max_obs_length": 7500}
    own = {name: given.pop(name) for name in [*given] if name not in EvaluationPlan.model_fields}
    settings = RLSettings(serving=ServingSettings(model="org/instant", base_url=model), **{**bounds, **own})
    return EvaluationPlan(suite=given.pop("suite", SUITE), settings=settings, out=out, llm_retries=1, **given)


async def judged(
    plan: EvaluationPlan, entries: Sequence[EvalTask], backend: GitBackend | None, **more
) -> list[Outcome]:
    """What a run of the plan does, in the order in which it ends."""
    outcomes: list[Outcome] = []
    async with FileTrajectoryStorage(plan.out / "trajectories") as storage:
        await evaluate(plan, entries, storage=storage, backend=backend, started=lambda _: outcomes.append, **more)
    return outcomes


async def stored(plan: EvaluationPlan) -> list[tuple[Trajectory, tuple[Score, ...]]]:
    async with FileTrajectoryStorage(plan.out / "trajectories") as storage:
        return [found async for found in storage.find(TrajectoryFilter(finished=None))]


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_run_from_the_checkout_to_the_report(model: str, tmp_path: Path):
    instances = make_instances(tmp_path, 4)
    entries = entries_of(instances, [FIXED, SPOILT, NOTHING, LOOPING])
    plan = plan_for(model, tmp_path / "out")
    outcomes = {each.instance_id[-1]: each for each in await judged(plan, entries, GitBackend(tmp_path / "grade"))}
    assert [outcomes[name].kind.value for name in "0123"] == ["resolved", "unresolved", "empty_patch", "empty_patch"]
    assert outcomes["1"].flags == ("exit",) and outcomes["2"].turns == 3

    directory = plan.out / f"owner__adders-test/{STOCK}/instant_maxiter_12_N_v1-run_0"
    rows = {row["instance_id"][-1]: row for row in lines(directory / "output.jsonl")}
    fields = {"instance_id", "test_result", "instruction", "metadata", "history", "metrics", "instance"}
    assert set(rows["0"]) == fields and set(rows["3"]) == {*fields, "error"}
    assert rows["0"]["test_result"]["report"]["resolved"] is True
    assert "+    return a + b" in rows["0"]["test_result"]["git_patch"]
    assert rows["2"]["test_result"]["report"]["empty_generation"] is True
    assert rows["0"]["instruction"].startswith("<uploaded_files>\n/workspace/owner__adder__1.0\n</uploaded_files>\n")
    assert json.loads((directory / "metadata.json").read_text())["llm_config"]["model"] == "openai/org/instant"
    files = sorted((directory / "llm_completions/owner__adder-2").iterdir())
    assert len(files) == 3 and {"messages", "response", "kwargs"} <= set(json.loads(files[-1].read_text()))
    predictions = {each["instance_id"]: each for each in lines(directory / "predictions.jsonl")}
    assert predictions["owner__adder-0"]["model_name_or_path"] == "org/instant" and len(predictions) == 4
    report = json.loads((directory / f"org__instant.{directory.name}.json").read_text())
    assert report["schema_version"] == 2 and report["resolved_ids"] == ["owner__adder-0"]
    assert (report["total_instances"], report["empty_patch_instances"], report["completed_instances"]) == (4, 2, 2)
    assert not (plan.out / ".work").exists()

    scores = {trajectory.task.id[-1]: own for trajectory, own in await stored(plan)}
    assert [[score.reward for score in scores[name]] for name in "0123"] == [[1.0], [0.0], [0.0], [0.0]]
    assert (plan.out / "trajectories").stat().st_mode & 0o077 == 0
    assert not any("a + b" in json.dumps(each.task.data) for each, _ in await stored(plan)), "tasks hold no solution"


async def test_a_finished_run_is_not_rolled_out_again(model: str, tmp_path: Path):
    entries = entries_of(make_instances(tmp_path, 2), [FIXED, FIXED])
    plan = plan_for(model, tmp_path / "out", runs=2, temperatures=(0.0, 0.5))
    backend = GitBackend(tmp_path / "grade")
    assert len(await judged(plan, entries[:1], backend)) == 2
    assert len(await judged(plan, entries, backend)) == 2
    assert len(await judged(plan, entries, backend)) == 0
    assert len(backend.checked_out) == len(backend.graded) == 4
    runs = read_runs((plan.out,))
    assert [(run.index, len(run.outcomes)) for run in runs] == [(0, 2), (1, 2)]
    temperatures = {
        t.run_id[-1]: {node.sampling.temperature for node in t.sampled() if node.sampling}
        for t, _ in await stored(plan)
    }
    assert temperatures == {"0": {0.0}, "1": {0.5}}


async def test_infrastructure_never_counts_as_unresolved_and_is_tried_again_on_demand(model: str, tmp_path: Path):
    entries = entries_of(make_instances(tmp_path, 2), [FIXED, FIXED])
    plan = plan_for(model, tmp_path / "out", max_workers=1, graders=1)
    broken = GitBackend(tmp_path / "grade", lost_checkouts=1, outages=1)
    outcomes = await judged(plan, entries, broken)
    assert [each.kind for each in outcomes] == [VerdictKind.INFRASTRUCTURE] * 2
    assert {each.resolved for each in outcomes} == {None}
    assert {each.reason for each in outcomes} == {"InfrastructureError: the mirror is away", "the disk is full"}
    (run,) = plan.out.rglob("org__instant.*.json")
    report = json.loads(run.read_text())
    assert (report["error_instances"], report["unresolved_instances"]) == (2, 0)
    again = GitBackend(tmp_path / "grade")
    assert await judged(plan, entries, again) == []
    assert [each.kind for each in await judged(plan, entries, again, retry_failed=True)] == [VerdictKind.RESOLVED] * 2
    assert len(again.checked_out) == 1, "the episode whose grading failed is graded, not rolled out again"


async def test_rl_agent_with_a_strategy_and_without_grading(model: str, tmp_path: Path):
    entries = entries_of(make_instances(tmp_path, 1), [FIXED])
    plan = plan_for(model, tmp_path / "out", agent="RLAgent", rollout_strategy="StandardReAct")
    (outcome,) = await judged(plan, entries, GitBackend(tmp_path / "grade"), grade=False)
    assert (outcome.kind, outcome.turns) == (VerdictKind.UNGRADED, 2)
    (row,) = lines(next(plan.out.rglob("output.jsonl")))
    assert "+    return a + b" in row["test_result"]["git_patch"] and "report" not in row["test_result"]


async def test_the_shop_is_started_for_the_run(model: str, tmp_path: Path):
    suite = find_suite("webshop")
    entries = tasks_of(suite, "webshop", None)[:3]
    plan = plan_for(model, tmp_path / "out", agent="RLAgent", max_turns=3, suite=suite)
    outcomes = await judged(plan, entries, None)
    assert [(each.kind, each.reward) for each in outcomes] == [(VerdictKind.UNRESOLVED, 0.0)] * 3
    assert {each.stop for each in outcomes} == {"max_turns"}
    (row, *_) = lines(next(plan.out.rglob("output.jsonl")))
    assert row["test_result"]["report"] == {"resolved": False} and row["instance"]["environment"] == "webshop"
    with pytest.raises(ConfigError, match="only RLAgent supports"):
        await judged(plan.model_copy(update={"agent": STOCK}), entries, None)


async def test_two_processes_do_not_write_the_same_run(model: str, tmp_path: Path):
    plan = plan_for(model, tmp_path / "out")
    files = RunFolder(plan, plan.each_run()[0])
    with pytest.raises(ConfigError, match="another process"):
        await judged(plan, (), GitBackend(tmp_path / "grade"))
    files.close()
    assert await judged(plan, (), GitBackend(tmp_path / "grade")) == []


async def test_a_row_that_cannot_be_set_up_costs_itself_only(model: str, tmp_path: Path):
    good, bad, large = make_instances(tmp_path, 3)
    much = [{"bash": "seq 1 300000 > new.txt"}, {"finish": "done"}]
    entries = entries_of([bad.model_copy(update={"extra": {}}), good, large], [FIXED, FIXED, much])
    outcomes = await judged(plan_for(model, tmp_path / "out"), entries, GitBackend(tmp_path / "grade"))
    assert {each.instance_id[-1]: (each.kind, each.reason) for each in outcomes} == {
        "0": (VerdictKind.RESOLVED, ""),
        "1": (VerdictKind.FAILED, "nothing is known about this row"),
        "2": (VerdictKind.REFUSED, "the change is larger than a recorded patch may be"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["RLAgent", STOCK])
async def test_the_local_back_end_sets_up_shows_and_grades(agent: str, model: str, tmp_path: Path):
    """The environment of an instance is there for the agent, and its tests decide."""
    (first,) = make_instances(tmp_path, 1)
    (tmp_path / "mirror" / "owner").mkdir(parents=True)
    (tmp_path / "origin" / ".git").rename(tmp_path / "mirror" / "owner" / "adder.git")
    check = "import adder; print('PASSED' if adder.add(2, 3) == 5 else 'FAILED', 'check.py::adds')"
    test_patch = patch_of("check.py", None, f"{check}\n")
    own: JsonObject = {"test_command": "python check.py", "packages": [], "test_files": []}
    more = {"test_patch": test_patch, "fail_to_pass": ("check.py::adds",), "extra": own}
    instances = [
        first.model_copy(update={**more, "instance_id": f"owner__adder-{name}"}) for name in ("fixed", "spoilt", "odd")
    ]
    look = {"bash": "which python; python -c 'import sys; print(sys.prefix)'; ls /testbed"}
    entries = list(entries_of(instances[:2], [[look, *FIXED], [look, *SPOILT]]))
    odd = instances[2].model_copy(update={"base_commit": "0" * 40})
    entries.append(swe_task(odd, SUITE))
    plan = plan_for(model, tmp_path / "out", agent=agent)
    async with FileTrajectoryStorage(plan.out / "trajectories") as storage:
        backend = make_backend("local", mirror=tmp_path / "mirror", cache=tmp_path / "cache")
        await evaluate(plan, entries, storage=storage, backend=backend)
    (run,) = read_runs((plan.out,))
    kinds = {outcome.instance_id.rpartition("-")[2]: outcome.kind for outcome in run.outcomes}
    wanted = (VerdictKind.RESOLVED, VerdictKind.UNRESOLVED, VerdictKind.INFRASTRUCTURE)
    assert tuple(kinds[name] for name in ("fixed", "spoilt", "odd")) == wanted, run.outcomes
    rows = {row["instance_id"].rpartition("-")[2]: row for row in lines(next(plan.out.rglob("output.jsonl")))}
    history_text = json.dumps(rows["fixed"]["history"])
    assert "/envs/testbed/bin/python" in history_text and "adder.py" in history_text
    assert rows["fixed"]["test_result"]["verdict"]["fail_to_pass"]["success"] == ["check.py::adds"]

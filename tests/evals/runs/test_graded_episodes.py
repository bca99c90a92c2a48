"""Software tasks in a training loop: every episode ends with the verdict of its tests, as a stored score."""

from __future__ import annotations

from pathlib import Path

from git_backend import GitBackend, make_instances
from needs import needs_bubblewrap

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.apps.loop.run import GradedRunner
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.evals.runs.evaluate import options_of
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.runner import EvalRunner
from openhands_rl_plugin.evals.runs.suites import Suite, swe_task
from openhands_rl_plugin.hosts.pool import open_runner
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.scoring import rescore, stored_rewards
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SUITE = Suite(name="adders", dataset="owner/adders", split="test")
FIXED = script([{"bash": "sed -i s/-/+/ adder.py"}, {"finish": "done"}])
SPOILT = script([{"bash": "sed -i 's/a - b/a * b/' adder.py"}, {"finish": "done"}])


@needs_bubblewrap
async def test_an_episode_ends_with_its_verdict(tmp_path: Path):
    instances = make_instances(tmp_path, 2)
    entries = [
        swe_task(instance.model_copy(update={"problem_statement": said}), SUITE)
        for instance, said in zip(instances, (FIXED, SPOILT), strict=True)
    ]
    reward, backend = build("rewards", "tests"), GitBackend(tmp_path / "grade")
    with instant_model() as url:
        serving = ServingSettings(model="org/instant", base_url=url)
        settings = RLSettings(serving=serving, max_workers=2, max_turns=6)
        plan = EvaluationPlan(suite=SUITE, agent="RLAgent", settings=settings, out=tmp_path, graders=2, timeout=60.0)
        options = options_of(plan, 0)
        rollout = RolloutPlan(
            run_id="loop/iteration-000",
            tasks=tuple(entry.task.model_copy(update={"limits": plan.limits()}) for entry in entries),
            served_model="policy-v000003",
        )
        async with (
            FileTrajectoryStorage(tmp_path / "trajectories") as storage,
            open_runner(settings, options, storage=storage) as runner,
        ):
            spec = options.strategy_spec(settings)
            player = EvalRunner(
                plan, runner, strategy=spec, storage=storage, scratch=tmp_path / "checkouts", backend=backend
            )
            played = await roll_out(rollout, GradedRunner(player, entries), storage)
            report = await rescore(storage, reward)
            rewards = await stored_rewards(storage, reward, played)
    assert rewards == [1.0, 0.0] and (report.scored, report.already_scored) == (0, 2)
    expected = PolicyRef(base_model="org/instant", adapter="policy", version=3)
    assert [trajectory.policy for trajectory in played] == [expected] * 2
    assert sorted(backend.graded) == [instance.instance_id for instance in instances]

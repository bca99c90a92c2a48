"""An episode that was played, as a trainer gets it."""

from __future__ import annotations

from openhands_rl_plugin.config.build import make_strategy
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.redaction import redact_text, redact_trajectory
from openhands_rl_plugin.core.types import Failure, FailureKind, Sample, Score, Trajectory
from openhands_rl_plugin.training.data.batch import samples_of
from openhands_rl_plugin.training.data.eligibility import is_cut_short, is_interrupted, off_policy_sampling
from openhands_rl_plugin.training.data.shortened import until_secret
from openhands_rl_plugin.trajectories.exchange.trainers.polar import TIMED_OUT
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout


def told(
    trajectory: Trajectory, settings: RLSettings, outcome: Score | Failure | None, *, token_ids: bool
) -> PlayedRollout:
    """What was played, without secrets: of a failed episode only why. ``outcome``: ``None`` where another program
    judges it. ``token_ids``: those of its sequences, too, without which it has failed."""
    clean = redact_trajectory(trajectory)
    kept = until_secret(clean)
    played = PlayedRollout(
        trajectory_id=trajectory.id,
        run_id=trajectory.run_id,
        group_id=trajectory.group_id,
        task_id=trajectory.task.id,
        environment=trajectory.task.environment,
        strategy=trajectory.strategy,
        policy=trajectory.policy,
        stop=trajectory.stop,
        cut_short=is_cut_short(trajectory),
        resolved=_resolved(trajectory),
        off_policy=_off_policy(settings, trajectory),
        shortened=kept is not clean,
        messages=clean.messages(),
        tools=clean.tools,
        turns=sum(1 for _ in trajectory.sampled()),
        usage=trajectory.usage,
        seconds=max(0.0, trajectory.times.finished - trajectory.times.started),
    )
    if isinstance(outcome, Failure):
        clear = outcome.model_copy(update={"message": redact_text(outcome.message)})
        return played.model_copy(update={"failure": clear})
    segments = _segments(kept) if token_ids else ()
    if isinstance(segments, Failure):
        return played.model_copy(update={"failure": segments})
    said = {} if outcome is None else {"reward": outcome.reward, "reward_version": outcome.reward_version}
    return played.model_copy(update={**said, "segments": segments})


def unusable(trajectory: Trajectory, timeout: float) -> Failure | None:
    """Why an episode, bounded by ``timeout`` seconds, is no sample of the policy, if its failure does not say it."""
    if is_interrupted(trajectory):
        why = f"the episode was not over after {timeout:g} s: raise --timeout"
        return failure_of(FailureKind.ENVIRONMENT, TIMED_OUT, why)
    if not any(trajectory.sampled()):
        why = f"nothing was sampled ({trajectory.stop.value}): the first prompt is longer than max_prompt_length allows"
        return failure_of(FailureKind.ENVIRONMENT, "rollout.prompt", why)
    return None


def failure_of(kind: FailureKind, boundary: str, message: str) -> Failure:
    """A failure that no episode had while it was played."""
    return Failure(kind=kind, message=message, boundary=boundary)


def _segments(trajectory: Trajectory) -> tuple[Sample, ...] | Failure:
    try:
        return tuple(samples_of(trajectory))
    except TrainingError as error:
        return failure_of(FailureKind.MODEL, "rollout.token_ids", str(error))


def _off_policy(settings: RLSettings, trajectory: Trajectory) -> str:
    if getattr(make_strategy(settings), "selects", False):
        return f"{trajectory.strategy.name} chose among what the policy sampled"
    return off_policy_sampling(trajectory)


def _resolved(trajectory: Trajectory) -> bool | None:
    result = trajectory.evidence.get("test_result")
    report = result.get("report") if isinstance(result, dict) else None
    resolved = report.get("resolved") if isinstance(report, dict) else None
    return resolved if isinstance(resolved, bool) else None

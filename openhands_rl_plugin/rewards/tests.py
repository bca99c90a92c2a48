"""The reward of a software-engineering task: whether the patch passes its tests."""

from __future__ import annotations

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.judgements import host_evidence
from openhands_rl_plugin.core.types import Frozen, JsonObject, Score, Trajectory

_UNKNOWN = ("error_eval", "infra_failure")


class TestsOptions(Frozen):
    """No options."""

    __test__ = False  # pytest must not collect it


class TestsReward:
    """1.0 when the recorded test report has ``resolved`` set, else 0.0.

    The report is in ``evidence["test_result"]["report"]``, as in OpenHands' evaluation. The score's details are those
    of ``evidence["test_result"]["verdict"]``.
    """

    __test__ = False
    Options = TestsOptions
    version = "tests-1"

    def __init__(self, options: TestsOptions | None = None) -> None:
        self.options = options or TestsOptions()

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` when no tests ran, or their environment failed."""
        held = host_evidence(trajectory).get("test_result")
        result = held if isinstance(held, dict) else {}
        report = result.get("report")
        if not isinstance(report, dict) or not isinstance(resolved := report.get("resolved"), bool):
            raise GraderError(f"{trajectory.id} has no report of tests in its evidence: grade it first")
        if any(report.get(name) is True for name in _UNKNOWN):
            raise GraderError(f"{trajectory.id}: its tests could not be run, so nothing is known about its patch")
        verdict = result.get("verdict")
        detail: JsonObject = {"resolved": resolved, **({"verdict": verdict} if isinstance(verdict, dict) else {})}
        return Score(trajectory_id=trajectory.id, reward=float(resolved), detail=detail, reward_version=self.version)

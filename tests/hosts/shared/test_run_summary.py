"""The line at the end of a run: true of what is stored, with the next command."""

from __future__ import annotations

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.types import Failure, FailureKind, Trajectory
from openhands_rl_plugin.hosts.shared.sessions import run_summary
from openhands_rl_plugin.testing import example_trajectory


def changed(trajectory: Trajectory, **changes: object) -> Trajectory:
    nodes = tuple(node.model_copy(update=changes) for node in trajectory.nodes)
    return trajectory.model_copy(update={"nodes": nodes})


def test_an_episode_that_nobody_judged_says_how_to() -> None:
    episode = changed(example_trajectory(), reward=None)
    line = run_summary(episode, (), RLSettings())
    assert line == (
        "recorded in ~/.openhands/rl_trajectories as 00000000: 2 completions; token ids: yes; reward: not scored "
        "(openhands-rl score ~/.openhands/rl_trajectories --id 00000000 --value 1); "
        "openhands-rl show ~/.openhands/rl_trajectories 00000000"
    )


def test_missing_token_ids_are_said() -> None:
    line = run_summary(changed(example_trajectory(), tokens=None), (), RLSettings())
    assert "; token ids: no (openhands-rl list ~/.openhands/rl_trajectories --by says why); " in line


def test_what_a_server_said_does_not_control_the_terminal() -> None:
    failure = Failure(kind=FailureKind.MODEL, message="x\x1b]0;title\x07\nrecorded", boundary="b")
    line = run_summary(example_trajectory().model_copy(update={"failure": failure}), (), RLSettings())
    assert line.isprintable() and "; failed, so never trained on (model: x\\x1b]0;title" in line

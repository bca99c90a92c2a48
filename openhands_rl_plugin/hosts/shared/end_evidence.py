"""Evidence at the end of a session: what its runtime gathers, and what the reward's command says of the workspace."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RewardSettings
from openhands_rl_plugin.core.records import CHECKED, CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, JsonObject
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.sessions import EpisodeRuntime, OwesReward
from openhands_rl_plugin.rollout import scoring


@runtime_checkable
class ChecksWorkspace(Protocol):
    """A runtime that can run a command over the workspace as it stands."""

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Run it in a fresh sandbox. Blocks."""
        ...


def workspace_command(settings: RewardSettings) -> WorkspaceCommand | None:
    """The command that the reward needs at the end of an episode, if any. Raises ``ConfigError``."""
    # Other rewards are not made: a verifier would load its model.
    if not hasattr(registry.load("rewards", settings.name), "workspace_command"):
        return None
    return scoring.workspace_command(make_reward(settings))


def end_evidence(
    runtime: object, episode: HostEpisode, failure: Failure | None
) -> tuple[JsonObject | None, Failure | None]:
    """The session's evidence and its failure: ``failure``, the episode's, or else the environment's. Blocks.

    An episode that a limit cut is paid here, where its environment pays at the end only.
    The reward's command comes last, so that what it writes is no part of the session's patch. It judges whatever a run
    that ended has left, also at a limit of iterations; after a failure, which a stop in the middle is, it is not run.
    """
    failure = failure or episode.failure
    evidence: JsonObject | None = None
    if isinstance(runtime, EpisodeRuntime):
        evidence, broken = runtime.conclude()
        failure = failure or broken
    if isinstance(runtime, OwesReward) and (owed := runtime.take_owed()) is not None:
        episode.pay(owed)
    asked = workspace_command(episode.settings.reward)
    if asked is not None and failure is None:
        ran = (
            runtime.check(asked)
            if isinstance(runtime, ChecksWorkspace)
            else CommandEvidence(command=asked.command, error="this runtime has no workspace of openhands_rl_plugin")
        )
        evidence = {**(evidence or {}), CHECKED: ran.model_dump(mode="json")}
    return evidence, failure

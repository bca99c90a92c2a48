"""The registry of runtimes, and the evidence at the end of a session.

OpenHands creates agent and runtime of a session separately, without references. Both know the session's id.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RewardSettings
from openhands_rl_plugin.core.records import CHECKED, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, JsonObject
from openhands_rl_plugin.rollout import scoring
from openhands_rl_plugin.rollout.session import LiveEnvironment
from openhands_rl_plugin.session.session import Session

_runtimes: WeakValueDictionary[str, object] = WeakValueDictionary()


def register_runtime(session: str, runtime: object) -> None:
    """Register the runtime of a session, by a weak reference."""
    _runtimes[session] = runtime


def runtime_of(session: str) -> object | None:
    """The runtime that is registered for this session; ``None`` for a runtime of another package."""
    return _runtimes.get(session)


def workspace_command(settings: RewardSettings) -> WorkspaceCommand | None:
    """The command that the reward needs at the end of an episode, if any. Raises ``ConfigError``."""
    # Other rewards are not made: a verifier would load its model.
    if not hasattr(registry.load("rewards", settings.name), "workspace_command"):
        return None
    return scoring.workspace_command(make_reward(settings))


def protected_by(settings: RewardSettings) -> tuple[str, ...]:
    """The files that the reward's command protects, if any. Raises ``ConfigError``."""
    asked = workspace_command(settings)
    return asked.protected if asked is not None else ()


def end_evidence(
    runtime: object, episode: Session, failure: Failure | None
) -> tuple[JsonObject | None, Failure | None]:
    """The session's evidence and its failure: ``failure``, the episode's, or else the environment's. Blocks.

    They are what the runtime's ``conclude`` says, if it has one; its ``check`` runs the reward's command.

    An episode that a limit cut is paid here, where its environment pays at the end only.
    The reward's command comes last, so that what it writes is no part of the session's patch. It judges whatever a run
    that ended has left, also at a limit of iterations; after a failure, which a stop in the middle is, it is not run.
    """
    failure = failure or episode.failure
    evidence: JsonObject | None = None
    if (conclude := getattr(runtime, "conclude", None)) is not None:
        evidence, broken = conclude()
        failure = failure or broken
    live = getattr(runtime, "live", None)
    if isinstance(live, LiveEnvironment) and live.owed is not None:
        episode.pay(live.owed)
    asked = workspace_command(episode.settings.reward)
    if asked is not None and failure is None:
        missing = asked.did(error="this runtime has no workspace of openhands_rl_plugin")
        ran = check(asked) if (check := getattr(runtime, "check", None)) is not None else missing
        evidence = {**(evidence or {}), CHECKED: ran.model_dump(mode="json")}
    return evidence, failure

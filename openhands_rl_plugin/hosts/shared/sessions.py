"""The registry of runtimes, and the end of a session's episode.

OpenHands creates agent and runtime of a session separately, without references. Both know the session's id.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RewardSettings
from openhands_rl_plugin.core.records import CHECKED, LAST_ERROR, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, StopReason, Trajectory
from openhands_rl_plugin.rollout import scoring
from openhands_rl_plugin.rollout.session import LiveEnvironment
from openhands_rl_plugin.session.session import Session

# Characters of OpenHands' last error in the evidence: enough for its message, without a long response body.
_LONGEST_ERROR = 2000

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


def end_episode(
    session: str,
    episode: Session,
    stop: StopReason | None = None,
    failure: Failure | None = None,
    *,
    last_error: str = "",
) -> Trajectory:
    """The ended episode, with the evidence of its host's session. Blocks.

    It fails with its own failure, ``failure``, or else the environment's. Evidence is what the runtime's ``conclude``
    returns, if it has one, and ``last_error``. The runtime's ``check`` runs the reward's command.

    An episode that a limit cut gets its reward here, where its environment gives it at the end only.
    The reward's command comes last, so that what it writes is no part of the session's patch. It judges whatever a run
    that ended has left, also at a limit of iterations; after a failure, which a stop in the middle is, it is not run.
    """
    runtime, evidence, broken = runtime_of(session), None, None
    if (conclude := getattr(runtime, "conclude", None)) is not None:
        evidence, broken = conclude()
    failure = episode.failure or failure or broken
    live = getattr(runtime, "live", None)
    if isinstance(live, LiveEnvironment) and live.owed is not None:
        episode.pay(live.owed)
    evidence = {**(evidence or episode.evidence or {})}
    asked = workspace_command(episode.settings.reward)
    if asked is not None and failure is None:
        missing = asked.did(error="this runtime has no workspace of openhands_rl_plugin")
        ran = check(asked) if (check := getattr(runtime, "check", None)) is not None else missing
        evidence[CHECKED] = ran.model_dump(mode="json")
    if last_error:
        evidence[LAST_ERROR] = last_error[:_LONGEST_ERROR]
    return episode.freeze(stop=stop, failure=failure, evidence=evidence)

"""One line at the end of a run without a runner: what was recorded, and what can be done with it."""

from __future__ import annotations

import shlex

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.records import CHECKED, MISSING
from openhands_rl_plugin.core.redaction import REDACTED
from openhands_rl_plugin.core.transcript import one_line
from openhands_rl_plugin.core.types import Node, Score, Trajectory
from openhands_rl_plugin.hosts.shared.end_evidence import workspace_command

SHORT_ID = 8
_NOT_SENT = "the server did not send them: `openhands-rl serve`, vLLM and SGLang do"


def run_summary(trajectory: Trajectory, scores: tuple[Score, ...], settings: RLSettings) -> str:
    """``trajectory`` and ``scores`` as they are stored."""
    asked = workspace_command(settings.reward)
    store, short = store_name(settings), trajectory.id[:SHORT_ID]
    sampled = [node for node in trajectory.nodes if node.sampled]
    parts = [
        f"recorded in {store} as {short}: {len(sampled)} completions",
        f"token ids: {_token_ids(sampled)}",
        _outcome(trajectory, scores, store, asked.command if asked is not None else None),
        f"openhands-rl show {store} {short}",
    ]
    return "; ".join(parts)


def store_name(settings: RLSettings) -> str:
    """The store as an argument of ``openhands-rl``."""
    if settings.storage_backend == "mongodb":
        storage = settings.storage
        return f"env:{storage.uri_env}" if storage.uri_env else f"mongodb://localhost:27017/{storage.database}"
    path = settings.storage.path
    # A shell expands the tilde only outside of quotes.
    return path if path.startswith("~/") and shlex.quote(path[2:]) == path[2:] else shlex.quote(path)


def _token_ids(sampled: list[Node]) -> str:
    without = [node for node in sampled if node.tokens is None]
    if not sampled or not without:
        return "yes" if sampled else "none"
    secret = any(REDACTED in node.model_dump_json() for node in without)
    cause = "a secret was taken out of the text, and ids would spell it" if secret else _why_not_sent(without)
    return f"no ({cause})" if len(without) == len(sampled) else f"{len(sampled) - len(without)} of them ({cause})"


def _why_not_sent(without: list[Node]) -> str:
    """The server's refusal, where one was noted."""
    noted = (node.metadata.get(MISSING) for node in without)
    causes = (str(each.get("token_ids", "")) for each in noted if isinstance(each, dict))
    refusal = next((cause for cause in causes if "refuses" in cause), None)
    return f"{refusal}; `openhands-rl serve`, vLLM and SGLang send them" if refusal else _NOT_SENT


def _outcome(trajectory: Trajectory, scores: tuple[Score, ...], store: str, command: str | None) -> str:
    """``command``: of the reward, which judges the workspace of a run that ended. One that was stopped in the middle
    is no result of the policy."""
    unchecked = f"`{one_line(command, 40)}`" if command and CHECKED not in trajectory.evidence else ""
    if trajectory.failure is not None:
        kind, message = trajectory.failure.kind.value, one_line(trajectory.failure.message, 120)
        left = f", nor judged by {unchecked}" if unchecked else ""
        return f"failed, so never trained on ({kind}: {message}){left}"
    judged = newest_outcome(scores)
    reward = trajectory.known_return if judged is None else judged.reward
    if reward is not None:
        return f"reward: {reward:g}"
    why = f"; {unchecked} judges a run that ended, and the process ended first" if unchecked else ""
    return f"reward: not scored (openhands-rl score {store} --id {trajectory.id[:SHORT_ID]} --value 1{why})"

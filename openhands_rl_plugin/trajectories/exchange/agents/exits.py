"""How episodes of SWE-agent and its relatives ended, by the word in their records."""

from __future__ import annotations

from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason

_STOPS = {
    "submitted": StopReason.TERMINATED,
    "limitsexceeded": StopReason.MAX_TURNS,
    "timeexceeded": StopReason.TIMEOUT,
    "exit_cost": StopReason.TRUNCATED,
    "exit_context": StopReason.MAX_TOKENS,
    "exit_format": StopReason.NO_ACTION,
    "exit_forfeit": StopReason.TERMINATED,
    "exit_command_timeout": StopReason.TIMEOUT,
    "exit_total_execution_time": StopReason.TIMEOUT,
    "finished": StopReason.TERMINATED,
    "max_iterations": StopReason.MAX_TURNS,
}
_FAILURES = ("error", "exit_api", "exception", "skipped")


def ending_of(status: str | None, otherwise: StopReason, boundary: str) -> tuple[StopReason, Failure | None]:
    """The end that ``status`` names ("submitted (exit_cost)": what cut it short), or ``otherwise``."""
    words = (status or "").lower().replace("submitted (", "").rstrip(")").strip()
    if (stop := _STOPS.get(words)) is not None:
        return stop, None
    if any(word in words for word in _FAILURES):
        return StopReason.ERROR, Failure(
            kind=FailureKind.INFRASTRUCTURE, message=(status or "")[:500], boundary=boundary
        )
    return otherwise, None

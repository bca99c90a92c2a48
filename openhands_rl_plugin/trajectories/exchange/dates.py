"""Dates in records of others, the same on every machine."""

from __future__ import annotations

from datetime import UTC, datetime

from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError


def date_of(seconds: float) -> datetime:
    """A Unix time as a date. Raises ``LeftOutError`` for a number that is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise LeftOutError(f"its time is no date: {seconds:g} seconds since 1970") from error


def seconds_of(date: datetime) -> float:
    """A date as Unix time. Records write local times without a zone; those are taken for UTC."""
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()

"""``[rl.watch]``: learning in use, from the episodes that come in by themselves."""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.config.rl import RLSettings, Settings


class WatchSettings(Settings):
    """``[rl.watch]``: when there is enough to learn from, and what a candidate has to pass before it is used."""

    suite: str = Field(
        default="",
        description="suite that candidates are measured on: as of `openhands-rl evaluate`, or a file of rows",
    )
    tasks: int = Field(default=100, ge=1, description="tasks of the suite that are used, at most")
    attempts: int = Field(default=1, ge=1, le=64, description="episodes per task and version")
    margin: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="loss in success that the 95% interval of the paired difference may not include",
    )
    min_episodes: int = Field(default=32, ge=1, description="new judged episodes before anything is trained")
    min_used: int = Field(
        default=8, ge=1, description="episodes (preferences: pairs) that a candidate is trained on, at least"
    )
    max_episodes: int = Field(default=512, ge=1, description="episodes that one candidate is trained on, at most")
    certainty: float = Field(
        default=0.9,
        gt=0.5,
        le=1,
        description="verifier: a success has at least this probability, a failure at most 1 minus it",
    )


def watch_settings(settings: RLSettings) -> WatchSettings:
    """The section ``[rl.watch]``."""
    return settings.section("watch", WatchSettings)

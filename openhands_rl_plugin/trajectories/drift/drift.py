"""Drift over a whole store: how often each cause breaks a segment, what it costs, and what to set against it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from openhands_rl_plugin.core.redaction import REDACTED
from openhands_rl_plugin.core.types import Frozen, Score, Trajectory
from openhands_rl_plugin.trajectories.drift.breaks import Break, breaks_of
from openhands_rl_plugin.trajectories.drift.causes import SETTINGS, Cause, Decode, cause_of

MOST_EXAMPLES = 5
_LONGEST_TEXT = 60


class DriftExample(Frozen):
    """One place: ``removed`` and ``inserted`` are texts when there is a tokenizer, else the numbers of ids."""

    trajectory_id: str
    node: int
    previous: int
    at: int
    removed: str
    inserted: str


class CauseFigures(Frozen):
    """One cause. ``repeated_tokens`` have to be processed once more in training; ``lost_turns`` cannot be trained."""

    cause: Cause
    breaks: int
    episodes: int
    repeated_tokens: int
    lost_turns: int
    setting: str
    examples: tuple[DriftExample, ...]


class DriftReport(Frozen):
    """All of it. ``turns`` counts sampled nodes with token ids, ``tokens`` what their segments hold in all.

    ``segments_by_drift`` are those that begin with a break; the others begin an episode or a branch of a search.
    """

    episodes: int
    turns: int
    segments: int
    segments_by_drift: int
    tokens: int
    sampled_tokens: int
    causes: tuple[CauseFigures, ...]


async def drift_of(
    found: AsyncIterator[tuple[Trajectory, tuple[Score, ...]]], decode: Decode | None = None
) -> DriftReport:
    """Analyse every episode of ``found``, one at a time; the costliest cause comes first."""
    count = _Count(decode)
    async for trajectory, _ in found:
        count.add(trajectory)
    return count.report()


@dataclass
class _CauseCount:
    breaks: int = 0
    repeated: int = 0
    lost: int = 0
    episodes: set[str] = field(default_factory=set)
    examples: list[DriftExample] = field(default_factory=list)


@dataclass
class _Count:
    decode: Decode | None
    episodes: int = 0
    turns: int = 0
    segments: int = 0
    by_drift: int = 0
    tokens: int = 0
    sampled: int = 0
    causes: dict[Cause, _CauseCount] = field(default_factory=dict)

    def add(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        self._add_turns(trajectory)
        for each in breaks_of(trajectory):
            cause = self.causes.setdefault(cause_of(trajectory, each, self.decode), _CauseCount())
            self.by_drift += each.starts_segment
            cause.breaks += 1
            cause.repeated += each.repeated
            cause.episodes.add(trajectory.id)
            if len(cause.examples) < MOST_EXAMPLES:
                cause.examples.append(self._example(trajectory, each))

    def report(self) -> DriftReport:
        ranked = sorted(self.causes.items(), key=lambda item: (-item[1].repeated, -item[1].lost, item[0]))
        return DriftReport(
            episodes=self.episodes,
            turns=self.turns,
            segments=self.segments,
            segments_by_drift=self.by_drift,
            tokens=self.tokens,
            sampled_tokens=self.sampled,
            causes=tuple(
                CauseFigures(
                    cause=cause,
                    breaks=count.breaks,
                    episodes=len(count.episodes),
                    repeated_tokens=count.repeated,
                    lost_turns=count.lost,
                    setting=SETTINGS[cause],
                    examples=tuple(count.examples),
                )
                for cause, count in ranked
            ),
        )

    def _add_turns(self, trajectory: Trajectory) -> None:
        with_secret: set[int] = set()
        for index, node in enumerate(trajectory.nodes):
            if node.parent in with_secret or REDACTED in node.message.model_dump_json():
                with_secret.add(index)
            if not node.sampled:
                continue
            if (tokens := node.tokens) is None:
                lost = self.causes.setdefault(Cause.REDACTED if index in with_secret else Cause.NO_IDS, _CauseCount())
                lost.lost += 1
                lost.episodes.add(trajectory.id)
                continue
            self.turns += 1
            self.segments += not tokens.extends
            self.tokens += len(tokens.prompt_ids) + len(tokens.sampled_ids)
            self.sampled += len(tokens.sampled_ids)

    def _example(self, trajectory: Trajectory, each: Break) -> DriftExample:
        difference = each.difference
        return DriftExample(
            trajectory_id=trajectory.id,
            node=each.node,
            previous=each.previous,
            at=difference.at,
            removed=self._text(difference.removed),
            inserted=self._text(difference.inserted),
        )

    def _text(self, ids: tuple[int, ...]) -> str:
        if self.decode is None:
            return f"{len(ids)} ids"
        text = self.decode(ids)
        return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"

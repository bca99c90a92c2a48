"""What is known of an episode's outcome: what people said, else what ``[rl.reward]`` says, else nothing. No guesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path

from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.success import success_rule
from openhands_rl_plugin.contrib.watch.settings import watch_settings
from openhands_rl_plugin.core.errors import ConfigError, GraderError, RLError, StorageError
from openhands_rl_plugin.core.judgements import OPINION, consensus, labels_of, scores_of
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, TrajectoryFilter
from openhands_rl_plugin.core.types import Failure, Score, Trajectory
from openhands_rl_plugin.rollout.rescoring import rescore
from openhands_rl_plugin.rollout.scoring import JudgesLabels, known_score
from openhands_rl_plugin.training.verifier.card import Calibration, VerifierCard

DIVIDED = "labels contradict each other"
UNDECIDED = "the verifier is not certain"
UNJUDGED = "nobody has judged it"
AWAY = "the judge is away"
_AT_ONCE = 64
_LONGEST_REASON = 120


@dataclass(frozen=True)
class Judgement:
    """``value``: the reward that is learnt from. ``good``: whether it is a success. ``by``: who said so."""

    value: float
    good: bool
    by: str


@dataclass(frozen=True)
class Judged:
    """Episode -> judgement; ``open``: why others have none -> how many. ``away``: what kept the judge from judging."""

    known: Mapping[str, Judgement] = field(default_factory=dict)
    open: Mapping[str, int] = field(default_factory=dict)
    away: str = ""


class KnownReward:
    """A reward that only says what is known already; its scores are never stored."""

    version = "watch-1"

    def __init__(self, known: Mapping[str, float]) -> None:
        self._known = known

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Raises ``GraderError``: of this one nothing is known."""
        raise GraderError(UNJUDGED)

    def from_record(self, trajectory: Trajectory, scores: Sequence[Score]) -> Score | None:
        """As in ``known_score``."""
        if trajectory.failure is not None or trajectory.id not in self._known:
            return None
        return Score(trajectory_id=trajectory.id, reward=self._known[trajectory.id], reward_version=self.version)


def check_calibrated(settings: RLSettings) -> None:
    """Raise ``ConfigError`` for a verifier whose scores are no calibrated probabilities."""
    if settings.reward.name != "verifier":
        return
    directory = Path(str(settings.reward.options.get("adapter", ""))).expanduser()
    if VerifierCard.load(directory).calibration == Calibration():
        raise ConfigError(
            f"[rl.reward] adapter: the scores of {directory} are no calibrated probabilities, and nobody would look "
            "at what they let in: train it with `openhands-rl train --verifier --calibration platt`"
        )


class EpisodeJudge:
    """Judges stored episodes once each; what people say is read anew each time."""

    def __init__(self, settings: RLSettings, storage: TrajectoryStorage) -> None:
        self._settings = settings
        self._storage = storage
        self._reward: Reward = make_reward(settings.reward)
        self._said: dict[str, Judgement | str] = {}
        self._why: dict[str, str] = {}
        self._last: dict[str, Score | None] = {}
        """The newest score of what was judged: another one may say otherwise."""

    async def judge(self, ids: Sequence[str]) -> Judged:
        """What is known of these episodes, which have ended without a failure. Raises ``StorageError``.

        Where the judge is away, the others are judged, and these the next time.
        """
        known: dict[str, Judgement] = {}
        reasons: Counter[str] = Counter()
        away = ""
        for some in batched(ids, _AT_ONCE):
            labels = await self._labels(some)
            divided = {each for each, said in labels.items() if (found := consensus(said)) and found.value is None}
            by_people = {each: _by_people(said) for each, said in labels.items() if each not in divided}
            told = {each: found for each, found in by_people.items() if found is not None}
            others = [each for each in some if each not in told and each not in divided]
            scores = await scores_of(self._storage, others)
            changed = [each for each in others if self._last.get(each) != _newest(scores, each)]
            away = await self._by_reward([each for each in others if each not in self._said or each in changed]) or away
            for each in some:
                found = DIVIDED if each in divided else told.get(each) or self._said.get(each) or self._why[each]
                if isinstance(found, Judgement):
                    known[each] = found
                else:
                    reasons[found] += 1
        return Judged(known, dict(reasons), away)

    async def _labels(self, ids: Sequence[str]) -> dict[str, list[Label]]:
        of: dict[str, list[Label]] = {}
        for label in await labels_of(self._storage, ids):
            of.setdefault(label.trajectory_id, []).append(label)
        return of

    async def _by_reward(self, ids: Sequence[str]) -> str:
        """Let the reward judge these, and keep what it says; returns why it could not."""
        self._why |= dict.fromkeys(ids, UNJUDGED)
        for each in ids:
            self._said.pop(each, None)
        if not ids or isinstance(self._reward, JudgesLabels):
            return ""
        where, away = TrajectoryFilter(ids=tuple(ids)), ""
        try:
            report = await rescore(self._storage, self._reward, where, sub_agents=False)
            self._why |= {each: _reason(failure) for each, failure in report.unscored}
        except StorageError:
            raise
        except RLError as error:
            away = str(error).splitlines()[0]
            self._why |= dict.fromkeys(ids, AWAY)
        async for trajectory, scores in self._storage.find(where):
            score = known_score(self._reward, trajectory, scores)
            self._last[trajectory.id] = scores[-1] if scores else None
            if score is not None and score.reward is not None:
                self._said[trajectory.id] = self._decided(trajectory, score)
        return away

    def _decided(self, trajectory: Trajectory, score: Score) -> Judgement | str:
        assert score.reward is not None, "the caller has looked"
        value, by = score.reward, score.reward_version
        if by.startswith(OPINION):
            sure = watch_settings(self._settings).certainty
            decided = value >= sure or value <= 1 - sure
            return Judgement(value, value >= sure, by) if decided else UNDECIDED
        rule = success_rule(trajectory.task.environment, self._settings.reward)
        return Judgement(value, rule.holds(value, trajectory.stop), by)


def _newest(scores: Mapping[str, Sequence[Score]], identity: str) -> Score | None:
    found = scores.get(identity, ())
    return found[-1] if found else None


def _reason(failure: Failure) -> str:
    return failure.message.removeprefix("GraderError: ").splitlines()[0][:_LONGEST_REASON]


def _by_people(labels: Sequence[Label]) -> Judgement | None:
    said = consensus(labels)
    return None if said is None or said.value is None else Judgement(said.value, said.value >= 1, "people")

"""The training dataset of ``RLAgent.train`` and ``openhands-rl train``: stored episodes with their advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from openhands_rl_plugin.config.rl import AlgorithmName, TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.judgements import UNJUDGED, Preferences, labels_of, preferences
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, TrajectoryFilter, sub_agent_of
from openhands_rl_plugin.core.types import (
    Adapter,
    Failure,
    Frozen,
    Sample,
    Score,
    StopReason,
    Trajectory,
)
from openhands_rl_plugin.rollout.scoring import JudgesLabels, judge_all, known_score
from openhands_rl_plugin.training.algorithms import algorithm_of, needs_logprobs
from openhands_rl_plugin.training.credit.credit import EQUAL, credited_samples, is_searched
from openhands_rl_plugin.training.data.batch import (
    is_interrupted,
    is_overlong,
    is_recorded,
    may_be_shortened,
    off_policy_sampling,
    recorded_nodes,
    regrouped,
    samples_of,
    samples_of_tree,
    trained_nodes,
    until_secret,
)
from openhands_rl_plugin.training.data.demonstrations import demonstration_reward, is_imported


@dataclass(frozen=True)
class PreferencePair:
    """Two continuations from one state, as training sequences; ``chosen`` is the better one, by what a person ``said``
    or by the rewards."""

    chosen: tuple[Sample, ...]
    rejected: tuple[Sample, ...]
    said: bool = False


def select_for_sft(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], settings: TrainingSettings
) -> tuple[int, ...]:
    """Indices of the episodes for SFT: rewards above ``imitate_above``; for rejection sampling the best of each group.

    Of equally good episodes of a group the shorter ones come first.
    """
    good = [index for index, reward in enumerate(rewards) if reward > settings.imitate_above]
    if settings.algorithm != "rejection-sampling":
        return tuple(good)
    best = sorted(good, key=lambda at: (-rewards[at], _sampled_tokens(trajectories[at]), trajectories[at].id))
    taken: dict[str, int] = {}
    kept: list[int] = []
    for index in best:
        group = trajectories[index].group_id
        taken[group] = taken.get(group, 0) + 1
        if taken[group] <= settings.keep_best:
            kept.append(index)
    return tuple(sorted(kept))


def preference_pairs(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float | None],
    settings: TrainingSettings,
    said: Preferences | None = None,
) -> list[PreferencePair]:
    """The best episode of a group with the worst, the second best with the second worst, and so on while they differ.

    What people ``said`` of two episodes comes first: those two make that pair, of whatever policies and rewards, or
    none where neither is better. With ``tree = "proposals"`` also the best and the worst action that search tried in
    one state of an episode. Raises ``TrainingError`` when a sampled node has no token ids.
    """
    said = said or {}
    groups: dict[str, list[int]] = {}
    judged: dict[int, float] = {}
    for index, (trajectory, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        if reward is not None:
            judged[index] = reward
            groups.setdefault(trajectory.group_id, []).append(index)
    pairs = _said_pairs(trajectories, said)
    for members in groups.values():
        order = sorted(members, key=lambda at: (-judged[at], trajectories[at].id))
        for better, worse in zip(order[: len(order) // 2], reversed(order), strict=False):
            if frozenset((trajectories[better].id, trajectories[worse].id)) in said:
                continue
            if judged[better] - judged[worse] > EQUAL:
                pairs.append(PreferencePair(_path(trajectories[better]), _path(trajectories[worse])))
    if settings.tree == "proposals":
        pairs += [pair for trajectory in trajectories for pair in _sibling_pairs(trajectory)]
    return [pair for pair in pairs if pair.chosen and pair.rejected]


def _said_pairs(trajectories: Sequence[Trajectory], said: Preferences) -> list[PreferencePair]:
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    pairs: list[PreferencePair] = []
    for both, better in said.items():
        if better is not None and both <= by_id.keys():
            (worse,) = both - {better}
            pairs.append(PreferencePair(_path(by_id[better]), _path(by_id[worse]), said=True))
    return pairs


def _sibling_pairs(trajectory: Trajectory) -> Iterator[PreferencePair]:
    siblings: dict[int | None, list[int]] = {}
    recorded = recorded_nodes(trajectory, need_logprobs=False)
    for at, node in enumerate(trajectory.nodes):
        if at in recorded and node.sampled and node.value is not None and node.visits:
            siblings.setdefault(node.parent, []).append(at)
    for members in siblings.values():
        values = {at: trajectory.nodes[at].value or 0.0 for at in members}
        best, worst = max(members, key=values.__getitem__), min(members, key=values.__getitem__)
        if values[best] - values[worst] > EQUAL:
            yield PreferencePair(_action(trajectory, best), _action(trajectory, worst))


def _path(trajectory: Trajectory) -> tuple[Sample, ...]:
    return tuple(samples_of(trajectory, need_logprobs=False))


def _action(trajectory: Trajectory, at: int) -> tuple[Sample, ...]:
    """One action alone, with everything before it as context."""
    return tuple(samples_of_tree(trajectory, {at: 1.0}, need_logprobs=False))[:1]


def _sampled_tokens(trajectory: Trajectory) -> int:
    return sum(len(node.tokens.sampled_ids) for node in trajectory.sampled() if node.tokens is not None)


class ExcludedEpisodes(Frozen):
    """Counts of the stored episodes that are excluded from training, by reason.

    ``held_out``: of an evaluation split (``HELD_OUT_SPLITS``) that is not in the filter; ``other_policy``: sampled from
    another model or another agent's adapter; ``sub_agents``: a sub-agent's that nobody scored, because a reward is made
    for the task of its parent; ``no_reward``: no failure, and no judgement of the outcome;
    ``unjudged``: why, for most of them; ``failed``, and ``failures`` by kind; ``no_tokens``: the token ids (or, for
    reinforcement learning, logprobs) were not recorded; ``unfinished``: ended by a timeout or with the process, so the
    reward is not a result of the policy; ``overlong``: cut short by a limit, where ``overlong`` excludes such episodes;
    ``off_temperature``: sampled greedily, or with a ``top_p``, ``top_k``, ``min_p`` or penalty, so not from the policy
    at a temperature, and ``sampled_by``: how, most of them; ``no_signal``: all rewards of its group are equal, or, for
    SFT, it is not a success or not among the best. These are used: ``shortened`` episodes up to a secret that was taken
    out, ``partial`` ones without the answers before a rewritten history whose token ids were not recorded, and
    ``presumed`` imports of which nobody said how they turned out.
    """

    held_out: int = 0
    other_policy: int = 0
    sub_agents: int = 0
    no_reward: int = 0
    unjudged: str = ""
    failed: int = 0
    failures: dict[str, int] = Field(default_factory=dict)
    no_tokens: int = 0
    unfinished: int = 0
    overlong: int = 0
    off_temperature: int = 0
    sampled_by: str = ""
    no_signal: int = 0
    shortened: int = 0
    partial: int = 0
    presumed: int = 0

    def causes(self) -> list[str]:
        """For each reason how many, why, and what to do about it: ``"3 have no reward (say one: ...)"``."""
        told = [f"{count} {CAUSES[name]}" for name, count in self if name in CAUSES and count]
        if self.no_reward:
            told.insert(0, f"{self.no_reward} {'has' if self.no_reward == 1 else 'have'} no reward ({self.unjudged})")
        return [*told, *(f"{count} failed: {kind}" for kind, count in self.failures.items())]

    def and_unjudged(self, more: int) -> ExcludedEpisodes:
        """The same with so many more without a reward."""
        change = {"no_reward": self.no_reward + more, "unjudged": self.unjudged or UNJUDGED}
        return self.model_copy(update=change) if more else self

    def in_words(self) -> str:
        """The causes in a line; ``"none"`` when nothing was excluded."""
        return ", ".join(self.causes()) or "none"


CAUSES = {
    "held_out": "held out (of evaluation splits: name one with --split)",
    "other_policy": "by other models or adapters (choose with --base-model and --adapter)",
    "sub_agents": "of sub-agents (a reward of the parent's task is none of theirs; say one: openhands-rl score STORE "
    "--id ID --value 1)",
    "no_tokens": "without token ids (serve with `openhands-rl serve`, or vLLM, and record again)",
    "unfinished": "unfinished (a timeout or the end of the process cut them short; give them more time)",
    "overlong": 'overlong (a limit cut them short; overlong = "keep" uses them)',
    "off_temperature": "not sampled from the policy (leave top_p, top_k, min_p and the penalties of [rl.sampling] at "
    "their defaults and the temperature above 0, or imitate them)",
    "shortened": "in part (from the first secret on, which was taken out of text and token ids)",
    "partial": "in part (without answers before a rewritten history that have no token ids)",
    "presumed": "judged by nobody and imitated all the same, as imports are (judge them by openhands-rl score --value; "
    "and take it: --reward human)",
    "no_signal": "without a signal (no attempt at the same task with another reward, or not among the best)",
}


class TrainReport(Frozen):
    """The result of ``RLAgent.train``; ``used`` counts episodes, ``metrics`` are those of the optimiser.

    ``notes``: how the model was computed, what of it was trained and who can serve that, a line each.
    """

    algorithm: AlgorithmName
    adapter: Adapter
    used: int
    excluded: ExcludedEpisodes
    metrics: dict[str, float]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Episodes:
    """Valid episodes of one policy with their rewards, and the counts of the excluded ones so far.

    ``said``: which of two of them people found better. An episode without a reward is here for that alone.
    """

    trajectories: tuple[Trajectory, ...]
    returns: tuple[float | None, ...]
    excluded: ExcludedEpisodes
    said: Preferences = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingDataset:
    """Training sequences with advantages, or preference pairs; ``used``: the number of their episodes.

    For DPO ``samples`` are those of the ``pairs``. ``searched``: how many of the episodes are reinforced as if the
    policy had sampled what a search chose.
    ``untaught``: the sampled tokens that are left out, as a teacher gave them no logprob.
    """

    algorithm: AlgorithmName
    samples: tuple[Sample, ...]
    used: int
    excluded: ExcludedEpisodes
    pairs: tuple[PreferencePair, ...] = ()
    searched: int = 0
    untaught: int = 0

    def as_floats(self) -> dict[str, float]:
        """How many episodes are used, and how many are not for which reason: metrics of a stage of a loop."""
        counts = {name: count for name, count in self.excluded if isinstance(count, int) and count}
        return {f"episodes_{name}": float(count) for name, count in {"used": self.used, **counts}.items()}

    def warnings(self) -> list[str]:
        """What is wrong with the data, and what to do about it, a line each."""
        found: list[str] = []
        if self.untaught:
            found.append(f"{self.untaught:,} sampled tokens are left out: the teacher gave them no logprob")
        if self.searched:
            found.append(
                f"a search chose the answers of {self.searched} of {self.used} episodes, and they are trained as if "
                'the policy had sampled them: train what was sampled with tree = "proposals", or imitate what was '
                'chosen with algorithm = "sft"'
            )
        return found


async def load_episodes(
    storage: TrajectoryStorage,
    where: TrajectoryFilter,
    *,
    base_model: str,
    adapter: str,
    reward: Reward,
    demonstrations: bool = False,
    presume: bool = False,
    unjudged: bool = False,
) -> Episodes:
    """The stored episodes that ``base_model`` sampled, alone or with any version of ``adapter``.

    With ``demonstrations`` also imported ones, whoever sampled them, with the outcome that their record says; with
    ``presume`` those of which nobody said anything count as chosen to be imitated: 1.0; with ``unjudged`` those
    without a reward are there, too. What people said of two of
    them comes with them, and those two also without a reward.
    Episodes of an evaluation split are excluded unless ``where`` names the split. An episode without a score of the
    reward is scored here, unless it is a sub-agent's; the score is not stored. A reward that ``JudgesLabels`` goes by
    the labels as they are now.
    """
    own: list[Trajectory] = []
    known: dict[str, Score | Failure] = {}
    failed: Counter[str] = Counter()
    others = held_out = presumed = 0
    by_labels = isinstance(reward, JudgesLabels)
    async for trajectory, scores in storage.find(where):
        imported, policy = demonstrations and is_imported(trajectory), trajectory.policy
        if where.only_measures(trajectory.task.split):
            held_out += 1
        elif not imported and (policy.base_model != base_model or policy.adapter not in (None, adapter)):
            others += 1
        elif trajectory.failure is not None:
            failed[trajectory.failure.kind.value] += 1
        else:
            own.append(trajectory)
            score = None if by_labels or imported else known_score(reward, trajectory, scores)
            if imported and not by_labels:
                value = demonstration_reward(trajectory, scores, reward.version)
                if value is None and presume and not (scores or sub_agent_of(trajectory.task)):
                    value, presumed = 1.0, presumed + 1
                if value is not None:
                    score = Score(trajectory_id=trajectory.id, reward=value, reward_version=reward.version)
            if score is not None:
                known[trajectory.id] = score
    labels = await labels_of(storage, [trajectory.id for trajectory in own])
    if isinstance(reward, JudgesLabels):
        of: dict[str, list[Label]] = {trajectory.id: [] for trajectory in own}
        for label in labels:
            of.get(label.trajectory_id, []).append(label)
        found = {identity: reward.from_labels(identity, each) for identity, each in of.items()}
        known |= {identity: score for identity, score in found.items() if score and score.reward is not None}
    unscored = [each for each in own if each.id not in known and not sub_agent_of(each.task)]
    outcomes = await judge_all(reward, unscored)
    known |= {each.id: outcome for each, outcome in zip(unscored, outcomes, strict=True)}
    ids = frozenset(each.id for each in own)
    said = {both: better for both, better in preferences(labels).items() if both <= ids}
    named = ids if unjudged else {each for both in said for each in both}
    valid: list[tuple[Trajectory, float | None]] = []
    reasons: Counter[str] = Counter()
    for each in own:  # a sub-agent's that nobody scored is none of these
        outcome = known.get(each.id)
        if isinstance(outcome, Score) and outcome.reward is not None:
            valid.append((each, outcome.reward))
        elif each.id in named:
            valid.append((each, None))
        elif outcome is not None:
            why = outcome.message if isinstance(outcome, Failure) else f"{outcome.reward_version} gave none"
            reasons[why.removeprefix("GraderError: ")] += 1
    return Episodes(
        trajectories=tuple(trajectory for trajectory, _ in valid),
        returns=tuple(value for _, value in valid),
        said=said,
        excluded=ExcludedEpisodes(
            held_out=held_out,
            presumed=presumed,
            other_policy=others,
            sub_agents=len(own) - len(valid) - reasons.total(),
            failed=failed.total(),
            failures=dict(failed),
            no_reward=reasons.total(),
            unjudged=next((why for why, _ in reasons.most_common(1)), ""),
        ),
    )


def build_dataset_or_sft(episodes: Episodes, settings: TrainingSettings | AlgorithmName) -> TrainingDataset:
    """``build_dataset``, or an SFT dataset of the successes where no two episodes of a task can be compared.

    ``settings`` may be the name of an algorithm with default options. Raises ``TrainingError`` when both are empty.
    """
    if not episodes.trajectories:
        raise TrainingError(
            "there is nothing to train on: no valid episodes of this model are stored; "
            + (f"left out: {episodes.excluded.in_words()}" if episodes.excluded.causes() else "call run(...) first")
        )
    chosen = settings if isinstance(settings, TrainingSettings) else TrainingSettings(algorithm=settings)
    dataset = build_dataset(episodes, chosen)
    if not dataset.samples and dataset.excluded.off_temperature and not dataset.excluded.no_signal:
        raise TrainingError(off_temperature_message(dataset.excluded))
    if not dataset.samples and algorithm_of(chosen).kind != "imitation":
        dataset = build_dataset(episodes, chosen.model_copy(update={"algorithm": "sft"}))
    if dataset.samples:
        return dataset
    if dataset.excluded.no_tokens:
        raise TrainingError(NO_TOKENS)
    raise TrainingError(
        f"nothing can be learnt from {len(episodes.trajectories)} episodes: no task has episodes with different "
        f"returns, and none succeeded (return > {chosen.imitate_above:g}); left out: {dataset.excluded.in_words()}. "
        "Collect more with run(..., batch_size=8), or on easier tasks"
    )


NO_TOKENS = (
    "the recorded episodes hold no token ids (and logprobs, to reinforce); use a server that returns them (vLLM 0.10.2 "
    "or newer, or `openhands-rl serve`, and no proxy in between that drops them) and run again"
)


def build_dataset(episodes: Episodes, settings: TrainingSettings, *, regroup: bool = True) -> TrainingDataset:
    """The dataset for the algorithm of ``settings``; it may be empty.

    ``regroup``: compare all episodes of a task and a version, sampled alike, else those of one group.
    """
    usable = _usable(episodes, settings, regroup=regroup)
    trajectories = usable.trajectories
    rewards = [value or 0.0 for value in usable.returns]  # for pairs and a teacher some have none
    pairs: list[PreferencePair] = []
    match algorithm_of(settings).kind:
        case "imitation":
            good = [trajectories[at] for at in select_for_sft(trajectories, rewards, settings)]
            samples = [sample for trajectory in good for sample in samples_of(trajectory, need_logprobs=False)]
        case "preference":
            pairs = preference_pairs(trajectories, usable.returns, settings, usable.said)
            samples = [sample for pair in pairs for sample in (*pair.chosen, *pair.rejected)]
        case "reinforcement":
            samples = credited_samples(trajectories, rewards, settings)
    trained = {sample.trajectory_id for sample in samples}
    used = len(trained)
    as_sampled = algorithm_of(settings).kind == "reinforcement" and settings.tree == "path"
    return TrainingDataset(
        algorithm=settings.algorithm,
        samples=tuple(samples),
        used=used,
        excluded=usable.excluded.model_copy(update={"no_signal": len(trajectories) - used}),
        pairs=tuple(pairs),
        searched=sum(is_searched(each) for each in trajectories if each.id in trained) if as_sampled else 0,
    )


def _usable(episodes: Episodes, settings: TrainingSettings, *, regroup: bool) -> Episodes:
    """The episodes that the algorithm of ``settings`` may use, and counts of the others.

    An episode that timed out after its success is a success: SFT may use it, algorithms that compare may not.
    """
    kind, shortens = algorithm_of(settings).kind, may_be_shortened(settings)
    excluded: Counter[str] = Counter()
    unjudged = 0
    ways: Counter[str] = Counter()
    kept: list[tuple[Trajectory, float | None]] = []
    for trajectory, value in zip(episodes.trajectories, episodes.returns, strict=True):
        short = until_secret(trajectory) if shortens else trajectory
        if value is None and kind != "preference" and algorithm_of(settings).rewarded:
            unjudged += 1  # there for a preference only, which is not what is trained on now
        elif not is_recorded(short, need_logprobs=needs_logprobs(settings)):
            excluded["no_tokens"] += 1
        elif trajectory.stop is StopReason.UNFINISHED or (kind != "imitation" and is_interrupted(trajectory)):
            excluded["unfinished"] += 1
        elif is_overlong(trajectory, settings):
            excluded["overlong"] += 1
        elif kind == "reinforcement" and (how := off_policy_sampling(trajectory)):
            ways[how] += 1
        else:
            excluded["shortened"] += short is not trajectory
            left = len(trained_nodes(short, need_logprobs=needs_logprobs(settings))) < len(short.acted())
            excluded["partial"] += left and short is trajectory
            whole = regrouped(trajectory, kind) if regroup else trajectory
            kept.append((until_secret(whole) if shortens else whole, value))
    return Episodes(
        trajectories=tuple(trajectory for trajectory, _ in kept),
        returns=tuple(value for _, value in kept),
        excluded=episodes.excluded.and_unjudged(unjudged).model_copy(
            update={
                **excluded,
                "off_temperature": ways.total(),
                "sampled_by": next((how for how, _ in ways.most_common(1)), ""),
            }
        ),
        said=episodes.said,
    )


def off_temperature_message(excluded: ExcludedEpisodes) -> str:
    """The error text for a dataset that is empty because of how it was sampled, with the remedy."""
    return (
        f"{excluded.off_temperature} episodes were sampled with {excluded.sampled_by}, which is not the policy's own "
        "distribution at a temperature: roll out again with the defaults of [rl.sampling] (the temperature may be any "
        'above 0), or train on these with algorithm = "dpo", "sft" or "rejection-sampling"'
    )

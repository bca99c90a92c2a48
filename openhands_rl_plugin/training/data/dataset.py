"""The training dataset of ``RLAgent.train`` and ``openhands-rl train``: stored episodes with their advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from openhands_rl_plugin.config.rl import AlgorithmName, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.core.judgements import UNJUDGED, Preferences, preferences
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, TrajectoryFilter, sub_agent_of
from openhands_rl_plugin.core.types import Adapter, Failure, Frozen, Sample, Score, StopReason, Trajectory
from openhands_rl_plugin.rollout.scoring import JudgesLabels, judge_all, known_score
from openhands_rl_plugin.training.algorithms import (
    EQUAL,
    algorithm_of,
    credited_samples,
    is_searched,
    needs_logprobs,
)
from openhands_rl_plugin.training.data.batch import (
    is_failed,
    is_interrupted,
    is_overlong,
    is_recorded,
    off_policy_sampling,
    recorded_nodes,
    regrouped,
    sampled_nodes,
    samples_of,
    samples_of_tree,
    until_secret,
)
from openhands_rl_plugin.training.data.demonstrations import demonstration_reward, is_imported


@dataclass(frozen=True)
class PreferencePair:
    """Two continuations from one state, as training sequences; ``chosen`` is the better one: ``by_people``, or by the
    rewards."""

    chosen: tuple[Sample, ...]
    rejected: tuple[Sample, ...]
    by_people: bool = False


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
    labelled: Preferences | None = None,
) -> list[PreferencePair]:
    """The best episode of a group with the worst, the second best with the second worst, and so on while they differ.

    What people preferred (``labelled``) comes first: those two make that pair, of whatever policies and rewards, or
    none where neither is better. With ``tree = "proposals"`` also the best and the worst action that search tried in
    one state of an episode. Raises ``TrainingError`` when a sampled node has no token ids.
    """
    labelled = labelled or {}
    groups: dict[str, list[int]] = {}
    judged: dict[int, float] = {}
    for index, (trajectory, reward) in enumerate(zip(trajectories, rewards, strict=True)):
        if reward is not None:
            judged[index] = reward
            groups.setdefault(trajectory.group_id, []).append(index)
    pairs = _labelled_pairs(trajectories, labelled)
    for members in groups.values():
        order = sorted(members, key=lambda at: (-judged[at], trajectories[at].id))
        for better, worse in zip(order[: len(order) // 2], reversed(order), strict=False):
            if frozenset((trajectories[better].id, trajectories[worse].id)) in labelled:
                continue
            if judged[better] - judged[worse] > EQUAL:
                pairs.append(PreferencePair(_path(trajectories[better]), _path(trajectories[worse])))
    if settings.tree == "proposals":
        pairs += [pair for trajectory in trajectories for pair in _sibling_pairs(trajectory)]
    return [pair for pair in pairs if pair.chosen and pair.rejected]


def _labelled_pairs(trajectories: Sequence[Trajectory], labelled: Preferences) -> list[PreferencePair]:
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    pairs: list[PreferencePair] = []
    for both, better in labelled.items():
        if better is not None and both <= by_id.keys():
            (worse,) = both - {better}
            pairs.append(PreferencePair(_path(by_id[better]), _path(by_id[worse]), by_people=True))
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


CAUSES = {
    "no_reward": "have no reward",
    "failed": "failed",
    "held_out": "held out (of evaluation splits: name one with --split)",
    "other_policy": "by other models or adapters (choose with --base-model and --adapter)",
    "sub_agents": "of sub-agents (a reward of the parent's task is none of theirs; say one: openhands-rl score STORE "
    "--id ID --value 1)",
    "no_tokens": "without token ids or, to reinforce, logprobs (serve with `openhands-rl serve`, or vLLM, and "
    "record again)",
    "tokenised": "given token ids here, by the chat template of the model",
    "no_template": "without token ids, which the chat template cannot give",
    "unfinished": "unfinished (a timeout or the end of the process cut them short; give them more time)",
    "overlong": 'overlong (a limit cut them short; overlong = "keep" uses them)',
    "off_temperature": "not sampled from the policy (leave top_p, top_k, min_p and the penalties of [rl.sampling] at "
    "their defaults and the temperature above 0, or imitate them)",
    "shortened": "in part (from the first secret on, which was taken out of text and token ids)",
    "presumed": "judged by nobody and imitated all the same, as imports are (judge them by openhands-rl score --value; "
    "and take it: --reward human)",
    "no_hint": "without the hint that [rl.training] hint names",
    "no_signal": "without a signal (no attempt at the same task with another reward, or not among the best)",
}
"""Why stored episodes are left out; of ``shortened`` ones only a part is, of ``presumed``, ``tokenised`` ones nothing.

A key of a count of them may say more behind a colon: ``"failed: model"``.
"""


def causes_of(excluded: Mapping[str, int]) -> list[str]:
    """A text for each cause: the count, the cause and the remedy, as ``"3 have no reward: no report of tests"``."""
    parts = [(count, *name.partition(": ")) for name, count in excluded.items() if count]
    return [f"{count} {CAUSES[cause]}{colon}{more}" for count, cause, colon, more in parts]


def listed(causes: Sequence[str]) -> str:
    """A line for each cause, or ``none``."""
    return "".join(f"\n    {each}" for each in causes) or " none"


def nothing_learnt(settings: TrainingSettings, excluded: Mapping[str, int]) -> str:
    """The error of an empty dataset."""
    algorithm = algorithm_of(settings)
    if algorithm.kind == "imitation":
        why = f"imitate: no episode has a reward above {settings.imitate_above:g}; see training.imitate_above"
    elif not algorithm.rewarded:
        why = "learn from a teacher"
    else:
        why = (
            "compare: no task has episodes of one policy version and strategy with different rewards; "
            'roll out several episodes a task, or imitate the best with algorithm = "rejection-sampling"'
        )
    return f"nothing to {why}; left out: {', '.join(causes_of(excluded)) or 'none'}"


class TrainReport(Frozen):
    """The result of ``RLAgent.train``; ``used`` and ``excluded`` (by cause, see ``CAUSES``) count episodes, ``metrics``
    are those of the optimiser.
    """

    algorithm: AlgorithmName
    adapter: Adapter
    used: int
    excluded: dict[str, int]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Episodes:
    """Valid episodes of one policy with their rewards, and the counts of the excluded ones so far.

    ``labelled``: which of two of them people found better. An episode without a reward is here for that alone.
    """

    trajectories: tuple[Trajectory, ...]
    returns: tuple[float | None, ...]
    excluded: Counter[str] = field(default_factory=Counter)
    labelled: Preferences = field(default_factory=dict)
    base_model: str = ""


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
    excluded: Counter[str] = field(default_factory=Counter)
    pairs: tuple[PreferencePair, ...] = ()
    searched: int = 0
    untaught: int = 0
    base_model: str = ""

    def as_floats(self) -> dict[str, float]:
        """How many episodes are used, and how many are not for which reason: metrics of a stage of a loop."""
        counts = Counter({"used": self.used})
        for name, count in self.excluded.items():
            counts[name.partition(": ")[0]] += count
        return {f"episodes_{name}": float(count) for name, count in counts.items()}

    @property
    def units(self) -> int:
        """How many of what ``batch_size`` counts there are: pairs or episodes."""
        return len(self.pairs) or self.used

    def lines(self) -> list[str]:
        """Counts of used and excluded episodes, for a user."""
        by_people = sum(pair.by_people for pair in self.pairs)
        pairs = [f"pairs: {len(self.pairs)}, {by_people} of them chosen by people"] if self.pairs else []
        warnings = [f"warning: {line}" for line in self.warnings()]
        return [f"episodes: {self.used} used; left out:{listed(causes_of(self.excluded))}", *pairs, *warnings]

    def warnings(self) -> list[str]:
        """Problems of the data with their remedies, a line each."""
        found: list[str] = []
        if self.untaught:
            found.append(f"{self.untaught:,} sampled tokens are left out: the teacher gave them no logprob")
        if self.searched:
            found.append(
                f"a search chose the completions of {self.searched} of {self.used} episodes; they are trained as if "
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
    """The stored episodes that ``base_model`` (empty: the only one) sampled, alone or with any version of ``adapter``.

    With ``demonstrations`` also imported ones of any policy, with the outcome in their record; with
    ``presume`` those without a label count as chosen to be imitated: 1.0; with ``unjudged`` those without a reward
    are there, too, and those that failed of the model. People's preferences between two of them come with them, and
    those two also without a reward.
    Episodes of an evaluation split are excluded unless ``where`` names the split. An episode without a score of the
    reward is scored here, unless it is a sub-agent's; the score is not stored. A reward that ``JudgesLabels`` goes by
    the labels as they are now. Raises ``ConfigError`` for episodes of several base models, ``TrainingError`` for none.
    """
    own: list[Trajectory] = []
    known: dict[str, Score | Failure] = {}
    excluded: Counter[str] = Counter()
    by_labels, models = isinstance(reward, JudgesLabels), Counter[str]()
    async for trajectory, scores in storage.find(where):
        imported, policy = demonstrations and is_imported(trajectory), trajectory.policy
        other = policy.adapter not in (None, adapter) or base_model not in ("", policy.base_model)
        if not (imported or other):
            models[policy.base_model] += 1
        if where.only_measures(trajectory.task.split):
            excluded["held_out"] += 1
        elif other and not imported:
            excluded["other_policy"] += 1
        elif trajectory.failure is not None and is_failed(trajectory, rewarded=not unjudged):
            excluded[f"failed: {trajectory.failure.kind.value}"] += 1
        else:
            own.append(trajectory)
            score = None if by_labels or imported else known_score(reward, trajectory, scores)
            if imported and not by_labels:
                value = demonstration_reward(trajectory, scores, reward.version)
                if value is None and presume and not (scores or sub_agent_of(trajectory.task)):
                    value = 1.0
                    excluded["presumed"] += 1
                if value is not None:
                    score = Score(trajectory_id=trajectory.id, reward=value, reward_version=reward.version)
            if score is not None:
                known[trajectory.id] = score
    if len(models) > 1:
        counts = ", ".join(f"{name} ({count})" for name, count in models.most_common())
        raise ConfigError(f"the episodes are of several base models: {counts}; choose one with --base-model")
    if not (base_model or models or own):
        raise TrainingError(f"no stored episode of {adapter} or a base model matches; see `openhands-rl list`")
    labels = await storage.labels([trajectory.id for trajectory in own])
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
    labelled = {both: better for both, better in preferences(labels).items() if both <= ids}
    named = ids if unjudged else {each for both in labelled for each in both}
    valid: list[tuple[Trajectory, float | None]] = []
    for each in own:
        outcome = known.get(each.id)
        if isinstance(outcome, Score) and outcome.reward is not None:
            valid.append((each, outcome.reward))
        elif each.id in named:
            valid.append((each, None))
        elif outcome is None:
            excluded["sub_agents"] += 1
        else:
            why = outcome.message if isinstance(outcome, Failure) else f"{outcome.reward_version} gave none"
            excluded[f"no_reward: {why.removeprefix('GraderError: ')}"] += 1
    trajectories, returns = zip(*valid, strict=True) if valid else ((), ())
    return Episodes(trajectories, returns, excluded, labelled, base_model or next(iter(models), ""))


def build_dataset(episodes: Episodes, settings: TrainingSettings, *, regroup: bool = True) -> TrainingDataset:
    """The dataset for the algorithm of ``settings``; it may be empty.

    ``regroup``: compare all episodes of a task, a version and a strategy, else those of one group.
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
            pairs = preference_pairs(trajectories, usable.returns, settings, usable.labelled)
            samples = [sample for pair in pairs for sample in (*pair.chosen, *pair.rejected)]
        case "reinforcement":
            samples = credited_samples(trajectories, rewards, settings)
    trained = {sample.trajectory_id for sample in samples}
    used = len(trained)
    algorithm = algorithm_of(settings)
    as_sampled = algorithm.kind == "reinforcement" and algorithm.rewarded and settings.tree == "path"
    return TrainingDataset(
        algorithm=settings.algorithm,
        samples=tuple(samples),
        used=used,
        excluded=usable.excluded + Counter(no_signal=len(trajectories) - used),
        pairs=tuple(pairs),
        searched=sum(is_searched(each) for each in trajectories if each.id in trained) if as_sampled else 0,
        base_model=episodes.base_model,
    )


def _may_be_shortened(settings: TrainingSettings) -> bool:
    """Whether the algorithm gives each answer the weight of its episode, so that one can be left out of the sum.

    Rewards to go need all later steps, and a preference compares whole episodes.
    """
    whole = settings.step_rewards == "episode" and not settings.state_weight
    return whole and algorithm_of(settings).kind != "preference"


def _usable(episodes: Episodes, settings: TrainingSettings, *, regroup: bool) -> Episodes:
    """The episodes that the algorithm of ``settings`` may use, and counts of the others.

    An episode that timed out after its success is a success: SFT may use it, algorithms that compare may not.
    """
    algorithm, shortens = algorithm_of(settings), _may_be_shortened(settings)
    kind = algorithm.kind
    excluded = Counter(episodes.excluded)
    kept: list[tuple[Trajectory, float | None]] = []
    for trajectory, value in zip(episodes.trajectories, episodes.returns, strict=True):
        short = until_secret(trajectory) if shortens else trajectory
        whole = is_recorded(short, need_logprobs=needs_logprobs(settings))
        if value is None and kind != "preference" and algorithm.rewarded:
            excluded[f"no_reward: {UNJUDGED}"] += 1  # there for a preference, which is not what is trained on now
        elif not (whole if algorithm.rewarded else sampled_nodes(short)):
            excluded["no_tokens"] += 1
        elif trajectory.stop is StopReason.UNFINISHED or (kind != "imitation" and is_interrupted(trajectory)):
            excluded["unfinished"] += 1
        elif is_overlong(trajectory, settings):
            excluded["overlong"] += 1
        elif kind == "reinforcement" and (how := off_policy_sampling(trajectory)):
            excluded[f"off_temperature: {how}"] += 1
        else:
            excluded["shortened"] += short is not trajectory
            kept.append((regrouped(short) if regroup else short, value))
    trajectories, returns = zip(*kept, strict=True) if kept else ((), ())
    return Episodes(trajectories, returns, excluded, episodes.labelled)

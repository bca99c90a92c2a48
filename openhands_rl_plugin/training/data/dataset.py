"""The training dataset, why episodes are left out of it, and the choice of those to imitate or to prefer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from openhands_rl_plugin.config.rl import AlgorithmName, TrainingSettings
from openhands_rl_plugin.core.judgements import Preferences, asked_in_common
from openhands_rl_plugin.core.redaction import is_redacted
from openhands_rl_plugin.core.types import Adapter, FailureKind, Frozen, Sample, StopReason, Trajectory
from openhands_rl_plugin.rollout.strategies.search import notes
from openhands_rl_plugin.training.algorithms import EQUAL, algorithm_of, recorded_nodes, samples_of, samples_of_tree


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
    """Valid episodes with their rewards, and the counts of the excluded ones so far.

    ``labelled``: which of two of them people found better. An episode has no reward where people compared it, or where
    a teacher judges.
    """

    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float | None, ...]
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


_INTERRUPTED = frozenset({StopReason.TIMEOUT, StopReason.UNFINISHED})


_LIMIT_REACHED = frozenset({StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS})


def is_interrupted(trajectory: Trajectory) -> bool:
    """Whether a timeout or the end of the process ended the episode, so its reward is not a result of the policy."""
    return trajectory.stop in _INTERRUPTED


def is_failed(trajectory: Trajectory, *, rewarded: bool = True) -> bool:
    """Whether a failure excludes the episode; where no reward is needed, one of the model does not."""
    failure = trajectory.failure
    return failure is not None and (rewarded or failure.kind is not FailureKind.MODEL)


def is_cut_short(trajectory: Trajectory) -> bool:
    """Whether a limit, not the task, ended the episode or truncated its last answer."""
    return _ended_by_limit(trajectory) or trajectory.stop is StopReason.TIMEOUT


def is_overlong(trajectory: Trajectory, settings: TrainingSettings) -> bool:
    """Whether ``overlong`` excludes the episode (DAPO's overlong filtering): a limit ended it or its last answer."""
    return settings.overlong == "leave-out" and _ended_by_limit(trajectory)


def _ended_by_limit(trajectory: Trajectory) -> bool:
    last = next(reversed([*trajectory.sampled()]), None)
    return trajectory.stop in _LIMIT_REACHED or (last is not None and last.finish_reason == "length")


def regrouped(trajectory: Trajectory) -> Trajectory:
    """The episode, with a group id for all episodes of one task, policy version and strategy, across runs.

    A baseline estimates the expected return of one policy on one task.
    """
    key = (*asked_in_common(trajectory.task), trajectory.policy.served_name, trajectory.strategy.name)
    return trajectory.model_copy(update={"group_id": "\0".join(key)})


def is_searched(trajectory: Trajectory) -> bool:
    """Whether an answer that was acted on is one that a search chose from several."""
    nodes = trajectory.nodes
    acted = set(trajectory.acted())
    decided = {nodes[at].parent for at in acted}
    others = (
        node for at, node in enumerate(nodes) if node.sampled and node.parent in decided and at not in acted
    )  # siblings without search data are malformed completions that the host could not execute
    return any(node.visits > 0 or node.value is not None or bool(notes(node)) for node in others)


def until_secret(trajectory: Trajectory) -> Trajectory:
    """The episode up to the last answer before the first one whose token ids were dropped with a secret.

    The same object when there is none, when the ids are missing for another reason, and when nothing comes before.
    """
    nodes, path = trajectory.nodes, trajectory.path()
    own = (at for at in path if nodes[at].sampled)
    cut = next((at for at in own if nodes[at].tokens is None), None)
    if cut is None or not any(is_redacted(nodes[at].message) for at in path if at <= cut):
        return trajectory
    recorded = recorded_nodes(trajectory, need_logprobs=False)
    before = [at for at in trajectory.acted() if at < cut and at in recorded]
    # A parent has a smaller index than its children, so that the tree of those before is whole.
    return trajectory.model_copy(update={"nodes": nodes[:cut], "head": before[-1]}) if before else trajectory

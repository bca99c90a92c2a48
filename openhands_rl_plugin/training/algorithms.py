"""The algorithms by name (advantage estimator, objective, loss aggregation), and the training sequences of recorded
trajectories with the advantage of every sampled token. Recorded ids are used as they are.

An algorithm is an estimator, an objective and weights; everything else is a named option of ``[rl.training]``. Bounds
and weights are those of the papers (see the estimators here and ``losses``) and can be overridden one by one.

An estimator takes the rewards, the group (rollouts of one task) and the number of sampled tokens of each rollout, and
returns advantages in the same order. Where published implementations disagree:

- ``whiten`` divides by the *biased* standard deviation over tokens, with a floor of 1e-8 for the variance (OpenRLHF, by
  the authors of REINFORCE++; verl divides by the unbiased one);
- GRPO's standard deviation is Bessel-corrected, and 1e-6 is added to it (verl; TRL adds 1e-4).

``credited_samples`` says which rewards are compared, and which tokens get the result. By default every sampled token
has the episode's advantage. ``step_rewards`` gives each turn its return to go. ``state_weight`` adds a comparison with
other actions in the same state (GiGPO). ``tree = "proposals"`` trains all proposals of a search, chosen or not.

One difference from OpenRLHF, verl and TRL: every algorithm with groups leaves out a group whose rewards are all equal.
Such a group has no signal, but whitening over tokens would give it advantages other than zero where lengths differ. For
DAPO this is its dynamic sampling (Yu et al. 2025, arXiv 2503.14476) without the resampling.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from openhands_rl_plugin.config.rl import AlgorithmName, TrainingSettings
from openhands_rl_plugin.core.arrays import Floats, Ids, Mask
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, altering_parameters
from openhands_rl_plugin.core.types import TURN, Adapter, Node, Sample, SamplingParams, Trajectory, kind_of
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE, read_adapter_config
from openhands_rl_plugin.models.adapters.store import weights_sha256
from openhands_rl_plugin.rollout.strategies.search import notes, times_merged

VARIANCE_FLOOR, EPSILON = 1e-8, 1e-6
"""The values in OpenRLHF and verl: they avoid a division by zero where all advantages are equal."""


class RolloutBatch(NamedTuple):
    """The rollouts of one batch; each field has one entry per rollout. ``lengths`` are in sampled tokens."""

    rewards: Sequence[float]
    groups: Sequence[int]
    lengths: Sequence[int]


def returns(rollouts: RolloutBatch) -> list[float]:
    """The rewards themselves, without a baseline (REINFORCE, Williams 1992); no groups."""
    return [float(reward) for reward in rollouts.rewards]


def rloo(rollouts: RolloutBatch) -> list[float]:
    """RLOO, the leave-one-out baseline (Ahmadian et al. 2024, arXiv 2402.14740): ``(r - mean) n / (n - 1)``.

    A group of one rollout has no baseline; its advantage is 0.
    """
    return _per_group(rollouts, _leave_one_out)


def grpo(rollouts: RolloutBatch) -> list[float]:
    """GRPO (Shao et al. 2024, arXiv 2402.03300): ``(r - mean) / (std + 1e-6)`` of the group, std with n - 1.

    A group of one rollout has no baseline; its advantage is 0 (in verl, its reward).
    """
    return _per_group(rollouts, _standardise)


def dr_grpo(rollouts: RolloutBatch) -> list[float]:
    """Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): ``r - mean`` of the group, not divided by its deviation."""
    return _per_group(rollouts, centre)


@dataclass(frozen=True)
class Estimator:
    """An algorithm's advantages: a baseline, and whitening over all tokens of the batch if ``whitened``.

    ``grouped``: whether it compares the rollouts of a group.
    """

    baseline: Callable[[RolloutBatch], list[float]]
    grouped: bool = True
    whitened: bool = False

    def __call__(self, rollouts: RolloutBatch) -> list[float]:
        """Advantages of whole rollouts."""
        values = self.baseline(rollouts)
        return whiten(values, rollouts.lengths) if self.whitened else values


ESTIMATORS: Mapping[str, Estimator] = {
    # REINFORCE++ (Hu 2025, arXiv 2501.03262): without groups, and its variant with the group's mean as baseline.
    "reinforce++": Estimator(returns, grouped=False, whitened=True),
    "reinforce++-baseline": Estimator(dr_grpo, whitened=True),
    "rloo": Estimator(rloo),
    "grpo": Estimator(grpo),
    "dr-grpo": Estimator(dr_grpo),
}


def centre(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group minus their mean."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def whiten(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Zero mean and unit variance over tokens, where each of the ``lengths[i]`` tokens has the value ``values[i]``.

    The normalisation of REINFORCE++ (Hu 2025, arXiv 2501.03262).
    """
    tokens = sum(lengths)
    if tokens == 0:
        return list(values)
    mean = sum(value * length for value, length in zip(values, lengths, strict=True)) / tokens
    squares = sum(length * (value - mean) ** 2 for value, length in zip(values, lengths, strict=True))
    scale = 1.0 / math.sqrt(max(squares / tokens, VARIANCE_FLOOR))
    return [(value - mean) * scale for value in values]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    n = len(rewards)
    return [value * n / (n - 1) for value in centre(rewards)] if n > 1 else [0.0]


def _standardise(rewards: Sequence[float]) -> list[float]:
    n = len(rewards)
    if n == 1:
        return [0.0]
    centred = centre(rewards)
    deviation = math.sqrt(sum(value * value for value in centred) / (n - 1))
    return [value / (deviation + EPSILON) for value in centred]


def _per_group(rollouts: RolloutBatch, of_group: Callable[[Sequence[float]], list[float]]) -> list[float]:
    members: dict[int, list[int]] = {}
    for index, group in enumerate(rollouts.groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rollouts.rewards)
    for indices in members.values():
        for index, value in zip(indices, of_group([rollouts.rewards[i] for i in indices]), strict=True):
            advantages[index] = value
    return advantages


Kind = Literal["imitation", "preference", "reinforcement"]
Objective = Literal["ppo", "gspo", "cispo"]
Aggregation = Literal["token", "sequence", "fixed"]
OldLogprobs = Literal["auto", "recorded", "recomputed"]


@dataclass(frozen=True)
class Algorithm:
    """A setting of the trainer's loss: cross-entropy, a policy gradient, or preferences.

    ``low`` and ``high`` are the clip's bounds around a ratio of 1; they, ``objective`` and ``estimator`` are for
    reinforcement only. ``rewarded``: whether rewards are looked at; else a teacher's logprobs alone are.
    """

    kind: Kind
    objective: Objective = "ppo"
    aggregation: Aggregation = "token"
    estimator: Estimator = ESTIMATORS["reinforce++-baseline"]
    rewarded: bool = True
    low: float = 0.2
    high: float = 0.2


_NOTHING = Estimator(lambda rollouts: [0.0] * len(rollouts.rewards), grouped=False)  # nothing is learnt from rewards

ALGORITHMS: Mapping[AlgorithmName, Algorithm] = {
    "sft": Algorithm("imitation"),
    # RAFT, arXiv 2304.06767
    "rejection-sampling": Algorithm("imitation"),
    # arXiv 2501.03262
    "reinforce++": Algorithm("reinforcement", estimator=ESTIMATORS["reinforce++"]),
    # The same, with DAPO's clip-higher: it keeps the entropy up at no cost.
    "reinforce++-baseline": Algorithm("reinforcement", high=0.28),
    # arXiv 2402.14740
    "rloo": Algorithm("reinforcement", estimator=ESTIMATORS["rloo"]),
    # arXiv 2402.03300
    "grpo": Algorithm("reinforcement", aggregation="sequence", estimator=ESTIMATORS["grpo"]),
    # arXiv 2503.20783
    "dr-grpo": Algorithm("reinforcement", aggregation="fixed", estimator=ESTIMATORS["dr-grpo"]),
    # arXiv 2503.14476. Its dynamic filtering (groups without a signal are left out) is done for all algorithms that
    # compare in groups.
    "dapo": Algorithm("reinforcement", estimator=ESTIMATORS["grpo"], high=0.28),
    # arXiv 2507.18071
    "gspo": Algorithm("reinforcement", "gspo", "sequence", ESTIMATORS["grpo"], low=3e-4, high=4e-4),
    # arXiv 2506.13585
    "cispo": Algorithm("reinforcement", "cispo", estimator=ESTIMATORS["grpo"], high=0.28),
    # arXiv 2306.13649
    "opd": Algorithm("reinforcement", estimator=_NOTHING, rewarded=False),
    # arXiv 2602.04942
    "opsd": Algorithm("reinforcement", estimator=_NOTHING, rewarded=False),
    # arXiv 2305.18290
    "dpo": Algorithm("preference"),
}


def digest_of(samples: Sequence[Sample], settings: TrainingSettings, *more: object) -> str:
    """A digest of what the result of a training depends on: sequences, settings and ``more``."""
    asked = settings.model_dump_json(exclude={"checkpoint_steps", "tracker", "sharding"})  # without an effect on it
    digest = hashlib.sha256(f"{asked}{more}".encode())
    for sample in samples:
        digest.update(sample.model_dump_json(exclude={"logprobs", "policy", "teacher_logprobs"}).encode())
    return digest.hexdigest()


def algorithm_of(settings: TrainingSettings) -> Algorithm:
    """The algorithm that the settings name."""
    return ALGORITHMS[settings.algorithm]


def clip_bounds(settings: TrainingSettings) -> tuple[float, float]:
    """How far below and above 1 a ratio may be."""
    algorithm = algorithm_of(settings)
    return settings.clip_low or algorithm.low, settings.clip_high or algorithm.high


def aggregation_of(settings: TrainingSettings) -> Aggregation:
    """The unit with equal weight in an optimiser batch: token, sequence, or a fixed length."""
    return algorithm_of(settings).aggregation if settings.aggregation == "auto" else settings.aggregation


def old_logprobs_of(settings: TrainingSettings) -> OldLogprobs:
    """Which logprobs are the ratio's denominator; "auto" if the choice depends on their measured mismatch.

    An importance correction weighs the recomputed ones against the recorded ones. GSPO's bounds are far below the
    difference of two engines, so that its first on-policy step would be clipped.
    """
    if settings.old_logprobs != "auto":
        return settings.old_logprobs
    chosen = settings.correction != "none" or algorithm_of(settings).objective == "gspo"
    return "recomputed" if chosen else "auto"


def needs_logprobs(settings: TrainingSettings) -> bool:
    """Whether the logprobs of the policy that sampled must have been recorded."""
    return algorithm_of(settings).kind == "reinforcement"


def check_start(adapter: Adapter | None, settings: TrainingSettings) -> None:
    """Raise an error unless ``adapter``, if there is one, is as it was made and fits ``settings``.

    Another LoRA rank, scale or other layers would change the policy before its first step, and no tensor shape would
    show it. A version that is a whole model is continued with ``method = "full"`` only, and an adapter without. Raises
    ``TrainingError``, or ``ConfigError`` for an adapter whose configuration cannot be read.
    """
    if adapter is None:
        return
    path = Path(adapter.path)
    if weights_sha256(path) != adapter.sha256:
        raise TrainingError(f"{adapter.name}: what is in {path} was changed since it was made (sha256 differs)")
    whole = not (path / CONFIG_FILE).exists() and (path / "config.json").exists()
    if whole != (settings.method == "full"):
        kind = "a whole model" if whole else "an adapter"
        raise TrainingError(
            f'{adapter.name} is {kind}, and [rl.training] method = "{settings.method}" does not continue it: set '
            "another method, start from base, or choose another name for the new one ([rl.serving] adapter)"
        )
    if whole:
        return
    made = read_adapter_config(path)
    found: dict[str, object] = {"lora_rank": made.r, "lora_alpha": made.lora_alpha, "lora_variant": made.variant}
    if made.layers is not None:
        found["target_modules"] = sorted(made.layers)
    for name, value in found.items():
        wanted: object = getattr(settings, name)
        wanted = sorted(settings.target_modules) if name == "target_modules" else wanted
        if value != wanted:
            value, wanted = (repr(each).replace("'", '"') for each in (value, wanted))
            raise TrainingError(
                f"{adapter.name} was made with {name} = {value}, and [rl.training] has {wanted}: set {name} = {value} "
                "to continue from it, or start from base"
            )


def turn_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
    groups: Groups,
    settings: TrainingSettings,
    *,
    by_state: bool,
) -> dict[int, NodeAdvantages]:
    """Return to go of every turn relative to other turns of its group: the same turn, or with ``by_state`` those in the
    same state, at whatever step.

    By turn, an episode that had ended by then has nothing left to come: it counts with 0, so that every turn is
    compared with the whole group. A baseline per time step from the other episodes leaves the gradient unbiased
    (Greensmith et al. 2004, JMLR 5: 1471; from the other samples: Kool et al. 2019, "Buy 4 REINFORCE samples, get a
    baseline for free!"). A baseline from those that got so far scales each turn by how many did, and to 0 where one
    did. By state it is the step level of GiGPO (Feng et al. 2025, arXiv 2505.10978): a state is the text that the
    policy received since its last answer, and a turn in a state that occurs only once in the group gets 0. Where the
    algorithm has no groups, the mean of the state is the baseline.
    """
    places: dict[tuple[int, Hashable], int] = {}
    found: list[tuple[int, int | None, int, float]] = []
    for group, members in enumerate(groups):
        longest = max(len(trajectories[index].acted()) for index in members)
        for index in members:
            one, to_go = trajectories[index], returns_to_go(trajectories[index], rewards[index], settings)
            trained = trained_nodes(one)
            ended = [None] * (longest - len(to_go))
            for number, at in enumerate(trained if by_state else (*to_go, *ended)):
                place: Hashable = state_before(one, at) if by_state and at is not None else number
                key = places.setdefault((group, place), len(places))
                found.append((index, at if at in trained else None, key, 0.0 if at is None else to_go[at]))
    estimator = algorithm_of(settings).estimator
    baseline = dr_grpo if by_state and not estimator.grouped else estimator.baseline
    rollouts = RolloutBatch([each[3] for each in found], [each[2] for each in found], [1] * len(found))
    nodes: dict[int, NodeAdvantages] = {}
    for (index, at, *_), value in zip(found, baseline(rollouts), strict=True):
        if at is not None:
            nodes.setdefault(index, {})[at] = value
    return nodes


def sampled_tokens(trajectory: Trajectory, at: int) -> int:
    """How many tokens of node ``at`` were sampled."""
    tokens = trajectory.nodes[at].tokens
    return len(tokens.sampled_ids) if tokens is not None else 0


EQUAL = 1e-9
"""Rewards that differ by at most this much are equal: sums of step rewards, such as 10 x 0.1, have rounding errors."""


Groups = Sequence[Sequence[int]]
"""Indices of the episodes that are compared with each other."""


def groups_with_signal(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], settings: TrainingSettings
) -> Groups:
    """The groups whose rewards differ; a group of one episode is left out too.

    An algorithm without groups compares all episodes with each other: equal rewards of all are no signal.
    """
    groups: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group_id, []).append(index)
    members, chosen = list(groups.values()), algorithm_of(settings)
    if chosen.estimator.grouped:
        return [each for each in members if not _all_equal([rewards[i] for i in each])]
    flat = members and settings.step_rewards == "episode" and _all_equal(rewards)
    return [] if flat else members


def group_advantages(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
    settings: TrainingSettings | None = None,
    *,
    whitened: bool = True,
) -> list[float | None]:
    """Advantages of whole episodes; ``rewards[i]`` is the reward of ``trajectories[i]``; ``None`` without a signal.

    ``whitened=False`` skips the whitening, for callers that add other advantages before it.
    """
    settings = settings or TrainingSettings()
    groups = groups_with_signal(trajectories, rewards, settings)
    order = [(index, number) for number, members in enumerate(groups) for index in members]
    episodes = [trajectories[index] for index, _ in order]
    rollouts = RolloutBatch(
        rewards=[rewards[index] for index, _ in order],
        groups=[number for _, number in order],
        lengths=[sum(sampled_tokens(each, at) for at in trained_nodes(each)) for each in episodes],
    )
    estimator = algorithm_of(settings).estimator
    values = estimator(rollouts) if whitened else estimator.baseline(rollouts)
    advantages: list[float | None] = [None] * len(trajectories)
    for (index, _), advantage in zip(order, values, strict=True):
        advantages[index] = advantage
    return advantages


def _all_equal(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) <= EQUAL


NodeAdvantages = dict[int, float]
"""``node -> advantage`` of one episode."""


def times_sampled(trajectory: Trajectory) -> dict[int, int]:
    """How often the answer of each sampled node was sampled: a search merges equal proposals into one node.

    Only the first one's ids are kept, so that those of others which say the same in other tokens count as that one.
    """
    return {at: 1 + times_merged(notes(node)) for at, node in enumerate(trajectory.nodes) if node.sampled}


def _again(trajectory: Trajectory, nodes: NodeAdvantages) -> dict[int, tuple[int, float]]:
    """How often each of the nodes was sampled after the first time, and its advantage."""
    return {at: (times - 1, nodes[at]) for at, times in times_sampled(trajectory).items() if at in nodes and times > 1}


def returns_to_go(trajectory: Trajectory, reward: float, settings: TrainingSettings) -> dict[int, float]:
    """``node -> return to go`` of the executed completions, in order. What ``reward`` adds to the return comes at the
    end."""
    path, returns, following = trajectory.acted(), list[float](), reward - trajectory.episode_return
    steps = search_rewards(trajectory) if settings.step_rewards == "search" else environment_rewards(trajectory)
    for step in reversed(steps):
        following = step + (settings.discount if returns else 1.0) * following
        returns.append(following)
    return dict(zip(path, reversed(returns), strict=True))


def environment_rewards(trajectory: Trajectory) -> list[float]:
    """The rewards of the executed completions as the environment returned them."""
    return [trajectory.nodes[at].reward or 0.0 for at in trajectory.acted()]


def search_rewards(trajectory: Trajectory) -> list[float]:
    """The rewards of the executed completions as the change of the episode's expected return with each.

    The value of a turn's action is the expected return from that turn on. Added to the rewards so far, it is the
    expected return of the episode. A turn's reward is the change of that sum (potential-based shaping, Ng et al. 1999),
    so the rewards of an episode sum to its return. Turns without a value from search keep the environment's reward.
    """
    given = environment_rewards(trajectory)
    earned = list(accumulate(given, initial=0.0))
    values = (trajectory.nodes[at].value for at in trajectory.acted())
    expected = [a if v is None else b + v for b, a, v in zip(earned, earned[1:], values, strict=False)]
    return [after - before for before, after in pairwise((0.0, *expected[:-1], *earned[-1:]))] if given else []


def state_before(trajectory: Trajectory, at: int) -> tuple[str, ...]:
    """The messages between the policy's last answer and node ``at``: the observation that stands for the state.

    In a fully observable Markov environment equal text means equal state.
    """
    texts: list[str] = []
    before = trajectory.nodes[at].parent
    while before is not None and not trajectory.nodes[before].sampled:
        texts.append(trajectory.nodes[before].message.content or "")
        before = trajectory.nodes[before].parent
    return tuple(reversed(texts))


def credited_samples(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], settings: TrainingSettings
) -> list[Sample]:
    """The training sequences of scored episodes, with advantages, by the algorithm of ``settings``.

    Siblings in a tree are compared also where there is no other episode to compare with. Without rewards all that was
    sampled is trained, also malformed completions. Raises ``TrainingError`` as ``samples_of`` does.
    """
    if not algorithm_of(settings).rewarded:
        own = [dict.fromkeys(sampled_nodes(each), 0.0) for each in trajectories]
        pairs = zip(trajectories, own, strict=True)
        return [s for t, nodes in pairs for s in samples_of_tree(t, nodes, again=_again(t, nodes))]
    if settings.tree == "path" and settings.step_rewards == "episode" and not settings.state_weight:
        whole = group_advantages(trajectories, rewards, settings)
        weighted = [(t, a) for t, a in zip(trajectories, whole, strict=True) if a is not None]
        return [s for t, a in weighted for s in samples_of(t, a)]
    advantages = {index: nodes for index, nodes in _node_advantages(trajectories, rewards, settings).items() if nodes}
    # A search merges equal proposals; those were sampled as often, but never executed.
    merged = settings.tree == "proposals"
    times = {index: times_sampled(trajectories[index]) if merged else {} for index in advantages}
    if algorithm_of(settings).estimator.whitened:
        places = [(index, at) for index, nodes in advantages.items() for at in nodes]
        lengths = [sampled_tokens(trajectories[index], at) * times[index].get(at, 1) for index, at in places]
        whitened = whiten([advantages[index][at] for index, at in places], lengths)
        for (index, at), value in zip(places, whitened, strict=True):
            advantages[index][at] = value
    samples: list[Sample] = []
    for index, nodes in advantages.items():
        again = _again(trajectories[index], nodes) if merged else {}
        samples += samples_of_tree(trajectories[index], nodes, again=again)
    return samples


def _node_advantages(
    trajectories: Sequence[Trajectory], rewards: Sequence[float], settings: TrainingSettings
) -> dict[int, NodeAdvantages]:
    """``trajectory index -> node -> advantage``, before whitening."""
    if settings.tree == "proposals":
        return {index: proposal_advantages(each, settings) for index, each in enumerate(trajectories)}
    groups = groups_with_signal(trajectories, rewards, settings)
    if settings.step_rewards == "episode":
        whole = group_advantages(trajectories, rewards, settings, whitened=False)
        nodes = {
            index: dict.fromkeys(trained_nodes(trajectories[index]), advantage)
            for index, advantage in enumerate(whole)
            if advantage is not None
        }
    else:
        nodes = turn_advantages(trajectories, rewards, groups, settings, by_state=False)
    if settings.state_weight:
        for index, more in turn_advantages(trajectories, rewards, groups, settings, by_state=True).items():
            nodes[index] = {at: nodes[index][at] + settings.state_weight * value for at, value in more.items()}
    return nodes


def proposal_advantages(trajectory: Trajectory, settings: TrainingSettings) -> NodeAdvantages:
    """The advantage of every proposal over the others in its state, by the baseline of the algorithm.

    Proposals that nothing is known about (not judged, or dropped) are left out, and so are states with a single
    proposal or with equal values: they have no signal, and their tokens are not in the mean of the loss either, unlike
    those of whole episodes with an advantage of 0. Where the algorithm has no groups, the mean is the baseline.
    """
    siblings: dict[int | None, list[int]] = {}
    for at, node in enumerate(trajectory.nodes):
        if node.sampled and node.value is not None and kind_of(node) == TURN and "dropped" not in notes(node):
            siblings.setdefault(node.parent, []).append(at)
    estimator = algorithm_of(settings).estimator
    baseline = estimator.baseline if estimator.grouped else dr_grpo
    times = times_sampled(trajectory)
    found: NodeAdvantages = {}
    for members in siblings.values():
        values = [trajectory.nodes[at].value or 0.0 for at in members]
        if max(values) - min(values) <= EQUAL:
            continue
        sampled = [value for at, value in zip(members, values, strict=True) for _ in range(times[at])]
        advantages = baseline(RolloutBatch(sampled, [0] * len(sampled), [1] * len(sampled)))
        first = 0
        for at in members:
            found[at] = advantages[first]
            first += times[at]
    return found


def off_policy_sampling(trajectory: Trajectory) -> str:
    """How an answer that was acted on was sampled, if not from the policy at a temperature; else empty."""
    return next((_in_words(each.sampling) for each in trajectory.sampled() if is_sampled_off_policy(each.sampling)), "")


def is_sampled_off_policy(params: SamplingParams | None) -> bool:
    """Whether an answer was sampled greedily, or not from softmax(logits / temperature)."""
    return params is not None and (params.temperature == 0 or bool(_altering(params)))


def temperature_of(params: SamplingParams | None) -> float:
    """The temperature; one that was not sent is taken to be 1."""
    return 1.0 if params is None or params.temperature is None else params.temperature


def _in_words(params: SamplingParams | None) -> str:
    altering = {} if params is None else _altering(params)
    if temperature_of(params) != 1.0:
        altering = {"temperature": temperature_of(params), **altering}
    return ", ".join(f"{name} = {value:g}" for name, value in altering.items())


def _altering(params: SamplingParams) -> dict[str, float]:
    return altering_parameters({name: getattr(params, name, None) for name in ("top_p", *NEUTRAL_PARAMETERS)})


def samples_of(
    trajectory: Trajectory, advantage: float = 1.0, leaf: int | None = None, *, need_logprobs: bool = True
) -> list[Sample]:
    """The training sequences of one path (default: of all that was acted on), in order.

    Turns are merged as long as every prompt extends the tokens before it; another prompt (a condensed or rewritten
    history) starts a new sequence. Every answer is trained once, also where several sequences have it as context.
    Answers on abandoned paths (the history was rewritten) are skipped unless their tokens were recorded. Raises
    ``TrainingError`` when a sampled node of the path has no tokens, or, with ``need_logprobs`` (for reinforcement
    learning, not for SFT), no logprobs or non-finite ones.
    """
    if leaf is not None:
        return list(_segments(trajectory, leaf, advantage, set(), need_logprobs))
    if trajectory.head is None:
        return []
    acted = set(trained_nodes(trajectory, need_logprobs=need_logprobs))
    others = {at for at, node in enumerate(trajectory.nodes) if node.sampled and at not in acted}
    left = acted - set(trajectory.path())
    ends = [*_leaves(trajectory, left), trajectory.head]
    return [sample for end in ends for sample in _segments(trajectory, end, advantage, others, need_logprobs)]


def trained_nodes(trajectory: Trajectory, *, need_logprobs: bool = True) -> tuple[int, ...]:
    """The completions that were executed, in order; on paths that a rewritten history left, those with recorded tokens.

    A summary that the policy wrote to condense a history is context.
    """
    acted, path = trajectory.acted(), set(trajectory.path())
    if path.issuperset(acted):
        return acted
    recorded = recorded_nodes(trajectory, need_logprobs=need_logprobs)
    return tuple(at for at in acted if at in path or at in recorded)


def sampled_nodes(trajectory: Trajectory) -> tuple[int, ...]:
    """All recorded completions that were sampled from the policy, in order, also malformed ones and other proposals.

    Those are the samples of an algorithm that needs no reward.
    """
    recorded = recorded_nodes(trajectory)
    turns = (at for at, node in enumerate(trajectory.nodes) if node.sampled and kind_of(node) == TURN)
    return tuple(at for at in turns if at in recorded and not is_sampled_off_policy(trajectory.nodes[at].sampling))


def is_recorded(trajectory: Trajectory, *, need_logprobs: bool = True) -> bool:
    """Whether the path to the head has all data that ``samples_of`` needs, and at least one sampled token."""
    own = [trajectory.nodes[at] for at in trajectory.path() if trajectory.nodes[at].sampled]
    return bool(own) and not any(_lacks(node, need_logprobs) for node in own)


def recorded_nodes(trajectory: Trajectory, *, need_logprobs: bool = True) -> frozenset[int]:
    """The nodes that can be trained or be context: they and all nodes before them have what ``samples_of`` needs.

    A branch may have less data than the acted path, because redaction removed possible secrets from it.
    """
    whole: set[int] = set()
    for at, node in enumerate(trajectory.nodes):
        if (node.parent is None or node.parent in whole) and not (node.sampled and _lacks(node, need_logprobs)):
            whole.add(at)
    return frozenset(whole)


def samples_of_tree(
    trajectory: Trajectory,
    advantages: Mapping[int, float],
    *,
    need_logprobs: bool = True,
    again: Mapping[int, tuple[int, float]] | None = None,
) -> list[Sample]:
    """The training sequences of a search tree in which every sampled node has an advantage of its own.

    ``advantages`` is ``node -> advantage``; sampled nodes without one are context only, and nodes of branches that were
    not fully recorded are left out. Every node is trained once, however many leaves are below it. ``again``: how many
    further times a node was sampled, and the advantage of those samples, which get a separate sequence. Raises
    ``TrainingError`` for the path to the head as ``samples_of`` does.
    """
    acted = {up for end in trajectory.ends() for up in trajectory.path(end)}
    path = set(trajectory.path())
    recorded = recorded_nodes(trajectory, need_logprobs=need_logprobs)
    named = {at: value for at, value in advantages.items() if at in path or at in recorded}
    # What was acted on comes first, so that it stays one sequence.
    ends = sorted(_leaves(trajectory, named), key=lambda at: (at not in acted, at))
    context = {at for at, node in enumerate(trajectory.nodes) if node.sampled and at not in named}
    samples: list[Sample] = []
    for leaf in ends:
        samples.extend(_segments(trajectory, leaf, named, context, need_logprobs))
    for at, (count, advantage) in sorted((again or {}).items()):
        if at in recorded:
            others = {other for other, node in enumerate(trajectory.nodes) if node.sampled and other != at}
            found = _segments(trajectory, at, advantage, others, need_logprobs)
            # Their tokens are those of the node itself, which is noted once.
            samples.extend(sample.model_copy(update={"count": count, "spans": ()}) for sample in found)
    return samples


def _leaves(trajectory: Trajectory, nodes: Collection[int]) -> list[int]:
    """The nodes of ``nodes`` without a descendant in ``nodes``, in order."""
    inner = {up for at in nodes for up in trajectory.path(at)[:-1]}
    return sorted(set(nodes) - inner)


class _Span(NamedTuple):
    """The trained tokens ``start:stop`` of a sequence, which were sampled at ``node``."""

    node: int
    start: int
    stop: int
    advantage: float
    temperature: float


def _segments(
    trajectory: Trajectory, leaf: int, advantage: float | Mapping[int, float], context: set[int], need_logprobs: bool
) -> Iterator[Sample]:
    # Ids, and the logprobs at which they were sampled, if they are trained; what is trained once is context after that.
    pieces: list[tuple[Ids, Floats | None]] = []
    spans: list[_Span] = []
    length = 0
    for index in trajectory.path(leaf):
        node = trajectory.nodes[index]
        if not node.sampled:
            continue
        if why := _lacks(node, need_logprobs):
            raise TrainingError(f"trajectory {trajectory.id}, node {index}: {why}")
        tokens = node.tokens
        assert tokens is not None
        if not tokens.extends:
            if spans:
                yield _sample(trajectory, leaf, pieces, spans)
            pieces, spans, length = [], [], 0
        start, own = length + len(tokens.prompt_ids), index not in context
        length = start + len(tokens.sampled_ids)
        pieces += [(tokens.prompt_ids, None), (tokens.sampled_ids, tokens.logprobs if own else None)]
        if own:
            value = advantage[index] if isinstance(advantage, Mapping) else advantage
            spans.append(_Span(index, start, length, value, temperature_of(node.sampling)))
            context.add(index)
    if spans:
        yield _sample(trajectory, leaf, pieces, spans)


def _sample(
    trajectory: Trajectory, leaf: int, pieces: Sequence[tuple[Ids, Floats | None]], spans: Sequence[_Span]
) -> Sample:
    """The sequence up to its last trained token."""
    end = spans[-1].stop
    advantage, token_advantages = _by_token(spans, [span.advantage for span in spans], 0.0)
    temperature, token_temperatures = _by_token(spans, [span.temperature for span in spans], 1.0)
    # Not validated, for speed: the parts come from validated values, and there are tens of thousands of them.
    return Sample.model_construct(
        trajectory_id=trajectory.id,
        leaf=leaf,
        input_ids=Ids(b"".join(ids for ids, _ in pieces))[:end],
        mask=Mask(b"".join(bytes([logprobs is not None]) * len(ids) for ids, logprobs in pieces))[:end],
        logprobs=Floats(b"".join(logprobs or bytes(4 * len(ids)) for ids, logprobs in pieces))[:end],
        advantage=advantage,
        token_advantages=token_advantages,
        policy=next((policy for span in spans if (policy := trajectory.nodes[span.node].policy)), None),
        temperature=temperature,
        token_temperatures=token_temperatures,
        spans=tuple(span[:3] for span in spans),
    )


def _by_token(spans: Sequence[_Span], values: Sequence[float], elsewhere: float) -> tuple[float, Floats]:
    """The value that all spans have, or 1.0 and one for each token."""
    if len({*values}) == 1:
        return values[0], Floats()
    found = [elsewhere] * spans[-1].stop
    for span, value in zip(spans, values, strict=True):
        found[span.start : span.stop] = [value] * (span.stop - span.start)
    return 1.0, Floats(found)


def _lacks(node: Node, need_logprobs: bool) -> str:
    """Why a sampled node cannot be trained; empty where it can."""
    tokens = node.tokens
    if tokens is None or not tokens.sampled_ids:
        return (
            "no token ids were recorded; use a server that returns them (vLLM or `openhands-rl serve`, "
            "return_token_ids) and roll out again"
        )
    if need_logprobs and len(tokens.logprobs) != len(tokens.sampled_ids):
        return (
            f"{len(tokens.logprobs)} logprobs for {len(tokens.sampled_ids)} sampled tokens; reinforcement learning "
            'needs all of them: use a server that returns logprobs, or train with algorithm = "sft"'
        )
    # A sum is fast, and finite only if all values are (unless it overflows).
    if need_logprobs and not math.isfinite(sum(tokens.logprobs)) and not all(map(math.isfinite, tokens.logprobs)):
        return "a recorded logprob is not finite; drop this trajectory or check the server"
    return ""

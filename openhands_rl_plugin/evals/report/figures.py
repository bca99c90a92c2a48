"""The metrics of an evaluation (pass@1, pass@k, tokens, cost, time), comparisons, their tables."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from operator import mul
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.statistics import Estimate, over_tasks, paired_difference, pass_at_k, sign_greater
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.runs.outcome import Outcome, count_kinds
from openhands_rl_plugin.evals.runs.run_files import RunRecord, json_object


def labels_of(runs: Sequence[RunRecord]) -> list[str]:
    """A label for one run of each group, all different: agent and strategy, else its name, else its folder."""
    ways = [[_agent(run) for run in runs], [run.name for run in runs]]
    return next(
        (labels for labels in ways if len({*labels}) == len(runs) > 1),
        ways[1] if len(runs) == 1 else [str(run.directory) for run in runs],
    )


def _agent(run: RunRecord) -> str:
    """``RLAgent, BestOfN {"n": 4}``."""
    details = json_object(run.metadata.get("details"))
    options = details.get("strategy_options")
    strategy = " ".join(filter(None, (str(details.get("strategy") or ""), json.dumps(options) if options else "")))
    return ", ".join(filter(None, (str(run.metadata.get("agent_class") or run.directory.parent.name), strategy)))


_MOST_K = 64


class AtK(Frozen):
    """A metric of ``k`` attempts, over the tasks with at least ``k`` attempts."""

    k: int
    estimate: Estimate


class EvaluationFigures(Frozen):
    """The metrics of a group of runs with the same data, agent, model and note; ``label``: what others differ in.

    ``pass_at_1`` is the mean over tasks of the share of attempts that solved them. ``kinds`` counts all attempts; those
    with unknown outcomes are excluded from success rates. ``flagged`` counts attempts whose patch or run a guard
    flagged. ``runs``: each one's index, and its attempts that are known and that resolved their task. Tokens and
    ``cost`` are sums, ``turns`` and ``reward`` means, ``seconds`` the median of episodes.
    """

    name: str
    label: str
    agent: str
    model: str
    dataset: str
    split: str
    tasks: int
    attempts: int
    kinds: dict[str, int]
    runs: tuple[dict[str, int], ...]
    pass_at_1: Estimate
    pass_at_k: tuple[AtK, ...]
    reward: float | None
    flagged: int
    turns: float | None
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    seconds: float


def figures_of(runs: Sequence[RunRecord]) -> tuple[EvaluationFigures, ...]:
    """Figures of every group of runs, in order of first appearance."""
    groups = grouped(runs)
    labels = labels_of([members[0] for members in groups])
    return tuple(_group(members, label) for members, label in zip(groups, labels, strict=True))


def grouped(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """The runs of each group: their folders differ in the number only."""
    groups: dict[str, list[RunRecord]] = defaultdict(list)
    for run in runs:
        groups[str(run.directory.with_name(run.name))].append(run)
    return [*groups.values()]


def _attempts(outcomes: Iterable[Outcome]) -> dict[str, list[bool]]:
    """Task -> whether each attempt with a known outcome solved it."""
    tasks: dict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.resolved is not None:
            tasks[outcome.instance_id].append(outcome.resolved)
    return tasks


def _group(runs: Sequence[RunRecord], label: str) -> EvaluationFigures:
    outcomes, metadata = [outcome for run in runs for outcome in run.outcomes], runs[0].metadata
    tasks = _attempts(outcomes)
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    costs = [outcome.cost for outcome in outcomes if outcome.cost is not None]
    return EvaluationFigures(
        name=runs[0].name,
        label=label,
        agent=str(metadata.get("agent_class") or ""),
        model=str(json_object(metadata.get("llm_config")).get("model") or ""),
        dataset=str(metadata.get("dataset") or ""),
        split=str(metadata.get("data_split") or ""),
        tasks=len({outcome.instance_id for outcome in outcomes}),
        attempts=len(outcomes),
        kinds=count_kinds(outcomes),
        runs=tuple(_counts(run) for run in runs),
        pass_at_1=over_tasks([sum(own) / len(own) for own in tasks.values()]),
        pass_at_k=_pass_at_k([*tasks.values()]),
        reward=statistics.fmean(rewards) if rewards else None,
        flagged=sum(bool(outcome.flags) for outcome in outcomes),
        turns=statistics.fmean(outcome.turns for outcome in outcomes) if outcomes else None,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
        completion_tokens=sum(outcome.completion_tokens for outcome in outcomes),
        cost=math.fsum(costs) if costs else None,
        seconds=statistics.median([outcome.seconds for outcome in outcomes if outcome.seconds] or [0.0]),
    )


def _counts(run: RunRecord) -> dict[str, int]:
    known = [each.resolved for each in run.outcomes if each.resolved is not None]
    return {"index": run.index, "resolved": sum(known), "known": len(known)}


def _pass_at_k(tasks: Sequence[Sequence[bool]]) -> tuple[AtK, ...]:
    """For 1 to the number of attempts that at least half of the tasks have: a larger k would be measured on others."""
    most = min(_MOST_K, statistics.median_low(map(len, tasks))) if tasks else 0
    return tuple(
        AtK(k=k, estimate=over_tasks([pass_at_k(len(own), sum(own), k) for own in tasks if len(own) >= k]))
        for k in range(1, most + 1)
    )


_ROUNDS = 10_000
_EXACT_UP_TO = 14
_ROUNDING = 1e-12


class Comparison(Frozen):
    """``second`` against ``first``, named by what differs, over the ``tasks`` with known outcomes in both.

    ``difference`` is that of the mean success rates, its interval a bootstrap over tasks. ``p_value`` is two-sided, by
    ``test``: McNemar's exact one where every task has one attempt on either side, else a permutation of the signs of
    the tasks' differences. ``gained`` and ``lost`` are the tasks that the second solves more often, or less.
    """

    first: str
    second: str
    tasks: int
    only_first: int
    only_second: int
    rate_first: float
    rate_second: float
    difference: Estimate
    p_value: float
    test: str
    gained: tuple[str, ...]
    lost: tuple[str, ...]


def compare(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> Comparison:
    """The comparison of two groups of runs. Raises ``ConfigError`` when they share no task."""
    sides = [_attempts(outcome for run in runs for outcome in run.outcomes) for runs in (first, second)]
    shared = sorted(sides[0].keys() & sides[1].keys())
    if not shared:
        raise ConfigError("the two have no graded task in common: compare runs over the same data set")
    before, after = ([statistics.fmean(own[name]) for name in shared] for own in sides)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    single = all(rate in (0.0, 1.0) for rate in (*before, *after)) and len(first) == len(second) == 1
    gained = tuple(name for name, change in zip(shared, differences, strict=True) if change > _ROUNDING)
    lost = tuple(name for name, change in zip(shared, differences, strict=True) if change < -_ROUNDING)
    named = labels_of([first[0], second[0]])
    return Comparison(
        first=named[0],
        second=named[1],
        tasks=len(shared),
        only_first=len(sides[0]) - len(shared),
        only_second=len(sides[1]) - len(shared),
        rate_first=math.fsum(before) / len(shared),
        rate_second=math.fsum(after) / len(shared),
        difference=paired_difference(before, after),
        p_value=mcnemar(len(gained), len(lost)) if single else sign_permutation(differences),
        test="exact McNemar" if single else "paired permutation",
        gained=gained,
        lost=lost,
    )


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value of McNemar's test: tasks that only one side solves, as tosses of a fair coin."""
    return min(1.0, 2 * sign_greater(max(gained, lost), min(gained, lost)))


def sign_permutation(differences: Sequence[float]) -> float:
    """The two-sided p-value of a sign permutation test on the mean of paired differences.

    Every assignment of signs is tried for up to 14 differences that are not zero, else 10,000 seeded ones.
    """
    moved = [each for each in differences if abs(each) > _ROUNDING]
    observed = abs(math.fsum(moved)) - _ROUNDING
    exact, generator = len(moved) <= _EXACT_UP_TO, random.Random(0)
    drawn = (generator.choices((-1, 1), k=len(moved)) for _ in range(_ROUNDS))
    signs = [*product((-1, 1), repeat=len(moved))] if exact else [*drawn]
    extreme = sum(abs(math.fsum(map(mul, moved, each))) >= observed for each in signs)
    # The observed assignment is one of those drawn, so that no p-value is zero.
    return (extreme + (not exact)) / (len(signs) + (not exact))


def rows_of(group: EvaluationFigures) -> tuple[tuple[str, str], ...]:
    """The table of a group: what is measured, and how it was made."""
    last = group.pass_at_k[-1] if len(group.pass_at_k) > 1 else None
    return (
        ("runs", group.label),
        ("tasks", str(group.tasks)),
        ("attempts", str(group.attempts)),
        ("pass@1", _number(group.pass_at_1.mean)),
        ("95% interval", f"{group.pass_at_1.low:.3f} to {group.pass_at_1.high:.3f}" if group.pass_at_1.n else "-"),
        ("pass@k", f"{_number(last.estimate.mean)} (k={last.k})" if last else "-"),
        ("reward", _number(group.reward)),
        ("flagged", str(group.flagged)),
        ("turns", f"{group.turns:.1f}" if group.turns else "-"),
        ("prompt tokens", f"{group.prompt_tokens:,}" if group.prompt_tokens else "-"),
        ("sampled tokens", f"{group.completion_tokens:,}" if group.completion_tokens else "-"),
        ("cost", "-" if group.cost is None else f"{group.cost:,.2f}"),
        ("seconds", f"{group.seconds:.1f}"),
        ("outcomes", ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in group.kinds.items() if count)),
        ("agent", group.agent),
        ("model", group.model),
        ("data", "-".join(filter(None, (group.dataset, group.split)))),
    )


def comparison_rows(comparison: Comparison) -> tuple[tuple[str, str], ...]:
    """The comparison, a line each."""
    change, alone = comparison.difference, f"{comparison.only_first} and {comparison.only_second} of one alone left out"
    gained, lost = comparison.gained, comparison.lost
    return (
        ("first", comparison.first),
        ("second", comparison.second),
        ("tasks of both", f"{comparison.tasks} ({alone})"),
        ("pass@1 of the first", _number(comparison.rate_first)),
        ("pass@1 of the second", _number(comparison.rate_second)),
        ("difference", f"{change.mean:+.3f}, 95% interval {change.low:+.3f} to {change.high:+.3f}"),
        ("p-value", f"{comparison.p_value:.4g} ({comparison.test}, two-sided)"),
        ("solved more often", f"{len(gained)}: {', '.join(gained[:10])}{', ...' if len(gained) > 10 else ''}"),
        ("solved less often", f"{len(lost)}: {', '.join(lost[:10])}{', ...' if len(lost) > 10 else ''}"),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


class EvaluationReport(Frozen):
    """The content of ``report.json``."""

    version: int = 1
    groups: tuple[EvaluationFigures, ...]
    comparison: Comparison | None = None


def write_json_report(folder: Path, groups: Sequence[EvaluationFigures], comparison: Comparison | None = None) -> None:
    """Write it into ``folder``, which is made. Raises ``StorageError``."""
    report = EvaluationReport(groups=tuple(groups), comparison=comparison)
    write_file(folder / "report.json", report.model_dump_json(indent=1) + "\n", PRIVATE, parents=True)

"""The metrics of an evaluation (pass@1, pass@k, best@k, failures, tokens, cost, time), comparisons, their tables."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.statistics import (
    Estimate,
    best_at_k,
    over_tasks,
    paired_difference,
    pass_at_k,
    sign_greater,
)
from openhands_rl_plugin.core.types import Frozen, JsonObject
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
_LONGEST = 2000


class Share(Frozen):
    """A fraction ``count`` of ``of``."""

    count: int
    of: int

    @property
    def value(self) -> float | None:
        """The fraction; ``None`` for 0 of 0."""
        return self.count / self.of if self.of else None


class RunFigures(Frozen):
    """One run of a group: attempts whose outcome is known, and those that solved their task."""

    index: int
    resolved: int
    known: int


class AtK(Frozen):
    """A metric of ``k`` attempts, over the tasks with at least ``k`` attempts."""

    k: int
    estimate: Estimate


class EvaluationFigures(Frozen):
    """The metrics of a group of runs with the same data, agent, model and note; ``label``: what others differ in.

    ``pass_at_1`` is the mean over tasks of the share of attempts that solved them. ``kinds`` counts all attempts; those
    with unknown outcomes are excluded from success rates. ``flagged``: attempts whose patch or run a guard flagged;
    ``commands_flagged``: those that searched for the solution elsewhere. ``malformed`` is a share of the model's
    answers, the other rates are shares of the attempts. Tokens and ``cost`` are sums, ``turns`` a mean, ``seconds`` the
    median of episodes. ``in_force``: the limits and the criterion of success; ``started``: date and time of
    the first run.
    """

    name: str
    label: str = ""
    agent: str = ""
    model: str = ""
    dataset: str = ""
    split: str = ""
    in_force: str = ""
    started: str = ""
    seed: int | None = None
    machine: str = ""
    command: str = ""
    tasks: int
    attempts: int
    kinds: dict[str, int]
    runs: tuple[RunFigures, ...]
    pass_at_1: Estimate
    pass_at_k: tuple[AtK, ...]
    best_at_k: tuple[AtK, ...]
    reward: float | None
    stuck: Share
    empty_patch: Share
    timed_out: Share
    malformed: Share
    flagged: Share
    commands_flagged: Share
    turns: float | None
    prompt_tokens: int
    cached_tokens: int
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


def attempts_by_task(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """The attempts with known outcomes, by task."""
    tasks: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.resolved is not None:
            tasks[outcome.instance_id].append(outcome)
    return dict(tasks)


def success_rates(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """The share of a task's attempts that solved it, for every task with known outcomes."""
    tasks = attempts_by_task(outcomes)
    return {name: sum(bool(each.resolved) for each in own) / len(own) for name, own in tasks.items()}


def _group(runs: Sequence[RunRecord], label: str) -> EvaluationFigures:
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    metadata = runs[0].metadata
    details, llm = json_object(metadata.get("details")), metadata.get("llm_config")
    tasks = attempts_by_task(outcomes)
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    costs = [outcome.cost for outcome in outcomes if outcome.cost is not None]
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds]
    return EvaluationFigures(
        name=runs[0].name,
        label=label,
        agent=str(metadata.get("agent_class") or ""),
        model=str(llm.get("model") or "") if isinstance(llm, dict) else "",
        dataset=str(metadata.get("dataset") or ""),
        split=str(metadata.get("data_split") or ""),
        in_force=_in_force(metadata),
        started=_text(metadata.get("start_time")),
        seed=seed if isinstance(seed := details.get("seed"), int) else None,
        machine=_text(details.get("machine")),
        command=_text(details.get("command")),
        tasks=len({outcome.instance_id for outcome in outcomes}),
        attempts=len(outcomes),
        kinds=count_kinds(outcomes),
        runs=tuple(_run(run) for run in runs),
        pass_at_1=over_tasks([*success_rates(outcomes).values()]),
        pass_at_k=_pass_at_k(tasks),
        best_at_k=_best_at_k(tasks),
        reward=math.fsum(rewards) / len(rewards) if rewards else None,
        stuck=_share(outcome.stuck for outcome in outcomes),
        empty_patch=_share(outcome.empty_patch for outcome in outcomes),
        timed_out=_share(outcome.timed_out for outcome in outcomes),
        malformed=Share(
            count=sum(outcome.malformed for outcome in outcomes), of=sum(outcome.answers for outcome in outcomes)
        ),
        flagged=_share(bool(outcome.flags) for outcome in outcomes),
        commands_flagged=_share(outcome.commands_flagged > 0 for outcome in outcomes),
        turns=math.fsum(outcome.turns for outcome in outcomes) / len(outcomes) if outcomes else None,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
        cached_tokens=sum(outcome.cached_tokens for outcome in outcomes),
        completion_tokens=sum(outcome.completion_tokens for outcome in outcomes),
        cost=math.fsum(costs) if costs else None,
        seconds=statistics.median(seconds) if seconds else 0.0,
    )


def _text(value: JsonValue) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""


def _in_force(metadata: JsonObject) -> str:
    """The limits and the criterion of success that a run was made with; empty for runs that do not say them."""
    details = json_object(metadata.get("details"))
    limits = details.get("limits")
    if not isinstance(limits, dict):
        return ""
    parts = [f"{name.removeprefix('max_').replace('_', ' ')} {value}" for name, value in limits.items() if value]
    return ", ".join([*parts, f"workers {details.get('workers')}", f"resolved by {details.get('success')}"])


def _run(run: RunRecord) -> RunFigures:
    known = [outcome for outcome in run.outcomes if outcome.resolved is not None]
    return RunFigures(index=run.index, resolved=sum(bool(each.resolved) for each in known), known=len(known))


def _pass_at_k(tasks: dict[str, list[Outcome]]) -> tuple[AtK, ...]:
    counts = [(len(own), sum(bool(each.resolved) for each in own)) for own in tasks.values()]
    return _at_k(counts, lambda task: task[0], lambda task, k: pass_at_k(*task, k))


def _best_at_k(tasks: dict[str, list[Outcome]]) -> tuple[AtK, ...]:
    """Best@k over the attempts with a verifier score; empty without any."""
    scored = [[each for each in own if each.verifier is not None] for own in tasks.values()]

    def best(own: list[Outcome], k: int) -> float:
        return best_at_k([each.verifier or 0.0 for each in own], [float(bool(each.resolved)) for each in own], k)

    return _at_k(scored, len, best)


def _at_k[T](tasks: Sequence[T], count: Callable[[T], int], value: Callable[[T, int], float]) -> tuple[AtK, ...]:
    """The metric for 1 to the number of attempts that at least half of the tasks have: a larger k would be measured on
    other tasks.
    """
    most = min(_MOST_K, statistics.median_low(map(count, tasks))) if tasks else 0
    estimates = (over_tasks([value(task, k) for task in tasks if count(task) >= k]) for k in range(1, most + 1))
    return tuple(AtK(k=k, estimate=estimate) for k, estimate in enumerate(estimates, 1))


def _share(found: Iterable[bool]) -> Share:
    members = list(found)
    return Share(count=sum(members), of=len(members))


MCNEMAR, PERMUTATION = "exact McNemar", "paired permutation"

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
    rates = [success_rates(outcome for run in runs for outcome in run.outcomes) for runs in (first, second)]
    shared = sorted(rates[0].keys() & rates[1].keys())
    if not shared:
        raise ConfigError("the two have no graded task in common: compare runs over the same data set")
    before, after = ([own[name] for name in shared] for own in rates)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    single = all(rate in (0.0, 1.0) for rate in (*before, *after)) and len(first) == len(second) == 1
    gained = tuple(name for name, change in zip(shared, differences, strict=True) if change > _ROUNDING)
    lost = tuple(name for name, change in zip(shared, differences, strict=True) if change < -_ROUNDING)
    named = labels_of([first[0], second[0]])
    return Comparison(
        first=named[0],
        second=named[1],
        tasks=len(shared),
        only_first=len(rates[0]) - len(shared),
        only_second=len(rates[1]) - len(shared),
        rate_first=math.fsum(before) / len(shared),
        rate_second=math.fsum(after) / len(shared),
        difference=paired_difference(before, after),
        p_value=mcnemar(len(gained), len(lost)) if single else sign_permutation(differences),
        test=MCNEMAR if single else PERMUTATION,
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
    if not moved:
        return 1.0
    if len(moved) <= _EXACT_UP_TO:
        signs = ([1 if at >> bit & 1 else -1 for bit in range(len(moved))] for at in range(2 ** len(moved)))
        extreme = [_sum(moved, each) >= observed for each in signs]
        return sum(extreme) / len(extreme)
    generator = random.Random(0)
    extreme = [_sum(moved, generator.choices((-1, 1), k=len(moved))) >= observed for _ in range(_ROUNDS)]
    # The observed assignment is one of them, so that no p-value is zero.
    return (sum(extreme) + 1) / (_ROUNDS + 1)


def _sum(differences: Sequence[float], signs: Sequence[int]) -> float:
    return abs(math.fsum(each * sign for each, sign in zip(differences, signs, strict=True)))


def rows_of(group: EvaluationFigures) -> tuple[tuple[str, str], ...]:
    """The table of a group: what is measured, and how it was made."""

    def last(found: tuple[AtK, ...], least: int) -> str:
        return f"{number(found[-1].estimate.mean)} (k={found[-1].k})" if len(found) >= least else "-"

    return (
        ("runs", group.label),
        ("tasks", str(group.tasks)),
        ("attempts", str(group.attempts)),
        ("pass@1", number(group.pass_at_1.mean)),
        ("95% interval", interval(group.pass_at_1)),
        ("pass@k", last(group.pass_at_k, 2)),
        ("best@k", last(group.best_at_k, 1)),
        ("reward", number(group.reward)),
        ("stuck", rate(group.stuck)),
        ("empty patch", rate(group.empty_patch)),
        ("timed out", rate(group.timed_out)),
        ("malformed", rate(group.malformed)),
        ("flagged", rate(group.flagged)),
        ("commands flagged", rate(group.commands_flagged)),
        ("turns", "-" if group.turns is None else f"{group.turns:.1f}"),
        ("prompt tokens", f"{group.prompt_tokens:,}"),
        ("sampled tokens", f"{group.completion_tokens:,}"),
        ("cost", "-" if group.cost is None else f"{group.cost:,.2f}"),
        ("seconds", f"{group.seconds:.1f}"),
        ("outcomes", ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in group.kinds.items() if count)),
        ("agent", group.agent),
        ("model", group.model),
        ("data", "-".join(filter(None, (group.dataset, group.split)))),
        ("began", group.started),
        ("seed", "" if group.seed is None else str(group.seed)),
        ("in force", group.in_force or "not recorded"),
        ("machine", group.machine),
        ("command", group.command),
    )


def comparison_rows(comparison: Comparison) -> tuple[tuple[str, str], ...]:
    """The comparison, a line each."""
    change, alone = comparison.difference, f"{comparison.only_first} and {comparison.only_second} of one alone left out"
    gained, lost = comparison.gained, comparison.lost
    return (
        ("first", comparison.first),
        ("second", comparison.second),
        ("tasks of both", f"{comparison.tasks} ({alone})"),
        ("pass@1 of the first", number(comparison.rate_first)),
        ("pass@1 of the second", number(comparison.rate_second)),
        ("difference", f"{change.mean:+.3f}, 95% interval {change.low:+.3f} to {change.high:+.3f}"),
        ("p-value", f"{comparison.p_value:.4g} ({comparison.test}, two-sided)"),
        ("solved more often", f"{len(gained)}: {', '.join(gained[:10])}{', ...' if len(gained) > 10 else ''}"),
        ("solved less often", f"{len(lost)}: {', '.join(lost[:10])}{', ...' if len(lost) > 10 else ''}"),
    )


def rate(found: Share) -> str:
    """A share in per cent; ``-`` of nothing."""
    return f"{100 * found.count / found.of:.1f} %" if found.of else "-"


def interval(estimate: Estimate) -> str:
    """The bounds of an estimate; ``-`` without data."""
    return f"{estimate.low:.3f} to {estimate.high:.3f}" if estimate.n else "-"


def number(value: float | None) -> str:
    """Three decimals; ``-`` for nothing."""
    return "-" if value is None else f"{value:.3f}"


JSON = "report.json"


class EvaluationReport(Frozen):
    """The content of ``report.json``."""

    version: int = 1
    groups: tuple[EvaluationFigures, ...]
    comparison: Comparison | None = None


def write_json_report(folder: Path, groups: Sequence[EvaluationFigures], comparison: Comparison | None = None) -> None:
    """Write it into ``folder``, which is made. Raises ``StorageError``."""
    report = EvaluationReport(groups=tuple(groups), comparison=comparison)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made: {error.strerror}") from error
    write_file(folder / JSON, report.model_dump_json(indent=1) + "\n", PRIVATE)

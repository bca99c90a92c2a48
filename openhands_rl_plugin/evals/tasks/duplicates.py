"""Tasks that are the same task twice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.lineage import TaskLineage

SAME_STATEMENT = 0.9
"""Of the runs of five words in two statements, the share that both have."""
_RUN = 5


def duplicates(instances: Sequence[Instance], lineage: Mapping[str, TaskLineage]) -> dict[str, str]:
    """Task -> the earlier one that it repeats: the same function, the same failing tests, or almost the same words."""
    found: dict[str, str] = {}
    by_repo: dict[str, list[tuple[Instance, frozenset[str]]]] = {}
    for instance in instances:
        words = _runs(instance.problem_statement)
        earlier = by_repo.setdefault(instance.repo, [])
        for other, their_words in earlier:
            if _same(instance, other, lineage) or _overlap(words, their_words) >= SAME_STATEMENT:
                found[instance.instance_id] = other.instance_id
                break
        earlier.append((instance, words))
    return found


def _same(one: Instance, other: Instance, lineage: Mapping[str, TaskLineage]) -> bool:
    if one.patch == other.patch or set(one.fail_to_pass) == set(other.fail_to_pass):
        return True
    mine, theirs = lineage.get(one.instance_id), lineage.get(other.instance_id)
    if mine is None or theirs is None or not mine.function:
        return False
    return (mine.source, mine.path, mine.function) == (theirs.source, theirs.path, theirs.function)


def _runs(text: str) -> frozenset[str]:
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return frozenset(" ".join(words[at : at + _RUN]) for at in range(max(1, len(words) - _RUN + 1)))


def _overlap(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / max(1, len(one | other))

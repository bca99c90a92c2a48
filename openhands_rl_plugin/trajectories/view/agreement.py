"""How far the people who labelled the same episodes agree."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

from openhands_rl_plugin.core.judgements import verdicts
from openhands_rl_plugin.core.records import Label
from openhands_rl_plugin.core.types import Frozen


class PairAgreement(Frozen):
    """Two labellers: how many ``episodes`` both judged, on how many they ``agree``, and ``cohens_kappa`` of these."""

    first: str
    second: str
    episodes: int
    agree: int
    kappa: float | None


class Dispute(Frozen):
    """An episode whose labellers contradict each other; ``said``: labeller -> verdict."""

    trajectory_id: str
    said: dict[str, float]


class Agreement(Frozen):
    """``labellers``: name -> episodes that they judged; ``episodes``: judged by more than one of them; ``agree``: so
    many of those in the same way by all; ``disputed``: the others."""

    labellers: dict[str, int]
    episodes: int
    agree: int
    pairs: tuple[PairAgreement, ...]
    disputed: tuple[Dispute, ...]

    @property
    def share(self) -> float | None:
        """Of the episodes that more than one person judged, those on which all agree."""
        return self.agree / self.episodes if self.episodes else None

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa of two labellers; of more the mean over all pairs (Light 1971, "Measures of response agreement
        for qualitative data", Psychological Bulletin 76(5))."""
        known = [pair.kappa for pair in self.pairs if pair.kappa is not None]
        return math.fsum(known) / len(known) if known else None

    def in_words(self) -> str:
        """A line; empty where no two people judged the same episode."""
        if self.share is None:
            return ""
        kappa = "not defined, all said the same" if self.kappa is None else f"{self.kappa:.2f}"
        of = "Cohen's kappa" if len(self.pairs) == 1 else "mean of Cohen's kappa over pairs"
        told = f"{len(self.labellers)} labellers agree on {self.agree} of {self.episodes} episodes that more than one "
        return f"{told}of them judged ({self.share:.0%}; {of} {kappa})"


def agreement_of(labels: Iterable[Label]) -> Agreement:
    """The agreement of all who gave verdicts among ``labels``, each with what they said last of an episode.

    Verdicts agree when they are the same number.
    """
    of: dict[str, list[Label]] = defaultdict(list)
    for label in labels:
        of[label.trajectory_id].append(label)
    said = {identity: told for identity, own in of.items() if (told := verdicts(own))}
    judged = Counter(author for told in said.values() for author in told)
    several = {identity: told for identity, told in said.items() if len(told) > 1}
    disputed = [Dispute(trajectory_id=each, said=told) for each, told in several.items() if len({*told.values()}) > 1]
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for told in several.values():
        for first, second in combinations(sorted(told), 2):
            pairs[first, second].append((told[first], told[second]))
    return Agreement(
        labellers=dict(sorted(judged.items())),
        episodes=len(several),
        agree=len(several) - len(disputed),
        pairs=tuple(
            PairAgreement(
                first=first,
                second=second,
                episodes=len(both),
                agree=sum(one == other for one, other in both),
                kappa=cohens_kappa(both),
            )
            for (first, second), both in sorted(pairs.items())
        ),
        disputed=tuple(disputed),
    )


def cohens_kappa(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Agreement of two labellers beyond what chance alone would give them: 1 always, 0 as by chance, below 0 less.

    ``(p_o - p_e) / (1 - p_e)`` of Cohen 1960, "A coefficient of agreement for nominal scales", Educational and
    Psychological Measurement 20(1): ``p_o`` is the share of pairs that are equal, ``p_e`` the sum over values of the
    product of both labellers' shares of it. ``None`` without pairs, and where chance explains all (``p_e`` is 1:
    both said one and the same of every episode).

    Examples:
        >>> both = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15
        >>> round(cohens_kappa(both), 3)
        0.4
    """
    count = len(pairs)
    first, second = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
    # In whole numbers, so that only what is 1 is taken for it.
    by_chance = sum(times * second[value] for value, times in first.items())
    if by_chance == count * count:
        return None
    equal = sum(one == other for one, other in pairs)
    return (equal * count - by_chance) / (count * count - by_chance)

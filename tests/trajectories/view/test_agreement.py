"""The agreement of labellers, and beyond chance."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.trajectories.view.agreement import agreement_of, cohens_kappa


def labels(*said: tuple[str, str, float]) -> list[Label]:
    """One for each (author, episode, verdict)."""
    return [
        Label(id=str(at), trajectory_id=episode, kind=LabelKind.VERDICT, value=value, author=author, at=float(at))
        for at, (author, episode, value) in enumerate(said)
    ]


@pytest.mark.parametrize(
    ("table", "kappa"),
    [
        # Both yes, first only, second only, both no; the values are of Cohen's formula by hand.
        ((20, 5, 10, 15), 0.4),
        ((45, 15, 25, 15), 0.1304),
        ((25, 35, 5, 35), 0.2593),
        ((1, 0, 0, 1), 1.0),
        ((0, 1, 1, 0), -1.0),
        ((5, 0, 0, 0), None),
        ((0, 5, 0, 0), 0.0),
        ((0, 0, 0, 0), None),
    ],
)
def test_kappa(table: tuple[int, int, int, int], kappa: float | None) -> None:
    both, first, second, neither = table
    said = [(1.0, 1.0)] * both + [(1.0, 0.0)] * first + [(0.0, 1.0)] * second + [(0.0, 0.0)] * neither
    found = cohens_kappa(said)
    assert found is None if kappa is None else found == pytest.approx(kappa, abs=1e-4)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))))
def test_kappa_is_at_most_one_and_the_same_from_either_side(said: list[tuple[float, float]]) -> None:
    kappa = cohens_kappa(said)
    assert kappa == cohens_kappa([(other, one) for one, other in said])
    if kappa is not None:
        assert -1 <= kappa <= 1 and (kappa == 1) == all(one == other for one, other in said)


def test_of_three_labellers_kappa_is_the_mean_over_pairs() -> None:
    said = [(who, f"e{at}", float(value)) for who, told in _THREE.items() for at, value in enumerate(told)]
    found = agreement_of(labels(*said, ("ann", "alone", 1.0)))
    assert found.labellers == {"ann": 5, "bob": 4, "cay": 4}
    assert (found.episodes, found.agree, found.share) == (4, 2, 0.5)
    assert {(pair.first, pair.second): pair.kappa for pair in found.pairs} == {
        ("ann", "bob"): 0.5,
        ("ann", "cay"): 0.5,
        ("bob", "cay"): pytest.approx(0.2),
    }
    assert found.kappa is not None and math.isclose(found.kappa, 0.4)
    assert [each.trajectory_id for each in found.disputed] == ["e1", "e2"]
    assert "3 labellers agree on 2 of 4 episodes" in found.in_words() and "over pairs 0.40" in found.in_words()


_THREE = {"ann": (1, 1, 0, 0), "bob": (1, 0, 0, 0), "cay": (1, 1, 1, 0)}


def test_one_labeller_agrees_with_nobody() -> None:
    found = agreement_of(labels(("ann", "a", 1.0), ("ann", "a", 0.0)))
    assert (found.episodes, found.share, found.kappa, found.in_words()) == (0, None, None, "")
    same = agreement_of(labels(("ann", "a", 1.0), ("bob", "a", 1.0)))
    assert (same.share, same.kappa) == (1.0, None) and "not defined" in same.in_words()

"""The prefix tree of a pass: every sequence is found in it, and what is shared lies there once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.training.data.batch import MIN_SHARED, common_prefix, lay_out

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=90).map(tuple)


@given(IDS, IDS)
def test_common_prefix(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    length = common_prefix(left, right)
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


@given(
    st.lists(
        st.tuples(st.sampled_from([(), (0,) * 40, (1,) * 20]), IDS).map(lambda pair: pair[0] + pair[1]), min_size=1
    )
)
def test_every_sequence_can_be_read_back(sequences: list[tuple[int, ...]]) -> None:
    layout = lay_out(sequences)
    for ids, rows in zip(sequences, layout.rows, strict=True):
        assert tuple(layout.ids[row] for row in rows) == ids
        assert [layout.positions[row] for row in rows] == list(range(len(ids)))
    for index, run in enumerate(layout.runs):
        assert run.start < run.stop <= run.end
        below = [at for at, other in enumerate(layout.runs) if run.stop <= other.start < run.end]
        assert all(_is_ancestor(layout.runs, index, at) for at in below)


def test_what_is_shared_is_stored_once() -> None:
    prompt = tuple(range(100))
    layout = lay_out([(*prompt, 1, 2, 3), (*prompt, 4, 5), prompt, (9, 9)])
    assert len(layout.ids) == 100 + 3 + 2 + 2
    assert layout.rows[0][:100] == layout.rows[1][:100] == layout.rows[2]


def test_short_common_stretches_are_not_worth_a_run() -> None:
    begin = tuple(range(MIN_SHARED - 1))
    assert len(lay_out([(*begin, 50), (*begin, 60)]).ids) == 2 * MIN_SHARED


def test_deep_nesting_is_no_recursion() -> None:
    sequence = tuple(range(17_600))
    layout = lay_out([sequence[:end] for end in range(MIN_SHARED, 17_600, MIN_SHARED)])
    assert len(layout.ids) == 17_584


def _is_ancestor(runs: tuple, above: int, below: int | None) -> bool:
    while below is not None and below != above:
        below = runs[below].parent
    return below == above

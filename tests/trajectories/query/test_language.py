"""The query language: what is printed is read as the same, nothing crashes, and errors help."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openhands_rl_plugin.core.browsing.terms import TEXTS, Column, Match, Term
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import TrajectoryOrder
from openhands_rl_plugin.trajectories.query.language import _CLOSED, WORDS, parse_query
from openhands_rl_plugin.trajectories.query.printing import query_text
from openhands_rl_plugin.trajectories.query.query import OPINION_NOTES, Note, NoteTerm, Query, TextTerm

NUMBER = st.floats(allow_nan=False, allow_infinity=False)
BOUNDS = st.fixed_dictionaries({}, optional={name: NUMBER for name in ("at_least", "at_most", "above", "below")})
VERSION = st.integers(0, 999_999_999)
VERSIONS = st.fixed_dictionaries({}, optional={name: VERSION for name in ("first_version", "last_version")})
LIKE = st.lists(st.text(max_size=4), min_size=2, max_size=4).filter(any).map(tuple)


def textual(word: str) -> st.SearchStrategy[Match]:
    texts = st.sampled_from(sorted(_CLOSED[word])) if word in _CLOSED else st.text()
    return st.one_of(
        texts.map(lambda text: Match(text=text)), LIKE.map(lambda like: Match(like=like)), st.just(Match())
    )


@st.composite
def terms(draw: st.DrawFn) -> Term:
    column = draw(st.sampled_from(list(Column)))
    match = textual(column) if column in TEXTS else BOUNDS.map(Match.model_validate)
    found = draw(st.lists(match, min_size=1, max_size=3))
    if column is Column.ADAPTER:
        found = [each.model_copy(update=draw(VERSIONS)) for each in found]
    return Term(column=column, any_of=tuple(found), negated=draw(st.booleans()))


@st.composite
def notes(draw: st.DrawFn) -> NoteTerm:
    note = draw(st.sampled_from(list(Note)))
    match = BOUNDS.map(Match.model_validate) if note in OPINION_NOTES else textual(note)
    found = draw(st.lists(match, min_size=1, max_size=2))
    return NoteTerm(note=note, any_of=tuple(found), negated=draw(st.booleans()))


@st.composite
def queries(draw: st.DrawFn) -> Query:
    sort = draw(st.sampled_from([None, *TrajectoryOrder]))
    return Query(
        terms=tuple(draw(st.lists(terms(), max_size=3))),
        notes=tuple(draw(st.lists(notes(), max_size=2))),
        texts=tuple(draw(st.lists(st.builds(TextTerm), max_size=2))),
        sort=sort,
        descending=sort is not None and draw(st.booleans()),
    )


@given(queries())
@example(Query(terms=(Term(column=Column.ADAPTER, any_of=(Match(text="a@b", first_version=7, last_version=9),)),)))
@example(Query(texts=(TextTerm(text='-run:"x" | \\ *'), TextTerm(text="", negated=True))))
def test_what_is_printed_is_read_as_the_same(query: Query) -> None:
    assert parse_query(query_text(query)) == query


@given(
    st.one_of(
        st.text(),
        st.lists(st.sampled_from([*WORDS, ":", "-", "|", "*", '"', "\\", "@", "..", ">", "1", " "])).map("".join),
    )
)
def test_nothing_crashes_and_what_is_read_is_printed_and_read_again(text: str) -> None:
    try:
        query = parse_query(text)
    except ConfigError as error:
        assert "\n" not in str(error).replace(repr(text), "") or "\n" in text
        return
    assert parse_query(query_text(query)) == query


def test_the_example_of_the_guide() -> None:
    query = parse_query(
        "run:demo adapter:shop@7..9 reward:<0.5 failed:environment|grader turns:>20 break:template -label:* "
        '"No such file" sort:-tokens'
    )
    run, adapter, reward, failed, turns = query.terms
    assert run == Term(column=Column.RUN, any_of=(Match(text="demo"),))
    assert adapter.any_of == (Match(text="shop", first_version=7, last_version=9),)
    assert reward.any_of == (Match(below=0.5),) and turns.any_of == (Match(above=20),)
    assert [each.text for each in failed.any_of] == ["environment", "grader"]
    assert query.notes == (
        NoteTerm(note=Note.BREAK, any_of=(Match(text="template"),)),
        NoteTerm(note=Note.LABEL, any_of=(Match(),), negated=True),
    )
    assert query.texts == (TextTerm(text="No such file"),)
    assert (query.sort, query.descending) == (TrajectoryOrder.TOKENS, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("turn:5", "did you mean 'turns'"),
        ("turns:many", "turns:>20"),
        ("failed:enviroment", "did you mean 'environment'"),
        ("break:templat", "did you mean 'template'"),
        ("sort:token", "did you mean 'tokens'"),
        ("adapter:shop@new", "adapter:NAME@7"),
        ("run:", "a value is missing"),
        ("run:a||b", "a value is missing"),
        ('"No such', "a quote is not closed"),
        ("finished:>yesterday", "finished:>2026-01-31"),
        ("a" * 20_000, "at most 10,000"),
    ],
)
def test_an_error_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_query(text)

"""Ids as text mean what ids as numbers mean."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, Message, Tokens
from openhands_rl_plugin.models.gateway.token_id_text import (
    PROMPT_IDS,
    SAMPLED_IDS,
    ContextCache,
    NodeTokens,
    PromptIdCache,
    StrippedBody,
    TokenIds,
    canonical,
    dump_object,
    ids_of,
    parse_object,
    strip_id_arrays,
    text_of,
)

ID = st.integers(0, 2**31 - 1)
IDS = st.lists(ID, max_size=12)
NAMES = (PROMPT_IDS, SAMPLED_IDS)
TRAPS = [
    '"prompt_token_ids":[1]',
    "a\\",
    '"token_ids"',
    ":[1,2]",
    "]",
    '\\"prompt_token_ids\\":[3]',
    "[",
    '\\"token_ids":',
]
TEXT = st.lists(st.one_of(st.sampled_from(TRAPS), st.text(max_size=5)), max_size=4).map("".join)
ODD = st.lists(st.one_of(st.none(), st.floats(allow_nan=False), TEXT, IDS, st.just({})), max_size=3)
FIELDS = st.dictionaries(
    st.one_of(TEXT, st.sampled_from(NAMES)), st.one_of(TEXT, IDS, ODD, st.none(), st.integers(0, 3)), max_size=5
)
SPACING = st.sampled_from([{"separators": (",", ":")}, {}, {"indent": 2}])


def with_ids_back(cut_up: StrippedBody, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: with_ids_back(cut_up, item) for name, item in value.items()}
    inside = cut_up.inside(value)
    return value if inside is None else json.loads(b"[%s]" % inside)


@given(FIELDS, FIELDS, SPACING, st.booleans())
def test_cutting_loses_nothing_and_cuts_nothing_else(outer: Any, inner: Any, spacing: Any, ascii_only: bool):
    document = {**outer, "inner": inner}
    cut_up = strip_id_arrays(json.dumps(document, ensure_ascii=ascii_only, **spacing).encode())
    found = parse_object(cut_up.rest)
    assert found is not None
    assert with_ids_back(cut_up, found) == document
    assert json.loads(cut_up.paste(dump_object(found))) == document
    arrays = [item for fields in (outer, inner) for name, item in fields.items() if name in NAMES and item]
    assert all(item not in arrays or name not in NAMES for name, item in found.items() if is_ids(item))


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


@given(st.binary(max_size=60), st.sampled_from(NAMES))
def test_what_is_no_json_can_be_cut_too(noise: bytes, name: str):
    body = noise + b'"%s":[1,2' % name.encode() + noise
    assert strip_id_arrays(body).paste(strip_id_arrays(body).rest) == body or parse_object(body) is None


@given(
    st.lists(
        st.one_of(ID, st.integers(), st.sampled_from(["1e3", "1.5", "-0", "01", "null", "true", '"1"', "[1]", "{}"]))
    )
)
def test_only_ids_are_ids(items: list[int | str]):
    text = canonical(",".join(map(str, items)).encode())
    fit = all(isinstance(each, int) and 0 <= each < 2**31 for each in items)
    assert ids_of(text) == (items if fit else None)


@given(IDS)
def test_text_and_numbers_are_the_same(ids: list[int]):
    assert ids_of(text_of(ids)) == ids
    assert text_of(ids) == canonical(json.dumps(ids, separators=(",", ":"))[1:-1].encode())


@given(st.lists(st.tuples(st.integers(0, 3), IDS, st.sampled_from([",", ", ", " , "])), max_size=8), st.integers(1, 4))
def test_known_prompts_are_read_as_if_they_were_new(prompts: list[tuple[int, list[int], str]], most: int):
    known, told = PromptIdCache(most), [[]]
    for earlier, new, comma in prompts:
        told.append(told[min(earlier, len(told) - 1)] + new)
        assert known.ids(comma.join(map(str, told[-1])).encode()) == tuple(told[-1])
    assert known.ids(b"1, x") is None


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), IDS, IDS, st.sampled_from([",", ", ", " , "])), max_size=8),
    st.integers(1, 4),
)
def test_known_contexts_are_left_out(answers: list[tuple[int, bool, list[int], list[int], str]], most: int):
    """A prompt goes on from an earlier context or begins anew; either way its ids are those that were sent."""
    known, made = ContextCache(most), []
    for earlier, goes_on, new, sampled, comma in answers:
        after, context = made[earlier % len(made)] if made else (None, [])
        prompt = (context if goes_on else []) + new
        tokens = known.tokens(comma.join(map(str, prompt)).encode(), TokenIds(text_of(sampled), sampled), [], after)
        assert (tokens is not None and after is not None) or not tokens.extends
        assert (context if tokens.extends else []) + list(tokens.prompt_ids) == prompt
        made.append((tokens, prompt + sampled))
    assert known.tokens(b"1, x", TokenIds(b"", []), []) is None


@given(st.data())
def test_deltas_are_those_that_a_tree_finds_by_comparing_numbers(data: st.DataObject):
    plain, texts = EpisodeTree(), EpisodeTree()
    contexts, found = NodeTokens(texts), []
    prompts: list[list[int]] = [[1]]
    answer = Message(role="assistant", content="x")
    for _ in range(data.draw(st.integers(1, 6))):
        parent = data.draw(st.one_of(st.none(), st.integers(0, len(plain.nodes) - 1))) if plain.nodes else None
        prompt = data.draw(st.sampled_from(prompts)) + data.draw(IDS)
        sampled = data.draw(IDS)
        whole = Tokens(prompt_ids=tuple(prompt), sampled_ids=tuple(sampled))
        plain.propose(Completion(message=answer, tokens=whole), parent=parent)
        read = contexts.read(parent, text_of(prompt), TokenIds(text_of(sampled), sampled), [])
        assert read is not None
        node = texts.propose(Completion(message=answer, tokens=read[0]), parent=parent)
        contexts.note(node, read[1])
        # What is stored is taken out of the tree.
        found.append(texts.nodes[node].tokens)
        texts.nodes[node].tokens = None
        prompts.append(prompt + sampled)
    assert found == [node.tokens for node in plain.nodes]

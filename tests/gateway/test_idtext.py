"""Ids as text mean what ids as numbers mean."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.gateway.contexts import Contexts
from openhands_rl_plugin.gateway.idtext import canonical, cut, ids_of, paste, text_of
from openhands_rl_plugin.gateway.jsontext import read_object, write
from openhands_rl_plugin.tree import EpisodeTree
from openhands_rl_plugin.types import Completion, Message, Tokens

ID = st.integers(0, 2**31 - 1)
IDS = st.lists(ID, max_size=12)
TRAPS = ['"prompt_token_ids":[1]', "a\\", '"prompt_token_ids"', ":[1,2]", "]", '\\"prompt_token_ids\\":[3]']
TEXT = st.lists(st.one_of(st.sampled_from(TRAPS), st.text(max_size=5)), max_size=4).map("".join)
FIELDS = st.dictionaries(st.one_of(TEXT, st.just("prompt_token_ids")), st.one_of(TEXT, IDS, st.none()), max_size=5)
SPACING = st.sampled_from([{"separators": (",", ":")}, {}, {"indent": 2}])


def with_ids_back(value: Any, texts: list[bytes]) -> Any:
    if isinstance(value, dict):
        return {
            name: ids_of(canonical(texts[item])) if name == "prompt_token_ids" and type(item) is int else item
            for name, item in value.items()
        }
    return value


@given(FIELDS, FIELDS, SPACING, st.booleans())
def test_cutting_loses_nothing_and_cuts_nothing_else(outer: Any, inner: Any, spacing: Any, ascii_only: bool):
    document = {**outer, "inner": inner}
    rest, texts = cut(json.dumps(document, ensure_ascii=ascii_only, **spacing).encode())
    found = read_object(rest)
    assert found is not None
    # An array of something else than ids may be cut too; none of the texts here can be one.
    assert {**with_ids_back(found, texts), "inner": with_ids_back(found["inner"], texts)} == document
    assert json.loads(paste(write(found), texts)) == document


@given(IDS)
def test_text_and_numbers_are_the_same(ids: list[int]):
    assert ids_of(text_of(ids)) == ids
    assert text_of(ids) == canonical(json.dumps(ids, separators=(",", ":"))[1:-1].encode())


@given(st.data())
def test_deltas_are_those_that_a_tree_finds_by_comparing_numbers(data: st.DataObject):
    plain, texts = EpisodeTree(), EpisodeTree()
    contexts, found = Contexts(texts), []
    prompts: list[list[int]] = [[1]]
    answer = Message(role="assistant", content="x")
    for _ in range(data.draw(st.integers(1, 6))):
        parent = data.draw(st.one_of(st.none(), st.integers(0, len(plain.nodes) - 1))) if plain.nodes else None
        prompt = data.draw(st.sampled_from(prompts)) + data.draw(IDS)
        sampled = data.draw(IDS)
        whole = Tokens(prompt_ids=tuple(prompt), sampled_ids=tuple(sampled))
        plain.propose(Completion(message=answer, tokens=whole), parent=parent)
        read = contexts.read(parent, text_of(prompt), sampled, [])
        assert read is not None
        node = texts.propose(Completion(message=answer, tokens=read[0]), parent=parent)
        contexts.note(node, read[1])
        # What is stored is taken out of the tree.
        found.append(texts.nodes[node].tokens)
        texts.nodes[node].tokens = None
        prompts.append(prompt + sampled)
    assert found == [node.tokens for node in plain.nodes]

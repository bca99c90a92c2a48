"""Ids as text mean what ids as numbers mean."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, Message, Tokens
from openhands_rl_plugin.session.token_id_text import NodeTokens, TokenIds, text_of

ID = st.integers(0, 2**31 - 1)
IDS = st.lists(ID, max_size=12)


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

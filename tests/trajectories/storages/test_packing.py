"""Packs give back what they took, bit by bit, and say so when they cannot."""

from __future__ import annotations

import struct

import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.types import Message, Node, Tokens
from openhands_rl_plugin.testing import sample_episode
from openhands_rl_plugin.trajectories.storages import log as packing
from openhands_rl_plugin.trajectories.storages.log import pack_document, pack_nodes, unpack_document, unpack_nodes

TEXT = st.text(max_size=40)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
# Each list has ids of one width, so that every width is met.
IDS = st.one_of(*(st.lists(st.integers(0, 2**bits - 1), max_size=30) for bits in (8, 16, 17, 32)))
FLOATS = st.lists(st.floats(-1e9, 1e9, width=32), max_size=30) | st.lists(st.floats(-1e9, 1e9), max_size=30)
NUMBER = st.none() | st.floats(-1e9, 1e9)

TOKENS = st.builds(
    Tokens, extends=st.booleans(), prompt_ids=IDS.map(tuple), sampled_ids=IDS.map(tuple), logprobs=FLOATS.map(tuple)
)
NODES = st.builds(
    Node,
    parent=st.none() | st.integers(0, 1000),
    message=st.builds(Message, role=st.just("user"), content=st.none() | TEXT),
    sampled=st.booleans(),
    tokens=st.none() | TOKENS,
    reward=NUMBER,
    value=NUMBER,
    metadata=st.dictionaries(TEXT, JSON, max_size=3),
)


def bits(node: Node) -> tuple[bytes, str]:
    """All of a node, with its floats as bits, because 0.0 is equal to -0.0."""
    numbers = [number for number in (node.reward, node.value) if number is not None]
    floats = [*numbers, *(node.tokens.logprobs if node.tokens else ())]
    return struct.pack(f"<{len(floats)}d", *floats), node.model_dump_json()


@given(st.lists(NODES, max_size=6))
def test_a_pack_gives_back_what_it_took(nodes: list[Node]) -> None:
    read = unpack_nodes(pack_nodes(nodes))
    assert isinstance(read, tuple)
    assert [bits(node) for node in read] == [bits(node) for node in nodes]


@pytest.mark.parametrize("at", [0, 1, 6, 40, 400, -1, -3])
def test_a_changed_or_lost_byte_is_noticed(at: int) -> None:
    blob = pack_nodes(sample_episode("a").nodes)
    changed = bytearray(blob)
    changed[at] ^= 0x10
    for damaged in (bytes(changed), blob[:at]):
        with pytest.raises(StorageError, match=r"backup|upgrade"):
            unpack_nodes(damaged)


def test_a_pack_cannot_unfold_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = b"\x02" + zstd.compress(bytes(10_000_000))
    assert len(unpack_document(bomb)) == 10_000_000
    monkeypatch.setattr(packing, "UNPACKED_LIMIT", 1_000_000)
    with pytest.raises(StorageError, match="larger than"):
        unpack_document(bomb)
    with pytest.raises(StorageError, match="shorten"):
        pack_document(bytes(2_000_000))

"""Nodes and documents as small, checked bytes. A packed value carries its own version; what is read back is equal.

A pack is one version byte and one zstd frame with a checksum. The frame of nodes holds, one after the other and each in
blocks of its own (text and token ids have different statistics):

- a header: the number of nodes, the bytes of JSON, and the widths of the two arrays;
- for each node whether it has tokens, whether they extend, and how many prompt ids, sampled ids and logprobs;
- the nodes without tokens, as one JSON list without the fields that have their default;
- all token ids in order, as numbers of 16 or 32 bits;
- all logprobs in order, as 32-bit floats, the most significant bytes first; in packs of earlier releases also 64-bit
  ones, which are read with the precision of 32.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Sequence
from itertools import batched
from typing import Any

from backports import zstd
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, from_json

from openhands_rl_plugin.core.arrays import Floats, Ids
from openhands_rl_plugin.core.errors import DamagedError, StorageError, describe
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeStart
from openhands_rl_plugin.core.types import SCHEMA_VERSION, Frozen, Node, Tokens

UNPACKED_LIMIT = 512 * 1024 * 1024
"""No pack unfolds to more bytes than this, whatever its header says."""

DEEPEST = 180
"""Levels of nesting in a record. Pydantic reads 200, and what is exported or listed is wrapped in some more."""
_AROUND = 200 - DEEPEST

_NODES, _DOCUMENT = 1, 2  # version bytes; later formats take other numbers

_HEADER = struct.Struct("<IIBB")
_FLOAT = 4
_HAS_TOKENS, _EXTENDS = 1, 2

_LEVEL = 3
PASSING = 1
"""The level of zstd for what is packed again soon."""
# Making a compressor costs as much as a small pack, and one of them cannot be shared by threads.
_compressors = threading.local()
_TOKENS = set(Tokens.model_fields)
_NODE_LIST = TypeAdapter(tuple[Node, ...])


def pack_nodes(nodes: Sequence[Node], level: int = _LEVEL) -> bytes:
    """All ``nodes`` in one pack. Raises ``StorageError`` for what cannot be written or is larger than the limit."""
    layout: list[int] = []
    ids: list[bytes] = []
    logprobs: list[bytes] = []
    for node in nodes:
        if (tokens := node.tokens) is None:
            layout.extend((0, 0, 0, 0))
            continue
        flags = _HAS_TOKENS | (_EXTENDS if tokens.extends else 0)
        layout.extend((flags, len(tokens.prompt_ids), len(tokens.sampled_ids), len(tokens.logprobs)))
        ids += bytes(tokens.prompt_ids), bytes(tokens.sampled_ids)
        logprobs.append(bytes(tokens.logprobs))
    whole, floats = b"".join(ids), b"".join(logprobs)
    width = 4 if whole[2::4].strip(b"\0") or whole[3::4].strip(b"\0") else 2
    planes = [floats[byte::_FLOAT] for byte in reversed(range(_FLOAT))]
    text = b"[%s]" % b",".join(map(_without_tokens, nodes))
    header = _HEADER.pack(len(nodes), len(text), width, _FLOAT) + struct.pack(f"<{len(layout)}I", *layout)
    return _compress(_NODES, [header + text, _widened(whole, 4, width), planes[0], b"".join(planes[1:])], level)


def unpack_nodes(blob: bytes) -> tuple[Node, ...]:
    """The inverse of ``pack_nodes``. Raises ``StorageError`` for a damaged pack and for one of a later format."""
    data = memoryview(_decompress(blob, _NODES))
    try:
        return _read_nodes(data)
    except (ValueError, KeyError, struct.error, ValidationError) as error:
        raise DamagedError(f"packed nodes are damaged: {describe(error)}") from error


def pack_document(document: bytes) -> bytes:
    """A JSON document, smaller and checked. Raises ``StorageError`` when it is larger or deeper than can be read."""
    return _compress(_DOCUMENT, [_readable(document, "a record")])


def unpack_document(blob: bytes) -> bytes:
    """The inverse of ``pack_document``. Raises ``StorageError`` for a damaged pack and for one of a later format."""
    return _decompress(blob, _DOCUMENT)


def _without_tokens(node: Node) -> bytes:
    try:
        # By the serializer itself, which ``model_dump_json`` adds as much again to for a small node.
        document = Node.__pydantic_serializer__.to_json(node, exclude={"tokens"}, exclude_defaults=True)
    except (PydanticSerializationError, RecursionError) as error:
        raise StorageError(f"a node cannot be written as JSON: {describe(error)}") from error
    return _readable(document, "a node")


def _readable(document: bytes, what: str) -> bytes:
    """The document itself. Raises ``StorageError`` for one that is nested more deeply than what reads JSON allows."""
    # Hardly any has so many brackets, also counting those in its texts.
    if document.count(b"[") + document.count(b"{") > DEEPEST:
        try:
            from_json(b"[" * _AROUND + document + b"]" * _AROUND)
        except ValueError as error:
            raise StorageError(
                f"{what} is nested more than {DEEPEST} levels deep and could not be read back: keep the value as text"
            ) from error
    return document


def _read_nodes(data: memoryview) -> tuple[Node, ...]:
    count, text_bytes, width, precision = _HEADER.unpack_from(data)
    at = _HEADER.size
    layout = struct.unpack_from(f"<{4 * count}I", data, at)
    at += 4 * len(layout)
    nodes = _NODE_LIST.validate_json(bytes(data[at : (at := at + text_bytes)]))
    held = data[at : (at := at + width * (sum(layout[1::4]) + sum(layout[2::4])))]
    logprobs = _floats_in(data[at : (at := at + precision * sum(layout[3::4]))], precision)
    if at != len(data) or len(nodes) != count or width not in (2, 4):
        raise ValueError("its parts do not have the lengths that its header says")
    ids = _widened(bytes(held), width, 4)
    used = scored = 0
    for node, (flags, prompt, sampled, floats) in zip(nodes, batched(layout, 4), strict=True):
        if flags:
            # Nothing is validated, because the arrays hold nothing but numbers, and the node is not shared yet.
            vars(node)["tokens"] = Tokens.model_construct(
                _TOKENS,
                extends=bool(flags & _EXTENDS),
                prompt_ids=Ids(ids[used : (used := used + 4 * prompt)]),
                sampled_ids=Ids(ids[used : (used := used + 4 * sampled)]),
                logprobs=Floats(logprobs[scored : (scored := scored + 4 * floats)]),
            )
            node.__pydantic_fields_set__.add("tokens")
    return nodes


def _widened(numbers: bytes, width: int, wanted: int) -> bytes:
    """Numbers of ``width`` bytes as those of ``wanted``: what is cut off is 0."""
    if width == wanted:
        return numbers
    made = bytearray(len(numbers) // width * wanted)
    for byte in range(min(width, wanted)):
        made[byte::wanted] = numbers[byte::width]
    return bytes(made)


def _floats_in(data: memoryview, width: int) -> bytes:
    count = len(data) // width
    raw = bytearray(len(data))
    for place, byte in enumerate(reversed(range(width))):
        raw[byte::width] = data[place * count : (place + 1) * count]
    return bytes(raw) if width == _FLOAT else bytes(Floats(struct.unpack(f"<{count}d", raw)))


def _compress(version: int, parts: Sequence[bytes], level: int = _LEVEL) -> bytes:
    size = sum(map(len, parts))
    if size > UNPACKED_LIMIT:
        raise StorageError(f"{size:,} bytes are more than one record may have ({UNPACKED_LIMIT:,}): shorten its texts")
    name = zstd.CompressionParameter
    options: dict[int, int] = {name.compression_level: level, name.checksum_flag: 1}
    held: dict[Any, Any] = vars(_compressors)
    # After an error it is not put back: it stands in the middle of a frame.
    compressor = held.pop(level, None) or zstd.ZstdCompressor(options=options)
    compressor.set_pledged_input_size(size)
    packed = [compressor.compress(part, zstd.ZstdCompressor.FLUSH_BLOCK) for part in parts if part]
    packed.append(compressor.flush(zstd.ZstdCompressor.FLUSH_FRAME))
    held[level] = compressor
    return b"".join((bytes((version,)), *packed))


def _decompress(blob: bytes, version: int) -> bytes:
    if blob[:1] != bytes((version,)):
        found = blob[0] if blob else "none"
        raise DamagedError(
            f"a record is in format {found}, not {version}: it is damaged, or a later openhands_rl_plugin wrote it; "
            "upgrade openhands_rl_plugin, or restore the file from a backup"
        )
    decompressor = zstd.ZstdDecompressor()
    try:
        data = decompressor.decompress(memoryview(blob)[1:], UNPACKED_LIMIT)
    except zstd.ZstdError as error:
        raise DamagedError(f"a record is damaged, restore the file from a backup: {describe(error)}") from error
    if not decompressor.eof or decompressor.unused_data:
        raise DamagedError(f"a record is damaged or larger than {UNPACKED_LIMIT:,} bytes; restore it from a backup")
    return data


def newer_schema(identity: str, version: int) -> StorageError:
    """The error of a record that a later release wrote."""
    return StorageError(
        f"record {identity!r} is of schema version {version}, newer than {SCHEMA_VERSION}; upgrade openhands_rl_plugin"
    )


def packed_json(value: Frozen, without: frozenset[str] = frozenset()) -> bytes:
    """A value as packed JSON. Raises ``StorageError`` for what JSON cannot hold."""
    try:
        return pack_document(value.model_dump_json(exclude=set(without)).encode())
    except (PydanticSerializationError, RecursionError) as error:
        raise StorageError(f"{type(value).__name__} cannot be written as JSON: {describe(error)}") from error


def parsed_json[Value: Frozen](kind: type[Value], identity: str, packed: bytes) -> Value:
    """The inverse of ``packed_json``. Raises ``StorageError`` for damage and for what a later release wrote."""
    document = unpack_document(packed)
    try:
        return kind.model_validate_json(document)
    except ValidationError as error:
        version = json.loads(document).get("schema_version", SCHEMA_VERSION)
        if version > SCHEMA_VERSION:
            raise newer_schema(identity, version) from error
        raise DamagedError(f"record {identity!r} is not a {kind.__name__}: {describe(error)}") from error


def packed_end(start: EpisodeStart, end: EpisodeEnd) -> bytes:
    """How an episode ended. What is the same at the start and at the end is stored once."""
    return packed_json(end, without=frozenset({"tools"} if end.tools == start.tools else ()))


def parsed_end(start: EpisodeStart, packed: bytes) -> EpisodeEnd:
    """The inverse of ``packed_end``. Raises ``StorageError``."""
    end = parsed_json(EpisodeEnd, start.id, packed)
    return end if "tools" in end.model_fields_set else end.model_copy(update={"tools": start.tools})

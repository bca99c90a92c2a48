"""An episode's content as a log of small documents.

Each record (the start, some nodes with later marks, the end) is one document of the ``chunks`` collection or, when it
is large, several: ``part`` of ``parts``. An ``_id`` is a place in one log (``generation``) of an episode. Two writers
cannot both take the same place; the first one wins, and the other one reads what it did. A record whose writer died
before its last part is void as soon as another record follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from openhands_rl_plugin.core.errors import DamagedError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeStart, NodeMark
from openhands_rl_plugin.core.types import Node
from openhands_rl_plugin.trajectories.storages.header import marked
from openhands_rl_plugin.trajectories.storages.packing import (
    pack_document,
    pack_in_chunks,
    parsed_end,
    parsed_json,
    unpack_document,
    unpack_nodes,
)

PART_BYTES = 4 * 1024 * 1024
"""A document holds so much of a record at most; MongoDB takes no document of 16 MB."""

_START, _GROWTH, _END = "start", "growth", "end"
_MARKS = TypeAdapter(tuple[NodeMark, ...])


class LogEntry(NamedTuple):
    """One entry of the log. The last one of a growth ``closes`` it: it holds the ``head`` and the packed ``marks``."""

    kind: str
    data: bytes
    closes: bool = False
    head: int | None = None
    marks: bytes = b""


class Replayed(NamedTuple):
    """The content of the ``length`` documents of a log."""

    start: EpisodeStart
    length: int
    nodes: tuple[Node, ...]
    head: int | None
    end: EpisodeEnd | None


def start_record(packed: bytes) -> LogEntry:
    """The first record of every log."""
    return LogEntry(_START, packed)


def end_record(packed: bytes) -> LogEntry:
    """The last record of a finished episode; of several the last one holds."""
    return LogEntry(_END, packed)


def growth_records(nodes: Sequence[Node], first: int, head: int | None, marks: Sequence[NodeMark]) -> list[LogEntry]:
    """One append to an episode, in packs that are read one by one."""
    packs = [chunk.blob for chunk in pack_in_chunks(nodes, first)] or [b""]
    last = LogEntry(_GROWTH, packs[-1], True, head, pack_document(_MARKS.dump_json(tuple(marks))) if marks else b"")
    return [*(LogEntry(_GROWTH, pack) for pack in packs[:-1]), last]


def log_documents(episode: str, generation: str, first: int, records: Iterable[LogEntry]) -> list[dict[str, Any]]:
    """``records`` as documents, of which the first takes the place ``first`` in the log."""
    contents = (content for record in records for content in _contents(record))
    return [
        {"_id": place(generation, seq), "episode": episode, "seq": seq, **content}
        for seq, content in enumerate(contents, first)
    ]


def place(generation: str, seq: int) -> str:
    """Where a document stands; as text it sorts by number."""
    return f"{generation}/{seq:08d}"


def generation_of(document: Mapping[str, Any]) -> str:
    """The log that a document belongs to."""
    return document["_id"].partition("/")[0]


def log_range(generation: str, first: int = 0, end: int | None = None) -> dict[str, Any]:
    """The query for the documents from ``first`` to before ``end``, or to the last."""
    # "0" comes right after "/".
    until = f"{generation}0" if end is None else place(generation, end)
    return {"_id": {"$gte": place(generation, first), "$lt": until}}


def replay(episode: str, documents: Iterable[Mapping[str, Any]]) -> Replayed:
    """Read a log from its first document on. Raises ``StorageError`` when it is damaged."""
    start: EpisodeStart | None = None
    end: bytes | None = None
    head: int | None = None
    nodes: list[Node] = []
    marks: list[NodeMark] = []
    length = 0
    parts: list[bytes] = []
    for length, document in enumerate(documents, 1):
        # A first part makes void what came before it without its last part.
        parts = [*(parts if document["part"] else ()), document["data"]]
        if document["seq"] != length - 1 or document["part"] != len(parts) - 1:
            raise _damaged(episode)
        if len(parts) < document["parts"]:
            continue
        data = b"".join(parts)
        if document["kind"] == _START:
            start = parsed_json(EpisodeStart, episode, data)
        elif document["kind"] == _END:
            end = data
        else:
            nodes += unpack_nodes(data) if data else ()
            marks += _MARKS.validate_json(unpack_document(document["marks"])) if document["marks"] else ()
            head = document["head"] if document["closes"] else head
    if start is None:
        raise _damaged(episode)
    return Replayed(start, length, marked(nodes, marks), head, None if end is None else parsed_end(start, end))


def _contents(record: LogEntry) -> Iterator[dict[str, Any]]:
    count = max(1, -(-len(record.data) // PART_BYTES))
    for part in range(count):
        data = record.data[part * PART_BYTES : (part + 1) * PART_BYTES]
        yield {**record._asdict(), "part": part, "parts": count, "data": data}


def _damaged(episode: str) -> DamagedError:
    return DamagedError(f"a part of episode {episode!r} is missing; restore the database from a backup")

"""Reads what is readable of a damaged store, and says of everything else what it was.

The packed values have checksums. What has none (the columns of ``episodes``, the keys of the other tables, indices) is
compared with what says the same elsewhere; the numbers in a mark are taken as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from openhands_rl_plugin.core.acted import path_to
from openhands_rl_plugin.core.errors import DamagedError, StorageError, describe
from openhands_rl_plugin.core.records import DamagedRecord, EpisodeStart, Label, NodeMark
from openhands_rl_plugin.core.types import Node, Score, StopReason, Trajectory
from openhands_rl_plugin.trajectories.sqlite.database import FILE_NAME, explained
from openhands_rl_plugin.trajectories.sqlite.pages import USUAL_PAGE_BYTES, PageRecord, SqlitePages, Value
from openhands_rl_plugin.trajectories.storages.documents import parsed_end, parsed_json
from openhands_rl_plugin.trajectories.storages.header import Spine, marked, so_far, whole
from openhands_rl_plugin.trajectories.storages.packing import unpack_nodes

Salvaged = tuple[Trajectory, tuple[Score, ...]]

_COLUMNS = 28
_ID, _STOP, _NODES, _RETURN, _FINISHED, _HEAD, _REVISION = 1, 11, 13, 15, 17, 23, 24


class _Place(NamedTuple):
    """Where the cell of a large value stands."""

    page: int
    rowid: int


class _Contents:
    """What the pages hold, without the large values."""

    def __init__(self, pages: SqlitePages) -> None:
        self.roots: dict[str, int] = {}
        self.headers: dict[int, tuple[Value, ...]] = {}
        self.documents: dict[int, _Place] = {}
        self.chunks: dict[int, list[tuple[int, _Place]]] = defaultdict(list)
        self.marks: dict[int, list[tuple[Value, str]]] = defaultdict(list)
        self.scores: dict[int, bytes] = {}
        self.labels: dict[int, bytes] = {}
        for record in pages.records():
            self._add(record)

    def _add(self, record: PageRecord) -> None:
        place = _Place(record.page, record.rowid)
        match record.values:
            case (str(), str() as name, str(), int() as root, str() | None) if not record.indexed:
                self.roots[name] = root
            case (None, bytes(), bytes() | None) if not record.indexed:
                self.documents[record.rowid] = place
            case (int() as episode, int() as first, int(), bytes()) if not record.indexed:
                self.chunks[episode].append((first, place))
            case (None, str(), bytes() as score) if not record.indexed:
                self.scores[record.rowid] = score
            case (None, str(), str(), bytes() as label) if not record.indexed:
                self.labels[record.rowid] = label
            case (int() as episode, node, str() as mark) if record.indexed:
                self.marks[episode].append((node, mark))
            case values if not record.indexed and len(values) == _COLUMNS:
                self.headers[record.rowid] = values
            case _:
                pass


class SalvageReader:
    """The store in ``folder``, which is only read. Stop whatever writes to it first.

    ``episodes`` comes first: only then is ``lost`` complete. Raises ``StorageError`` when the file cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / FILE_NAME
        with explained(file):
            self._pages = SqlitePages(file)
            self._contents = _Contents(self._pages)
            if not self._contents.documents and self._pages.size != USUAL_PAGE_BYTES:
                self._pages.close()
                self._pages = SqlitePages(file, USUAL_PAGE_BYTES)
                self._contents = _Contents(self._pages)
        self.lost: list[DamagedRecord] = []
        if (cause := self._pages.log_damage) is not None:
            self.lost.append(DamagedRecord(what="log", id=f"{FILE_NAME}-wal", cause=cause))
        self._ids = {row: identity for identity, row in self._indexed("episodes_id")}
        self._chunk_rows: dict[int, set[Value]] = defaultdict(set)
        for episode, _, rowid in self._indexed("chunks_episode", 3):
            if isinstance(episode, int):
                self._chunk_rows[episode].add(rowid)
        self._unsure = self._marks_in_doubt()
        self._scores = self._parsed(Score, "score", self._contents.scores, "scores_trajectory")
        self._labels = self._parsed(Label, "label", self._contents.labels, "labels_trajectory")

    def close(self) -> None:
        """Release the file."""
        self._pages.close()

    def episodes(self) -> Iterator[Salvaged]:
        """Every episode that is whole, in the order in which they were stored, with its scores."""
        known = self._contents
        by_id: dict[str, list[Score]] = defaultdict(list)
        for score in self._scores:
            by_id[score.trajectory_id].append(score)
        rows = {row for row in self._ids if isinstance(row, int)}
        for row in sorted(rows | known.headers.keys() | known.documents.keys() | known.chunks.keys()):
            try:
                with explained(Path(FILE_NAME)):
                    trajectory = self._episode(row)
            except StorageError as error:
                self.lost.append(DamagedRecord(what="episode", id=self._id_of(row), row=row, cause=str(error)))
                continue
            yield trajectory, tuple(by_id.get(trajectory.id, ()))

    def labels(self) -> Sequence[Label]:
        """All readable labels."""
        return self._labels

    def _episode(self, row: int) -> Trajectory:
        known = self._contents
        start = self._start(row)
        header = known.headers.get(row)
        if start.id not in (self._ids.get(row), header[_ID] if header else None):
            raise DamagedError("nothing else names it by this row")
        nodes = marked(self._nodes(row, header), self._marks(row))
        end = self._blob(known.documents[row], 2)
        if end is not None:
            trajectory = whole(start, nodes, parsed_end(start, end))
        else:
            trajectory = self._unfinished(start, nodes, header)
        if row in self._unsure and not self._is_proven(trajectory, header):
            raise DamagedError("what became known of its nodes later, such as rewards, is damaged")
        told = header[_RETURN] if header is not None and known.marks.get(row) else None
        if isinstance(told, float) and told not in _returns(nodes, trajectory.head):
            raise DamagedError(f"its rewards do not add up to its return, {told:g}")
        if trajectory.head is not None and not 0 <= trajectory.head < len(nodes):
            raise DamagedError("its last node is missing")
        return trajectory

    def _start(self, row: int) -> EpisodeStart:
        place = self._contents.documents.get(row)
        if place is None:
            raise DamagedError("what was known at its start is damaged")
        document = self._blob(place, 1)
        return parsed_json(EpisodeStart, f"row {row}", document or b"")

    def _nodes(self, row: int, header: tuple[Value, ...] | None) -> tuple[Node, ...]:
        chunks = sorted(self._contents.chunks.get(row, ()))
        nodes: list[Node] = []
        for first, place in chunks:
            if first != len(nodes):
                raise DamagedError(f"nodes {len(nodes)} to {first} are missing")
            nodes += unpack_nodes(self._blob(place, 3) or b"")
        counted = header is not None and header[_NODES] == len(nodes)
        if not counted and {place.rowid for _, place in chunks} != self._chunk_rows.get(row):
            told = header[_NODES] if header is not None else "an unknown number of"
            raise DamagedError(f"it has {len(nodes)} of {told} nodes")
        return tuple(nodes)

    def _marks(self, row: int) -> list[NodeMark]:
        try:
            marks = [NodeMark.model_validate_json(text) for _, text in self._contents.marks.get(row, ())]
        except ValidationError as error:
            raise DamagedError(f"what became known of its nodes later is damaged: {describe(error)}") from error
        if [mark.index for mark in marks] != [node for node, _ in self._contents.marks.get(row, ())]:
            raise DamagedError("what became known of its nodes later belongs to other nodes")
        return marks

    def _unfinished(self, start: EpisodeStart, nodes: Sequence[Node], header: tuple[Value, ...] | None) -> Trajectory:
        if header is None or header[_STOP] != StopReason.UNFINISHED:
            raise DamagedError("how it ended is damaged")
        head, grown = header[_HEAD], header[_FINISHED]
        if not isinstance(head, int | None) or not isinstance(grown, int | float):
            raise DamagedError("its header is damaged")
        return so_far(start, nodes, head, float(grown))

    def _is_proven(self, trajectory: Trajectory, header: tuple[Value, ...] | None) -> bool:
        """Whether no mark can be missing: there never were any, or the rewards are those of the header."""
        if header is None:
            return False
        told = header[_RETURN]
        same = isinstance(told, float) and told in _returns(trajectory.nodes, trajectory.head)
        return header[_REVISION] == 0 or (same and told != 0)

    def _marks_in_doubt(self) -> frozenset[int]:
        """The episodes whose marks may have stood where an index page cannot be read: those around the hole."""
        rows = self._contents.documents.keys() | self._contents.headers.keys()
        doubtful: set[int] = set()
        before, hole = (0, 0), False
        for cell in self._pages.index(self._contents.roots.get("marks", 0)):
            key = None if cell is None else _key(cell)
            if key is None or key < before or key[0] not in rows:
                hole = True
                continue
            if hole:
                doubtful |= {row for row in rows if before[0] <= row <= key[0]}
            before, hole = key, False
        return frozenset(doubtful | ({row for row in rows if row >= before[0]} if hole else set()))

    def _indexed(self, name: str, columns: int = 2) -> Iterator[tuple[Value, ...]]:
        for cell in self._pages.index(self._contents.roots.get(name, 0)):
            if cell is not None and len(cell.values) == columns:
                yield cell.values

    def _parsed[Record: (Score, Label)](
        self, kind: type[Record], what: str, packed: dict[int, bytes], index: str
    ) -> list[Record]:
        named = {row: identity for identity, row in self._indexed(index)}
        records: list[Record] = []
        for row in sorted({row for row in named if isinstance(row, int)} | packed.keys()):
            name = named.get(row)
            identity = name if isinstance(name, str) else None
            try:
                if row not in packed:
                    raise DamagedError("it is damaged")
                records.append(parsed_json(kind, identity or f"row {row}", packed[row]))
            except StorageError as error:
                self.lost.append(DamagedRecord(what=what, id=identity, row=row, cause=str(error)))
        return records

    def _blob(self, place: _Place, column: int) -> bytes | None:
        """A column of a cell of a table; ``None`` is one without a value."""
        for cell in self._pages.cells(place.page):
            if cell.rowid == place.rowid and not cell.indexed:
                value = cell.values[column]
                return value if isinstance(value, bytes) else None
        raise DamagedError("its page is damaged")

    def _id_of(self, row: int) -> str | None:
        header = self._contents.headers.get(row)
        named = self._ids.get(row) or (header[_ID] if header else None)
        if isinstance(named, str):
            return named
        try:
            return self._start(row).id
        except StorageError:
            return None


def _returns(nodes: Sequence[Node], head: int | None) -> tuple[float | None, float | None]:
    """What a header may say: the return of all that was acted on, or, in a store of an earlier release, of the path."""
    path = path_to(nodes, head)
    rewards = [reward for at in path if (reward := nodes[at].reward) is not None]
    return Spine(nodes).along(head)[1], float(sum(rewards)) if rewards else None


def _key(cell: PageRecord) -> tuple[int, int] | None:
    """Episode and node of a mark."""
    match cell.values:
        case (int() as episode, int() as node, str()):
            return episode, node
        case _:
            return None

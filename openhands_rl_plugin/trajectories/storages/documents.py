"""Values as packed JSON and back, the same for every storage."""

from __future__ import annotations

import json

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from openhands_rl_plugin.core.errors import DamagedError, StorageError, describe
from openhands_rl_plugin.core.records import DamagedRecord, EpisodeEnd, EpisodeStart
from openhands_rl_plugin.core.types import SCHEMA_VERSION, Frozen
from openhands_rl_plugin.trajectories.storages.header import newer_schema
from openhands_rl_plugin.trajectories.storages.packing import pack_document, unpack_document


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


def note_lost(lost: list[DamagedRecord], record: DamagedRecord) -> None:
    """Add a record, once, however often it is met."""
    if not any((each.what, each.id, each.row) == (record.what, record.id, record.row) for each in lost):
        lost.append(record)


def page_lost(after: str) -> StorageError:
    """The error of a page whose place in the list is not known any more."""
    return StorageError(f"the episode {after!r}, after which a page begins, is gone; begin with the first page")


def cursor_lost() -> StorageError:
    """The error of a cursor that no store of this kind gave."""
    return StorageError("the cursor is none of this store's; begin without one")

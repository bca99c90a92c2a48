"""The formats by name: what each is, and how it is read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.redaction import redact_json
from openhands_rl_plugin.core.types import JsonObject, Score, Trajectory
from openhands_rl_plugin.core.validation import unknown_name
from openhands_rl_plugin.trajectories.exchange import (
    agentgym,
    llm_completions,
    output_jsonl,
    predictions,
    sft,
    trajectories,
    trees,
    v1_events,
    verifier,
)
from openhands_rl_plugin.trajectories.exchange.conversations import ArgumentsForm, as_text, with_objects
from openhands_rl_plugin.trajectories.exchange.episodes import Imported
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.reading import Source, row_source
from openhands_rl_plugin.trajectories.exchange.writing import Columns, Folder, JsonFile, ParquetFile, Sink

_JSON_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")

Rows = Callable[[Trajectory, Sequence[Score]], Iterator[JsonObject]]
Files = Callable[[Trajectory, Sequence[Score]], Iterator[tuple[str, JsonObject]]]

_VALID = TrajectoryFilter(failed=False)
_ALL = TrajectoryFilter()
_EVERYTHING = TrajectoryFilter(finished=None)


@dataclass(frozen=True)
class Format:
    """``read`` or ``rows`` is ``None`` for a format that is for import or export only.

    ``scope`` says which trajectories it is for, where a person does not say otherwise. ``columns`` are those of a
    Parquet file, and ``None`` where rows have no fixed ones. ``folder`` formats write a file a row. ``conversations``
    are the columns with messages whose calls may have arguments in either form.
    ``rows`` is given trajectories and scores without secrets; ``exact`` ones are written as they are.
    """

    name: str
    help: str
    read: Callable[[Path], Source] | None = None
    rows: Files | None = None
    scope: TrajectoryFilter = _VALID
    columns: Columns | None = None
    folder: bool = False
    conversations: tuple[str, ...] = ()
    exact: bool = False

    def files(self, arguments: ArgumentsForm = "object") -> Files:
        """How rows are written. Raises ``ConfigError`` for a format that is for import only.

        Rendering may bring the parts of a secret together, so the written row is checked as well.
        """
        rows = self.rows
        if rows is None:
            raise ConfigError(f"the format {self.name!r} is for import only")
        if self.exact:
            return rows
        change = with_objects if self.conversations and arguments == "object" else _unchanged
        return lambda trajectory, scores: ((name, redact_json(change(row))) for name, row in rows(trajectory, scores))

    def sink(self, target: Path, arguments: ArgumentsForm = "object") -> Sink:
        """Where rows go. Raises ``ExchangeError`` for a file that the format cannot be written to."""
        if self.folder:
            return Folder(target)
        if target.name.endswith(_JSON_ENDINGS):
            return JsonFile(target)
        if target.suffix != ".parquet":
            raise ExchangeError(f"{target}: must end with {', '.join(_JSON_ENDINGS)} or .parquet")
        if self.columns is None:
            able = ", ".join(each.name for each in FORMATS.values() if each.columns is not None)
            raise ExchangeError(f"{target}: {self.name} has no fixed columns for Parquet; these have: {able}")
        return ParquetFile(target, self.columns if arguments == "object" else as_text(self.columns))


def _unchanged(row: JsonObject) -> JsonObject:
    return row


def _each(rows: Rows) -> Files:
    """Rows of one file."""
    return lambda trajectory, scores: (("", row) for row in rows(trajectory, scores))


def _by_row(convert: Callable[[JsonObject], Imported]) -> Callable[[Path], Source]:
    return lambda path: row_source(path, convert)


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format(
            "sft-text",
            "SFT rows with calls as text, as SWE-Gym publishes them",
            _by_row(sft.import_text),
            _each(sft.text_rows),
            columns=sft.TEXT_COLUMNS,
        ),
        Format(
            "sft-native",
            "SFT rows with native tool calls and a tools column",
            _by_row(sft.import_native),
            _each(sft.native_rows),
            columns=sft.NATIVE_COLUMNS,
            conversations=("messages",),
        ),
        Format(
            "verifier",
            "rows that train SWE-Gym's outcome verifier (YES or NO)",
            rows=_each(verifier.rows),
            columns=verifier.COLUMNS,
        ),
        Format(
            "preferences",
            "chosen and rejected actions of the same state, from search trees",
            rows=_each(trees.preference_rows),
            columns=trees.PREFERENCE_COLUMNS,
            conversations=("prompt", "chosen", "rejected"),
        ),
        Format(
            "values",
            "states with the mean return that search saw from there on",
            rows=_each(trees.value_rows),
            columns=trees.VALUE_COLUMNS,
            conversations=("messages",),
        ),
        Format(
            "output-jsonl",
            "output.jsonl of OpenHands' evaluation (V0 events; V1 events in)",
            _by_row(output_jsonl.read),
            _each(output_jsonl.rows),
            _ALL,
        ),
        Format(
            "llm-completions",
            "folder of OpenHands V0's llm_completions/<instance>/*.json",
            llm_completions.source,
            llm_completions.rows,
            _ALL,
            folder=True,
        ),
        Format("v1-events", "stored conversations of the OpenHands V1 SDK (events)", v1_events.source),
        Format(
            "agentgym",
            "AgentGym records, and AgentTraj rows in",
            _by_row(agentgym.read),
            _each(agentgym.rows),
            _ALL,
        ),
        Format(
            "predictions",
            "SWE-bench predictions",
            _by_row(predictions.read),
            _each(predictions.rows),
            _ALL,
            predictions.COLUMNS,
        ),
        Format(
            "trajectories",
            "everything, one trajectory with its scores a line: moves stores",
            _by_row(trajectories.read),
            _each(trajectories.rows),
            _EVERYTHING,
            exact=True,
        ),
    )
}


def importable(name: str) -> Callable[[Path], Source]:
    """How ``name`` is read. Raises ``ConfigError`` with the nearest name."""
    read = _known(name).read
    if read is None:
        raise ConfigError(f"the format {name!r} is for export only")
    return read


def exportable(name: str) -> Format:
    """The format ``name``. Raises ``ConfigError`` with the nearest name, or when it is for import only."""
    found = _known(name)
    found.files()
    return found


def table() -> str:
    """One line a format, for people."""
    width = max(map(len, FORMATS))
    ways = {(True, True): "both ways", (True, False): "import", (False, True): "export"}
    return "\n".join(
        f"  {each.name:<{width}}  {each.help} ({ways[each.read is not None, each.rows is not None]})"
        for each in FORMATS.values()
    )


def _known(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(unknown_name("format", name, FORMATS))
    return FORMATS[name]

"""The formats by name: what each is, and how it is read and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

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
    verifier,
)
from openhands_rl_plugin.trajectories.exchange.agents import (
    atif,
    atif_write,
    data_protocol,
    mini_swe_agent,
    sharegpt,
    swe_agent,
    trl,
)
from openhands_rl_plugin.trajectories.exchange.conversations import ArgumentsForm, as_text, with_objects
from openhands_rl_plugin.trajectories.exchange.episodes import Imported
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.reading import (
    ROW_SUFFIXES,
    Source,
    Unit,
    files_below,
    row_source,
    rows_of,
)
from openhands_rl_plugin.trajectories.exchange.v1 import events as v1_events
from openhands_rl_plugin.trajectories.exchange.v1 import write as v1_write
from openhands_rl_plugin.trajectories.exchange.writing import Columns, Folder, JsonFile, ParquetFile, Sink

_JSON_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")

Convert = Callable[[JsonObject, Path], Imported | list[Imported]]
Recognises = Callable[[Mapping[str, JsonValue]], bool]
Rows = Callable[[Trajectory, Sequence[Score]], Iterator[JsonObject]]
Files = Callable[[Trajectory, Sequence[Score], Sequence[Trajectory]], Iterator[tuple[str, JsonObject]]]
"""Rows and their files, of an episode, its scores, and the episodes that people found worse than it."""

_VALID = TrajectoryFilter(failed=False)
_ALL = TrajectoryFilter()
_EVERYTHING = TrajectoryFilter(finished=None)


def _never(row: Mapping[str, JsonValue]) -> bool:
    return False


@dataclass(frozen=True)
class Format:
    """``read`` (of a row), ``source`` (of a path) or ``rows`` is ``None`` for a format that has none.

    ``recognises`` looks at a row; of several formats that know it, the first in ``FORMATS`` is meant.
    ``scope`` says which trajectories it is for, where a person does not say otherwise. ``columns`` are those of a
    Parquet file, and ``None`` where rows have no fixed ones. ``folder`` formats write a file a row. ``conversations``
    are the columns with messages whose calls may have arguments in either form.
    ``rows`` is given trajectories and scores without secrets; ``exact`` ones are written as they are. Those of a format
    that ``compares`` are also given the episodes that are worse, as people said.
    """

    name: str
    help: str
    read: Convert | None = None
    rows: Files | None = None
    scope: TrajectoryFilter = _VALID
    columns: Columns | None = None
    folder: bool = False
    conversations: tuple[str, ...] = ()
    exact: bool = False
    compares: bool = False
    recognises: Recognises = _never
    source: Callable[[Path], Source] | None = None

    @property
    def importable(self) -> bool:
        """Whether it can be read."""
        return self.read is not None or self.source is not None

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
        return lambda *given: ((name, redact_json(change(row))) for name, row in rows(*given))

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
    return lambda trajectory, scores, beaten: (("", row) for row in rows(trajectory, scores))


def _by_row(convert: Callable[[JsonObject], Imported | list[Imported]]) -> Convert:
    return lambda row, file: convert(row)


def _has(*names: str) -> Recognises:
    return lambda row: all(name in row for name in names)


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format(
            "trajectories",
            "everything, one trajectory with its scores a line: moves stores",
            _by_row(trajectories.read),
            _each(trajectories.rows),
            _EVERYTHING,
            exact=True,
            recognises=trajectories.recognises,
        ),
        Format(
            atif.NAME,
            "ATIF of Harbor, with token ids and logprobs",
            atif.read,
            _each(atif_write.rows),
            _ALL,
            recognises=atif.recognises,
        ),
        Format(
            "llm-completions",
            "folder of OpenHands' llm_completions/<instance>/*.json (V0; V1's completion logs in)",
            None,
            lambda trajectory, scores, beaten: llm_completions.rows(trajectory, scores),
            _ALL,
            folder=True,
            recognises=llm_completions.recognises,
            source=llm_completions.source,
        ),
        Format(
            "v1-events",
            "stored conversations of the OpenHands V1 SDK: a folder of events each",
            None,
            lambda trajectory, scores, beaten: v1_write.rows(trajectory, scores),
            _ALL,
            folder=True,
            recognises=v1_events.recognises,
            source=v1_events.source,
        ),
        Format(
            mini_swe_agent.NAME,
            "trajectories of mini-swe-agent, versions 1 and 2",
            mini_swe_agent.read,
            recognises=mini_swe_agent.recognises,
        ),
        Format(swe_agent.NAME, "SWE-agent's .traj", swe_agent.read, recognises=swe_agent.recognises),
        Format(
            swe_agent.NEBIUS,
            "Nebius' data sets of SWE-agent and OpenHands episodes",
            _by_row(swe_agent.read_nebius),
            recognises=swe_agent.recognises_nebius,
        ),
        Format(
            "output-jsonl",
            "output.jsonl of OpenHands' evaluation (V0 events; V1 events in)",
            _by_row(output_jsonl.read),
            _each(output_jsonl.rows),
            _ALL,
            recognises=output_jsonl.recognises,
        ),
        Format(
            data_protocol.NAME,
            "standard form of the agent-data-protocol",
            _by_row(data_protocol.read),
            recognises=data_protocol.recognises,
        ),
        Format(
            trl.NAME,
            "TRL's prompt with completion, or chosen and rejected",
            _by_row(trl.read),
            recognises=trl.recognises,
        ),
        Format(sharegpt.NAME, "ShareGPT's conversations", _by_row(sharegpt.read), recognises=sharegpt.recognises),
        Format(
            "agentgym",
            "AgentGym records, and AgentTraj rows in",
            _by_row(agentgym.read),
            _each(agentgym.rows),
            _ALL,
            recognises=_has("conversations"),
        ),
        Format(
            "sft-text",
            "SFT rows with calls as text, as SWE-Gym publishes them",
            _by_row(sft.import_text),
            _each(sft.text_rows),
            columns=sft.TEXT_COLUMNS,
            recognises=sft.recognises_text,
        ),
        Format(
            "sft-native",
            "SFT rows with native tool calls and a tools column",
            _by_row(sft.import_native),
            _each(sft.native_rows),
            columns=sft.NATIVE_COLUMNS,
            conversations=("messages",),
            recognises=sft.recognises,
        ),
        Format(
            "verifier",
            "rows that train SWE-Gym's outcome verifier (YES or NO)",
            rows=_each(verifier.rows),
            columns=verifier.COLUMNS,
        ),
        Format(
            "preferences",
            "chosen and rejected: actions of a state by search, attempts by `label --pairs`",
            rows=lambda *given: (("", row) for row in trees.preference_rows(*given)),
            columns=trees.PREFERENCE_COLUMNS,
            compares=True,
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
            "predictions",
            "SWE-bench predictions",
            _by_row(predictions.read),
            _each(predictions.rows),
            _ALL,
            predictions.COLUMNS,
            recognises=_has("instance_id", "model_patch"),
        ),
    )
}
# Rows with messages: whether calls stand in their text is a matter of taste.
_ALIKE = {"sft-text", "sft-native", mini_swe_agent.NAME}


def recognised(row: Mapping[str, JsonValue]) -> str | None:
    """The name of the format that a row is in, if it is one of ours."""
    return next((each.name for each in FORMATS.values() if each.recognises(row)), None)


def source_of(path: Path, name: str) -> Source:
    """What is in ``path``, read as the format ``name``.

    A record of another format is an ``ExchangeError`` that says which. Raises ``ConfigError`` with the nearest name.
    """
    found = _known(name)
    if not found.importable:
        raise ConfigError(f"the format {name!r} is for export only")
    if found.source is not None:
        return found.source(path)
    read = found.read
    assert read is not None

    def checked(row: JsonObject, file: Path) -> Imported | list[Imported]:
        if not found.recognises(row) and (other := recognised(row)) not in (None, name) and {name, other} - _ALIKE:
            raise ExchangeError(f"is a record of the format {other}, not {name}")
        return read(row, file)

    return row_source(path, checked)


def recognised_source(path: Path) -> tuple[Source, Counter[str]]:
    """What is in ``path``, each file in its own format, and the names of these with how many files (or folders).

    Raises ``ExchangeError`` for a file whose first record is in none of them.
    """
    if v1_events.is_conversation(path):
        return v1_events.source(path), Counter({"v1-events": 1})
    names: dict[Path, str] = {}
    for file in files_below(path, ROW_SUFFIXES):
        name = _format_of(file)
        if name is not None:
            # All calls of an episode are in one folder.
            names[file.parent if name == "llm-completions" and path.is_dir() else file] = name
    sources = [source_of(each, name) for each, name in names.items()]
    if len(sources) == 1:
        return sources[0], Counter(names.values())

    def units() -> Iterator[Unit]:
        for number, each in enumerate(sources, 1):
            yield from (unit._replace(done=number) for unit in each.units)

    return Source(len(sources), units()), Counter(names.values())


def _format_of(file: Path) -> str | None:
    """By its first record; ``None`` for an empty file, and for files of a trial that its trajectory reads."""
    first = next(rows_of(file), None)
    if first is None or atif.is_trial(file):
        return None
    try:
        name = recognised(first.load())
    except ExchangeError as error:
        raise ExchangeError(f"{first.at}: {error}") from error
    if name is None:
        known = ", ".join(each.name for each in FORMATS.values() if each.importable)
        raise ExchangeError(f"{file}: is in none of the formats {known}; name the one that is meant with --format")
    return name


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
        f"  {each.name:<{width}}  {each.help} ({ways[each.importable, each.rows is not None]})"
        for each in FORMATS.values()
    )


def _known(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(unknown_name("format", name, FORMATS))
    return FORMATS[name]

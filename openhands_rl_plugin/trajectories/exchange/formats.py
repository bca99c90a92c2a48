"""The formats by name: what each is, and how it is read and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from pathlib import Path

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import ConfigError, unknown_name
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.redaction import redact_json
from openhands_rl_plugin.core.types import JsonObject, Score, Trajectory
from openhands_rl_plugin.trajectories.exchange import (
    atif,
    llm_completions,
    predictions,
    sft,
    trajectories,
    trees,
    v0,
    v1,
    verifier,
)
from openhands_rl_plugin.trajectories.exchange.conversations import ArgumentsForm, as_text, with_objects
from openhands_rl_plugin.trajectories.exchange.episodes import Imported
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.reading import (
    ROW_SUFFIXES,
    Source,
    Unit,
    files_below,
    refuse,
    row_source,
    rows_of,
)
from openhands_rl_plugin.trajectories.exchange.writing import Columns, Folder, JsonFile, ParquetFile, Sink

# Records of a file that are read to recognise its format.
_LOOKED_AT = 1000
_JSON_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")

Convert = Callable[[JsonObject, Path], Imported | list[Imported]]
Recognises = Callable[[Mapping[str, JsonValue]], bool]
Rows = Callable[[Trajectory, Sequence[Score]], Iterator[JsonObject]]
Files = Callable[[Trajectory, Sequence[Score], Sequence[Trajectory]], Iterator[tuple[str, JsonObject]]]
"""Rows and their files, of an episode, its scores, and the episodes that people found worse than it."""

_VALID = TrajectoryFilter(failed=False)
_ALL = TrajectoryFilter()
_EVERYTHING = TrajectoryFilter(finished=None)


@dataclass(frozen=True)
class Format:
    """``read`` (of a row), ``source`` (of a path) or ``rows`` is ``None`` for a format that has none.

    ``recognises`` looks at a row; of several formats that know it, one of an entry point is meant. ``messages``:
    rows of chat messages, of which it is a matter of taste whether calls stand in their text.
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
    messages: bool = False
    recognises: Recognises = lambda row: False
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
        change = with_objects if self.conversations and arguments == "object" else lambda row: row
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
            able = ", ".join(each.name for each in formats().values() if each.columns is not None)
            raise ExchangeError(f"{target}: {self.name} has no fixed columns for Parquet; these have: {able}")
        return ParquetFile(target, self.columns if arguments == "object" else as_text(self.columns))


def _each(rows: Rows) -> Files:
    """Rows of one file."""
    return lambda trajectory, scores, beaten: (("", row) for row in rows(trajectory, scores))


def _by_row(convert: Callable[[JsonObject], Imported | list[Imported]]) -> Convert:
    return lambda row, file: convert(row)


OWN = "store"
"""The format whose files the user trusts as what happened here."""
GROUP = "openhands_rl_plugin.formats"
"""Entry points, each a ``Format``."""

FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format(
            "trajectories",
            "everything, one trajectory with its scores a line",
            _by_row(trajectories.read),
            _each(trajectories.rows),
            _EVERYTHING,
            exact=True,
            recognises=trajectories.recognises,
        ),
        Format(
            OWN,
            "such lines of a store of your own, which move it: rewards read their evidence, scores and labels stay",
            _by_row(trajectories.read_own),
            recognises=trajectories.recognises,
        ),
        Format(
            atif.NAME,
            "ATIF of Harbor, with token ids and logprobs",
            atif.read,
            _each(atif.rows),
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
            lambda trajectory, scores, beaten: v1.rows(trajectory, scores),
            _ALL,
            folder=True,
            recognises=v1.recognises,
            source=v1.source,
        ),
        Format(
            "output-jsonl",
            "output.jsonl of OpenHands' evaluation (V0 events, also of save_trajectory_path; V1 events in)",
            _by_row(v0.read),
            _each(v0.rows),
            _ALL,
            recognises=v0.recognises,
        ),
        Format(
            "sft-text",
            "SFT rows with calls as text, as SWE-Gym publishes them",
            _by_row(sft.import_text),
            _each(sft.text_rows),
            columns=sft.TEXT_COLUMNS,
            messages=True,
            recognises=sft.recognises_text,
        ),
        Format(
            "sft-native",
            "SFT rows with native tool calls and a tools column",
            _by_row(sft.import_native),
            _each(sft.native_rows),
            columns=sft.NATIVE_COLUMNS,
            conversations=("messages",),
            messages=True,
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
            recognises=lambda row: {"instance_id", "model_patch"} <= row.keys(),
        ),
    )
}


@cache
def formats() -> Mapping[str, Format]:
    """All of them by name, those of entry points last, as far as they can be loaded."""
    loaded: dict[str, Format] = {}
    for point in _points():
        with suppress(ImportError, AttributeError):
            loaded[point.name] = point.load()
    return {**FORMATS, **loaded}


def _points() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def recognised(row: Mapping[str, JsonValue]) -> str | None:
    """The name of the format that a row is in, if it is one of ours."""
    guests_first = sorted(formats().values(), key=lambda each: each.name in FORMATS)
    return next((each.name for each in guests_first if each.recognises(row)), None)


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
        if (
            not found.recognises(row)
            and (other := recognised(row)) not in (None, name)
            and not (found.messages and _known(other or name).messages)
        ):
            raise ExchangeError(f"is a record of the format {other}, not {name}")
        return read(row, file)

    return row_source(path, checked)


def recognised_source(path: Path) -> tuple[Source, Counter[str]]:
    """What is in ``path``, each file in its own format, and the names of these with how many files (or folders).

    A file whose records are in none of them is a bad record. Raises its ``ExchangeError`` when no file is in one.
    """
    if v1.is_conversation(path):
        return v1.source(path), Counter({"v1-events": 1})
    names: dict[Path, str] = {}
    bad: dict[Path, ExchangeError] = {}
    for file in files_below(path, ROW_SUFFIXES):
        try:
            name = _format_of(file)
        except ExchangeError as error:
            bad[file], name = error, None
        if name is not None:
            # All calls of an episode are in one folder.
            names[file.parent if name == "llm-completions" and path.is_dir() else file] = name
    if bad and not names:
        raise next(iter(bad.values()))
    sources = [source_of(each, name) for each, name in names.items()]
    wrong = [Unit(str(file), 1, partial(refuse, error)) for file, error in bad.items() if file.parent not in names]
    sources += [Source(1, iter([each])) for each in wrong]
    if len(sources) == 1:
        return sources[0], Counter(names.values())

    def units() -> Iterator[Unit]:
        for number, each in enumerate(sources, 1):
            yield from (unit._replace(done=number) for unit in each.units)

    return Source(len(sources), units()), Counter(names.values())


def _format_of(file: Path) -> str | None:
    """By its first record that has one; ``None`` for an empty file and a trial's, which its trajectory reads."""
    if atif.is_trial(file):
        return None
    wrong: ExchangeError | None = None
    for row in islice(rows_of(file), _LOOKED_AT):
        try:
            if (name := recognised(row.load())) is not None:
                return name
            known = ", ".join(each.name for each in formats().values() if each.importable)
            raise ExchangeError(f"is in none of the formats {known}; name the one that is meant with --format")
        except ExchangeError as error:
            wrong = wrong or ExchangeError(f"{row.at}: {error}")
    if wrong is not None:
        raise wrong
    return None


def exportable(name: str) -> Format:
    """The format ``name``. Raises ``ConfigError`` with the nearest name, or when it is for import only."""
    found = _known(name)
    found.files()
    return found


def table() -> str:
    """One line a format, for people."""
    width = max(map(len, formats()))
    ways = {(True, True): "both ways", (True, False): "import", (False, True): "export"}
    return "\n".join(
        f"  {each.name:<{width}}  {each.help} ({ways[each.importable, each.rows is not None]})"
        for each in formats().values()
    )


def _known(name: str) -> Format:
    known = formats()
    if name in known:
        return known[name]
    if (point := next((each for each in _points() if each.name == name), None)) is not None:
        raise ConfigError(f"format {name!r} cannot be loaded from {point.value}; install the package that has it")
    raise ConfigError(unknown_name("format", name, known))

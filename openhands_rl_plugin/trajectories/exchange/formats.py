"""The formats by name: how each is recognised, read and written; the ways of a store into a file and back.

A half-written file never has the final name, and only its owner can read it.
"""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import entry_points
from itertools import batched, takewhile
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError
from pydantic_core import to_json

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary, unknown_name
from openhands_rl_plugin.core.files import PRIVATE, replacing
from openhands_rl_plugin.core.judgements import newest_outcome, patch_of, preferences, resolved, score_of
from openhands_rl_plugin.core.messages import transcript
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import EpisodeGrowth, EpisodeStart, TrajectoryFilter
from openhands_rl_plugin.core.redaction import redact_json, redact_trajectory, redact_value
from openhands_rl_plugin.core.templates import (
    RenderError,
    joined,
    log_sections,
    question,
    single_call_turns,
    text_messages,
)
from openhands_rl_plugin.core.types import (
    SCHEMA_VERSION,
    FailureKind,
    JsonObject,
    Message,
    Score,
    StopReason,
    StrategySpec,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange import events
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ROW_SUFFIXES,
    SCORE_VERSION,
    STRATEGY,
    ExchangeError,
    Imported,
    LeftOutError,
    Record,
    Unit,
    Units,
    arguments_object,
    at_path,
    conversation_of,
    files_below,
    optional,
    present,
    row_episode,
    rows_of,
    spoken_messages,
    what_is_wrong,
    wire_of,
)

IDENTITY = ("trajectory_id", "instance_id", "run_id", "model", "score", "resolved")
RECORD = ("test_result", "patch", "traj_id")
"""Fields of other projects' records, in addition to the judgement."""
PREFERENCE = ("prompt", "chosen", "rejected", "tools", "margin", "chosen_visits", "rejected_visits", "rejected_id")
"""Columns of a preference, in addition to the judgement."""


def identity_columns(trajectory: Trajectory, scores: Sequence[Score]) -> JsonObject:
    """The columns that identify a row and judge it."""
    return {
        "trajectory_id": trajectory.id,
        "instance_id": trajectory.task.id,
        "run_id": trajectory.run_id,
        "model": trajectory.policy.served_name,
        "score": score_of(trajectory, scores),
        "resolved": resolved(trajectory, scores),
    }


def with_objects(row: JsonObject) -> JsonObject:
    """The row with the arguments of all calls as objects, changed in place; a malformed text stays as it is."""
    listed: list[Any] = [each for column in row.values() if isinstance(column, list) for each in column]
    for message in listed:
        for call in (isinstance(message, dict) and message.get("tool_calls")) or ():
            known = arguments_object(call["function"]["arguments"])
            call["function"] |= {} if known is None else {"arguments": known}
    return row


def until_last_answer(messages: Sequence[Message]) -> list[Message]:
    """The messages up to the assistant's last one; nothing is learned from later ones."""
    last = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return list(messages[: last + 1])


def sft_rows(trajectory: Trajectory, scores: Sequence[Score], *, as_text: bool = False) -> Iterator[JsonObject]:
    """A row for each executed path, one unless the history was rewritten: up to its last answer, with its tool calls
    and the tools; ``as_text``: calls as text, results as what the user says.

    Raises ``LeftOutError`` for an episode without an answer, or whose calls no text can carry.
    """
    for answered in _answered(trajectory):
        tools: JsonObject = {} if as_text else {"tools": [*trajectory.tools]}
        try:
            turns = until_last_answer(single_call_turns(answered) if as_text else answered)
            messages = [*text_messages(turns, trajectory.tools)] if as_text else [*map(wire_of, turns)]
        except RenderError as error:
            raise LeftOutError(str(error)) from error
        yield {"messages": [*messages], **tools, **_columns(trajectory, scores)}


def _answered(trajectory: Trajectory) -> list[Any]:
    """The conversations with an answer, as the model saw them."""
    paths = [spoken_messages(trajectory, trajectory.path(end)) for end in trajectory.ends()]
    answered = [messages for messages in paths if any(message.role == "assistant" for message in messages)]
    if not answered:
        raise LeftOutError("it has no answer")
    return answered


def _columns(trajectory: Trajectory, scores: Sequence[Score]) -> JsonObject:
    held = {name: trajectory.evidence.get(name) for name in ("test_result", "traj_id")}
    return {**identity_columns(trajectory, scores), **present(patch=patch_of(trajectory), **held)}


SMALLEST_MARGIN = 0.05
"""Siblings whose values differ by less are no preference: search has not seen enough of a difference."""


def preference_rows(
    trajectory: Trajectory, scores: Sequence[Score], beaten: Sequence[Trajectory] = ()
) -> Iterator[JsonObject]:
    """One row for each state with two or more valued actions, the best against the worst of them, and one for each
    attempt at the same task that people found worse than this one.

    ``prompt``, ``chosen`` and ``rejected`` are conversations in OpenAI's form, as preference trainers read them; the
    prompt of two attempts is what both begin with. ``margin`` is the difference of mean returns, and ``None`` where a
    person chose; ``rejected_id`` is the rejected one's trajectory. Raises ``LeftOutError`` where there is neither.
    """
    pairs: list[JsonObject] = []

    def add(prompt: Sequence[int], chosen: Sequence[int], rejected: list[JsonValue], **more: JsonValue) -> None:
        row: JsonObject = {"prompt": conversation_of(trajectory, prompt), "chosen": conversation_of(trajectory, chosen)}
        fixed: JsonObject = {"rejected": rejected, "tools": [*trajectory.tools], "rejected_id": trajectory.id}
        known = identity_columns(trajectory, scores)
        pairs.append({**dict.fromkeys(PREFERENCE), **row, **fixed, **more, **known})

    for other in beaten:
        shared = _shared_beginning(trajectory, other)
        rejected = conversation_of(other, other.path()[shared:])
        add(trajectory.path()[:shared], trajectory.path()[shared:], rejected, rejected_id=other.id)
    nodes = trajectory.nodes
    for state, siblings in _valued(trajectory).items():
        values = {at: nodes[at].value or 0.0 for at in siblings}
        best, worst = max(values, key=values.__getitem__), min(values, key=values.__getitem__)
        margin = values[best] - values[worst]
        if len(siblings) > 1 and margin >= SMALLEST_MARGIN:
            visits: JsonObject = {"chosen_visits": nodes[best].visits, "rejected_visits": nodes[worst].visits}
            prompt = trajectory.path(state) if state is not None else ()
            add(prompt, (best,), conversation_of(trajectory, (worst,)), margin=margin, **visits)
    if not pairs:
        raise LeftOutError("no state of it has two actions whose values differ, and nobody preferred it to another")
    yield from pairs


def _shared_beginning(one: Trajectory, other: Trajectory) -> int:
    """How many messages both begin with, before the first answer that either of them gave."""
    pairs = zip(one.path(), other.path(), strict=False)
    nodes = ((one.nodes[at], other.nodes[there]) for at, there in pairs)
    shared = takewhile(
        lambda both: both[0].message == both[1].message and not (both[0].sampled or both[1].sampled), nodes
    )
    return sum(1 for _ in shared)


def _valued(trajectory: Trajectory) -> dict[int | None, list[int]]:
    """State -> the sampled nodes below it that a search has valued."""
    states: dict[int | None, list[int]] = {}
    for at, node in enumerate(trajectory.nodes):
        if node.sampled and node.value is not None and node.visits:
            states.setdefault(node.parent, []).append(at)
    return states


def verifier_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One row: the prompt and the judgement. Raises ``LeftOutError`` when the episode has no judgement."""
    judged = resolved(trajectory, scores)
    if judged is None:
        raise LeftOutError("it is not judged: no score, and no report that says resolved")
    answer: JsonObject = {"role": "assistant", "content": f"<judgement>{'YES' if judged else 'NO'}</judgement>"}
    messages: list[JsonValue] = [*question(joined(log_sections(transcript(trajectory)))), answer]
    yield {"messages": messages, **identity_columns(trajectory, scores), "resolved": judged}


def prediction_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One prediction. Raises ``LeftOutError`` for an episode without a recorded patch; an empty patch is one."""
    patch = patch_of(trajectory)
    if patch is None:
        raise LeftOutError("its evidence has no patch")
    model = trajectory.policy.served_name
    yield {"instance_id": trajectory.task.id, "model_patch": patch, "model_name_or_path": model}


def line_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One line with everything, tokens included; ``export_store`` adds the labels."""
    yield Imported(trajectory=trajectory, scores=tuple(scores)).model_dump(mode="json")


def read_line(record: Record) -> Imported:
    """The episode as a file of others holds it: no reward reads its evidence, its newest outcome is an import's score,
    and labels are left out. Raises as ``read_own_line``."""
    own = read_own_line(record)
    by = StrategySpec(name=STRATEGY, options={"strategy": own.trajectory.strategy.model_dump(mode="json")})
    newest = newest_outcome(own.scores)
    kept = () if newest is None else (newest.model_copy(update={"reward_version": SCORE_VERSION}),)
    return Imported(trajectory=own.trajectory.model_copy(update={"strategy": by}), scores=kept)


def read_own_line(record: Record) -> Imported:
    """The same values again. Raises ``ExchangeError``, also for a schema that is newer than this version."""
    version = at_path(record.fields, "trajectory", "schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ExchangeError(f"schema version {version} is newer than {SCHEMA_VERSION}; install a newer version")
    try:
        line = Imported.model_validate(record.fields)
    except ValidationError as error:
        raise ExchangeError(what_is_wrong(error, Imported)) from error
    if any(each.trajectory_id != line.trajectory.id for each in (*line.scores, *line.labels)):
        raise ExchangeError("scores or labels: one belongs to another trajectory")
    return line


_JSON_ENDINGS = (".jsonl", ".jsonl.gz")

Sink = Callable[[JsonObject], object]
"""Writes a row. Raises ``ExchangeError``."""

_ROW_GROUP = 256


@contextmanager
def _json_file(target: Path) -> Iterator[Sink]:
    """JSON Lines, compressed when the target ends with ``.gz``."""
    with _staged(target) as staged, open(staged, "wb") as raw:
        stream: Any = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if target.suffix == ".gz" else raw
        # JSON has no NaN and no infinity; as texts they are read back as the same numbers.
        yield lambda row: stream.write(to_json(row, inf_nan_mode="strings") + b"\n")
        stream.close()


@contextmanager
def _parquet_file(target: Path, columns: Sequence[str]) -> Iterator[Sink]:
    """Rows with fixed columns, as ``datasets`` writes them; values without a column are dropped.

    Raises ``MissingExtraError`` without that library.
    """
    datasets, writing = optional("datasets"), optional("datasets.arrow_writer")
    features = _features(datasets, columns)
    with (
        _staged(target) as staged,
        writing.ParquetWriter(path=str(staged), features=features, writer_batch_size=_ROW_GROUP) as writer,
    ):
        yield lambda row: writer.write(features.encode_example({name: row.get(name) for name in features}))
        writer.finalize()


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """The file becomes ``target`` at the end, and is dropped after an error. Raises ``ExchangeError``."""
    try:
        with replacing(target, PRIVATE) as staged:
            yield staged
    except OSError as error:
        raise ExchangeError(f"{target}: cannot be written: {error}") from error


def _features(datasets: Any, columns: Sequence[str]) -> Any:
    """The types of the columns: text unless it says otherwise here. ``datasets`` reads values that have no common type
    back as they were; trainers take null for absent."""
    text, unlike = datasets.Value("string"), datasets.Json()
    function = {"name": text, "arguments": unlike}
    calls = datasets.List({"id": text, "type": text, "function": function})
    texts = dict.fromkeys(("role", "content", "reasoning_content", "tool_call_id", "name"), text)
    kinds = {
        **dict.fromkeys(("messages", "prompt", "chosen", "rejected"), datasets.List({**texts, "tool_calls": calls})),
        "tools": datasets.List(unlike),
        "test_result": unlike,
        **dict.fromkeys(("score", "margin", "value"), datasets.Value("float64")),
        **dict.fromkeys(("chosen_visits", "rejected_visits", "visits"), datasets.Value("int64")),
        **dict.fromkeys(("resolved", "on_path"), datasets.Value("bool")),
    }
    return datasets.Features({name: kinds.get(name, text) for name in columns})


_VALID, _ALL, _EVERYTHING = TrajectoryFilter(failed=False), TrajectoryFilter(), TrajectoryFilter(finished=None)


@dataclass(frozen=True)
class Format:
    """``read`` (of a row and the path of its file), ``read_folder`` or ``rows`` is ``None`` where there is none.

    ``has``: the fields by which a row is recognised, as alternatives, each of paths such as ``messages.role``, where of
    a list the first element counts; of several formats one of an entry point is meant, else the first.
    ``scope`` says which trajectories it is for, where a person does not say otherwise. ``columns`` are those of a
    Parquet file, none where rows have no fixed ones. ``conversations`` are the columns with messages, whose calls
    are written with their arguments as objects.
    ``rows`` is given trajectories and scores without secrets; ``exact`` ones are written as they are. Those of a format
    that ``compares`` are also given episodes that people found worse.
    """

    name: str
    help: str
    read: Callable[[Record, Path], Imported | list[Imported]] | None = None
    rows: Callable[..., Iterator[Any]] | None = None
    scope: TrajectoryFilter = _VALID
    columns: tuple[str, ...] = ()
    conversations: tuple[str, ...] = ()
    exact: bool = False
    compares: bool = False
    has: tuple[str, ...] = ()
    read_folder: Callable[[Path], Units] | None = None

    @property
    def importable(self) -> bool:
        """Whether it can be read."""
        return self.read is not None or self.read_folder is not None

    def recognises(self, row: JsonObject) -> bool:
        """Whether a row is in this format."""
        return any(all(_holds(row, path.split(".")) for path in paths.split()) for paths in self.has)

    def within(self, where: TrajectoryFilter) -> TrajectoryFilter:
        """The ``scope`` where ``where`` does not say otherwise."""
        failed = self.scope.failed if where.failed is where.failure_kind is None else where.failed
        finished = self.scope.finished if where.finished else where.finished
        return where.model_copy(update={"failed": failed, "finished": finished})

    def sink(self, target: Path) -> AbstractContextManager[Sink]:
        """Open a sink for rows. Raises ``ExchangeError`` for a file type that the format does not support."""
        if target.name.endswith(_JSON_ENDINGS):
            return _json_file(target)
        if target.suffix != ".parquet":
            raise ExchangeError(f"{target}: must end with {', '.join(_JSON_ENDINGS)} or .parquet")
        if not self.columns:
            raise ExchangeError(f"{target}: {self.name} has no fixed columns for Parquet; write .jsonl")
        return _parquet_file(target, self.columns)


def _holds(value: JsonValue, path: Sequence[str]) -> bool:
    for name in path:
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, str):  # a column of JSON
            return value.lstrip().startswith("[")
        value = value.get(name) if isinstance(value, dict) else None
    return value is not None


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
            lambda record, file: read_line(record),
            line_rows,
            _EVERYTHING,
            exact=True,
            has=("trajectory.nodes",),
        ),
        Format(
            OWN,
            "such lines of a store of your own, which move it: rewards read their evidence, scores and labels stay",
            lambda record, file: read_own_line(record),
            has=("trajectory.nodes",),
        ),
        Format(
            events.ATIF,
            "ATIF of Harbor, with token ids and logprobs",
            events.read_atif,
            events.atif_rows,
            _ALL,
            has=("schema_version steps agent",),
        ),
        Format(
            "llm-completions",
            "folder of OpenHands' llm_completions/<instance>/*.json (V0), or of V1's completion logs",
            has=("messages response",),
            read_folder=events.read_completions,
        ),
        Format(
            events.V1_EVENTS,
            "stored conversations of the OpenHands V1 SDK: a folder of events each",
            has=events.V1_FIELDS,
            read_folder=events.read_conversations,
        ),
        Format(
            "output-jsonl",
            "output.jsonl of OpenHands' evaluation (V0 events, also of save_trajectory_path; V1 events in)",
            lambda record, file: events.read_v0(record),
            events.v0_rows,
            _ALL,
            has=("history.source", "instance_id test_result history"),
        ),
        Format(
            "sft-native",
            "SFT rows with native tool calls and a tools column",
            lambda record, file: row_episode(record, "sft-native", record.messages("messages")),
            sft_rows,
            columns=("messages", "tools", *IDENTITY, *RECORD),
            conversations=("messages",),
            has=("messages.role",),
        ),
        Format(
            "sft-text",
            "SFT rows with calls as text, as SWE-Gym publishes them",
            lambda record, file: row_episode(record, "sft-text", record.messages("messages")),
            partial(sft_rows, as_text=True),
            columns=("messages", *IDENTITY, *RECORD),
            has=("messages.role",),
        ),
        Format(
            "verifier",
            "rows that train SWE-Gym's outcome verifier (YES or NO)",
            rows=verifier_rows,
            columns=("messages", *IDENTITY),
        ),
        Format(
            "preferences",
            "chosen and rejected: actions of a state by search, attempts by `score --better-than`",
            rows=preference_rows,
            columns=(*PREFERENCE, *IDENTITY),
            conversations=("prompt", "chosen", "rejected"),
            compares=True,
        ),
        Format(
            "predictions",
            "SWE-bench predictions",
            rows=prediction_rows,
            scope=_ALL,
            columns=("instance_id", "model_patch", "model_name_or_path"),
        ),
    )
}


@cache
def formats() -> Mapping[str, Format]:
    """All of them by name, those of entry points last, as far as they can be loaded."""
    loaded: dict[str, Format] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        with suppress(ImportError, AttributeError):
            loaded[point.name] = point.load()
    return {**FORMATS, **loaded}


def recognised(row: JsonObject) -> str | None:
    """The name of the format that a row is in, if it is one of ours."""
    guests_first = sorted(formats().values(), key=lambda each: each.name in FORMATS)
    return next((each.name for each in guests_first if each.recognises(row)), None)


def source_of(path: Path, name: str | None = None, counts: Counter[str] | None = None) -> Units:
    """Read ``path`` in the format ``name``; without a name, each file in the format of its first known record.

    ``counts`` counts the files (or folders) of each format as they are read. A record in no format, or in another one
    than its file's, yields an ``ExchangeError``. Raises ``ConfigError`` for an unknown name.
    """
    counts = Counter() if counts is None else counts
    form = FORMATS[events.V1_EVENTS] if name is None and events.conversations(path) else name and _known(name)
    if not form:
        return _records(path, files_below(path, ROW_SUFFIXES), None, counts)
    counts[form.name] += 1
    if form.read_folder is not None:
        return form.read_folder(path)
    if form.read is None:
        raise ConfigError(f"the format {name!r} is for export only")
    return _records(path, files_below(path, ROW_SUFFIXES), form, counts)


def _records(path: Path, files: Sequence[Path], given: Format | None, counts: Counter[str]) -> Units:
    whole: set[Path] = set()
    for file in files:
        # A trial is read with its trajectory, and all calls of an episode are in one folder.
        if file.parent in whole or (given is None and events.is_trial(file)):
            continue
        form = given
        for at, read in rows_of(file):
            if form is None:
                with suppress(ExchangeError):
                    form = formats().get(recognised(read()) or "")
                counts.update([form.name] if form else [])
            if form is not None and form.read_folder is not None:
                folder = file.parent if form.name == "llm-completions" and path.is_dir() else file
                whole.add(folder)
                yield from form.read_folder(folder)
                break
            # The place of one row of several is no name of a file.
            yield Unit(at, partial(_read, form, read, Path(at)))


def _read(form: Format | None, row: Callable[[], JsonObject], at: Path) -> Imported | list[Imported]:
    fields = row()
    if form is None or form.read is None:
        known = ", ".join(each.name for each in formats().values() if each.importable)
        raise ExchangeError(f"is in none of the formats {known}; name the one that is meant with --format")
    other = None if form.recognises(fields) else recognised(fields)
    if other not in (None, form.name):
        raise ExchangeError(f"is a record of the format {other}, not {form.name}")
    return form.read(Record(fields), at)


def exportable(name: str) -> Format:
    """The format ``name``. Raises ``ConfigError`` with the nearest name, or when it is for import only."""
    found = _known(name)
    if found.rows is None:
        raise ConfigError(f"the format {name!r} is for import only")
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
    if (found := formats().get(name)) is not None:
        return found
    for point in entry_points(group=GROUP, name=name):
        raise ConfigError(f"format {name!r} cannot be loaded from {point.value}; install the package that has it")
    raise ConfigError(unknown_name("format", name, formats()))


# Episodes in memory at a time, which share a flush of the store.
_BATCH = 16

Advanced = Callable[[int], None]


@dataclass
class ExportReport:
    """Counts of an export. ``left_out``: reason -> how many."""

    trajectories: int = 0
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass
class ImportReport:
    """Counts of an import. ``bad`` has the place and the fault of each record that could not be read."""

    records: int = 0
    new: int = 0
    scores: int = 0
    bad: list[str] = field(default_factory=list)


async def export_store(
    storage: TrajectoryStorage,
    where: TrajectoryFilter,
    form: Format,
    sink: Sink,
    *,
    wanted: bool | None = None,
    advanced: Advanced = lambda done: None,
) -> ExportReport:
    """Write the matches, without secrets, as ``form.rows`` makes them; ``wanted`` keeps the
    resolved (or unresolved) ones only. A form that ``compares`` is given the other matches that people found worse;
    ``exact`` rows get a column with the episode's labels.

    ``where.limit`` counts what is written. ``advanced`` is called with how many trajectories were read.
    """
    assert form.rows is not None, "an exportable() format"
    report, looked = ExportReport(), 0
    every = where.model_copy(update={"limit": None})
    worse = await _worse(storage, every) if form.compares else {}
    async for trajectory, scores in storage.find(every):
        if report.trajectories == where.limit:
            break
        looked += 1
        if wanted is None or resolved(trajectory, scores) is wanted:
            losers = TrajectoryFilter(ids=worse.get(trajectory.id, ()))
            beaten = [redact_trajectory(other) async for other, _ in storage.find(losers)] if losers.ids else []
            clean = (redact_trajectory(trajectory), [*map(redact_value, scores)], *([beaten] if form.compares else []))
            try:
                # All rows of an episode or none: one that is left out leaves nothing behind.
                made: list[JsonObject] = [*form.rows(*clean)]
            except LeftOutError as reason:
                report.left_out[str(reason)] += 1
            else:
                labels = await storage.labels([trajectory.id]) if form.exact else ()
                noted: list[JsonValue] = [redact_value(label).model_dump(mode="json") for label in labels]
                for row in made:
                    row = with_objects(row) if form.conversations else row
                    # Rendering may bring the parts of a secret together, so the written row is checked as well.
                    row = row if form.exact else redact_json(row)
                    if noted:
                        row["labels"] = noted
                    sink(row)
                report.rows += len(made)
                report.trajectories += 1
        advanced(looked)
    return report


async def _worse(storage: TrajectoryStorage, where: TrajectoryFilter) -> dict[str, tuple[str, ...]]:
    """Episode -> those that people found worse than it."""
    ids = [summary.id async for summary in storage.summaries(where)]
    known = frozenset(ids)
    worse: dict[str, tuple[str, ...]] = {}
    for both, better in preferences(await storage.labels(ids)).items():
        if better is not None and both <= known:
            worse[better] = (*worse.get(better, ()), *(both - {better}))
    return worse


async def import_source(
    source: Units, storage: TrajectoryStorage, *, advanced: Advanced = lambda done: None
) -> ImportReport:
    """Store every record that can be read, once; the report names the others. ``advanced`` gets how many were read."""
    report = ImportReport()
    for batch in batched(_episodes(source, advanced, report), _BATCH):
        await _store(batch, storage, report)
    return report


def _episodes(source: Units, advanced: Advanced, report: ImportReport) -> Iterator[Imported]:
    for unit in source:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "import"):
                found = unit.read()
        except (ExchangeError, CaughtFailure) as error:
            report.bad.append(str(error) if str(error).startswith(unit.at) else f"{unit.at}: {error}")
        else:
            report.records += 1
            yield from found if isinstance(found, list) else [found]
        advanced(report.records + len(report.bad))


async def _store(batch: Sequence[Imported], storage: TrajectoryStorage, report: ImportReport) -> None:
    ids = tuple(each.trajectory.id for each in batch)
    found = {each.id: (each, scores) async for each, scores in storage.find(TrajectoryFilter(ids=ids, finished=None))}
    known = {name: trajectory for name, (trajectory, _) in found.items()}
    judged = {(name, _as_stored(score)) for name, (_, scores) in found.items() for score in scores}
    added: dict[str, Trajectory] = {}
    scores: list[Score] = []
    for each in batch:
        name = each.trajectory.id
        ended = each.trajectory.stop is not StopReason.UNFINISHED
        if name not in known or (ended and known[name].stop is StopReason.UNFINISHED):
            known[name] = added[name] = each.trajectory
        marks = [(name, _as_stored(score)) for score in each.scores]
        scores += [score for mark, score in zip(marks, each.scores, strict=True) if mark not in judged]
        judged.update(marks)
    await asyncio.gather(*(_add(each, storage) for each in added.values()))
    await storage.add_scores(scores)
    report.new += len(added.keys() - found.keys())
    report.scores += len(scores)
    await storage.add_labels([label for each in batch for label in each.labels])


def _as_stored(score: Score) -> str:
    # As text, because a NaN is not equal to itself.
    return redact_value(score).model_dump_json()


async def _add(found: Trajectory, storage: TrajectoryStorage) -> None:
    if found.stop is not StopReason.UNFINISHED:
        await storage.add(found)
        return
    await storage.begin(EpisodeStart.of(found))
    await storage.grow(EpisodeGrowth(trajectory_id=found.id, first=0, nodes=found.nodes, head=found.head))

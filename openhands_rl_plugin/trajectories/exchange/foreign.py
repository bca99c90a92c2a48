"""Records of other programs: their files, the rows of these one at a time, the fields and the chat messages of a row,
and the trajectories that these become.

Null means absent, unknown fields are left alone, and every error names its row or its field. No tokens were reported
for most records, so none are invented: ``Node.tokens`` is ``None`` and the strategy says where the episode came from.
The id is a digest of the content, so the same record imported twice is one trajectory.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import re
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache, partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import RLError, from_extra, problems
from openhands_rl_plugin.core.messages import (
    SpokenMessage,
    json_object,
    plain_message,
    reasoning_in,
    reasoning_of,
    reasoning_with,
    text_of,
    to_message,
    to_wire,
    whole_json,
    whole_text,
)
from openhands_rl_plugin.core.records import Label
from openhands_rl_plugin.core.tree import REPLAYED_AS, EpisodeTree
from openhands_rl_plugin.core.types import (
    Bounded,
    Completion,
    EpisodeRequest,
    Failure,
    Frozen,
    JsonObject,
    Message,
    PolicyRef,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Tokens,
    ToolCall,
    Trajectory,
)


class ExchangeError(RLError):
    """A record cannot be read, or a file cannot be read or written."""


class LeftOutError(ExchangeError):
    """A trajectory that a format cannot represent; the others are written."""


def what_is_wrong(error: ValidationError, model: type[BaseModel] = BaseModel) -> str:
    """The first wrong fields of a record, in one line."""
    lines = [": ".join(filter(None, (".".join(at), what))) for at, what in problems(error, model)]
    return "; ".join(lines[:5])


@contextmanager
def within(place: str) -> Iterator[None]:
    """Name ``place`` in an ``ExchangeError`` of the block."""
    try:
        yield
    except ExchangeError as error:
        raise ExchangeError(f"{place}: {error}") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind is str:
        return TypeAdapter(str, config=ConfigDict(coerce_numbers_to_str=True))
    return TypeAdapter(Bounded if kind is float else kind)


class Record:
    """The fields of a JSON object. Unions of data sets fill absent fields with null, so null is the same as absent.

    Its methods raise ``ExchangeError`` that names the field; ``at`` is the place of the object in its row.
    """

    def __init__(self, value: object, at: str = "") -> None:
        if not isinstance(value, dict):
            raise ExchangeError(f"{f'{at}: ' * bool(at)}must be a JSON object, not {type(value).__name__}")
        self.fields: JsonObject = {name: each for name, each in value.items() if each is not None}
        self._at = f"{at}." if at else ""

    def get(self, *names: str) -> JsonValue:
        """The first of the fields that is there, unchecked."""
        return next((self.fields[name] for name in names if name in self.fields), None)

    def read[Kind](self, kind: type[Kind], *names: str) -> Kind | None:
        """The first of the fields that is there: a text (or a number, as text), a number, a flag, an object, a list."""
        if (value := self.get(*names)) is None:
            return None
        try:
            return _adapter(kind).validate_python(value)
        except ValidationError as error:
            raise ExchangeError(f"{self._at}{names[0]}: {what_is_wrong(error)}") from error

    def text(self, *names: str) -> str:
        """A text, which is empty where there is none."""
        return self.read(str, *names) or ""

    def record(self, name: str) -> Record:
        """An object, which is empty where there is none."""
        return Record(self.read(dict, name) or {}, f"{self._at}{name}")

    def records(self, name: str) -> list[Record]:
        """The objects of a list."""
        return [Record(each, f"{self._at}{name}[{at}]") for at, each in enumerate(self.read(list, name) or ())]

    def messages(self, name: str) -> tuple[RecordMessage, ...]:
        """Chat messages, as a list or as JSON."""
        with within(f"{self._at}{name}"):
            return chat_messages(self.get(name) or [])


def at_path(value: object, *names: str) -> Any:
    """The value at this path of names in nested objects, or ``None``."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def object_at(value: object, *names: str) -> JsonObject:
    """The object below these names, empty where there is none."""
    return json_object(at_path(value, *names))


def present(**values: Any) -> JsonObject:
    """The values that are not ``None``."""
    return {name: value for name, value in values.items() if value is not None}


class RecordMessage(SpokenMessage):
    """A message of a record. ``context_only``: the record says that nothing is to be learned from it. The rest is what
    the record says of a sampled one; ``policy`` where it is another one than the record's, ``tokens`` with the whole
    prompt.
    """

    context_only: bool = False
    policy: PolicyRef | None = None
    tokens: Tokens | None = None
    finish_reason: str | None = None
    reward: float | None = None


_CONTEXT_ONLY: Mapping[str, bool] = {
    **dict.fromkeys(("is_demo", "mask", "masked", "is_copied_context"), True),
    **dict.fromkeys(("weight", "loss_weight", "loss", "loss_mask", "step_loss_mask"), False),
    **dict.fromkeys(("train", "training", "trainable"), False),
}
"""The fields by which records mark a message that is context only -> whether they are true or false on it."""
_MARKS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_LINKS = ("tool_call_id", "tool_call_ids", "call_id", "tool_use_id", "source_call_id")


def is_context_only(entry: Mapping[str, object]) -> bool:
    """Whether a mark of any format says that a message was not sampled, or is not to be trained."""
    return any(_MARKS.get(str(entry.get(name)).lower()) is held for name, held in _CONTEXT_ONLY.items())


def linked_call(entry: Mapping[str, object]) -> str | None:
    """The id of the call that a result belongs to. Raises ``ExchangeError`` for several."""
    given = next((entry[name] for name in _LINKS if entry.get(name) not in (None, "", [])), None)
    ids = given if isinstance(given, list) else [given]
    if len(ids) != 1 or not isinstance(ids[0], str | int | None):
        raise ExchangeError(f"a result belongs to one call, and this one names {given!r:.80}")
    return None if ids[0] is None else str(ids[0])


def chat_message(wire: object) -> RecordMessage:
    """An OpenAI chat message as records have it. Raises ``ExchangeError``."""
    if not isinstance(wire, dict):
        raise ExchangeError(f"must be a chat message, not {type(wire).__name__}")
    parts = wire.get("content")
    if isinstance(parts, list) and any(at_path(part, "type") in ("tool_use", "tool_result") for part in parts):
        raise ExchangeError("has calls or results among the parts of its content: write them as OpenAI does")
    # A columnar data set gives every call the fields of all calls.
    filled = {name: without_nulls(wire[name]) for name in ("tool_calls", "function_call") if wire.get(name)}
    try:
        message = to_message({**wire, **filled, "tool_call_id": linked_call(wire)})
    except ValidationError as error:
        raise ExchangeError(what_is_wrong(error, RecordMessage)) from error
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ExchangeError(f"has not the form of a chat message ({error!r})") from error
    return RecordMessage(**dict(message), reasoning=reasoning_in(wire), context_only=is_context_only(wire))


def chat_messages(value: object) -> tuple[RecordMessage, ...]:
    """Chat messages, as a list or as JSON. Raises ``ExchangeError``."""
    listed = from_text(value) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        raise ExchangeError(f"must be a list of chat messages, not {type(listed).__name__}")
    return tuple(map(chat_message, listed))


def without_nulls(value: JsonValue) -> Any:
    """``value`` without null fields, at any depth: the inverse of what a columnar dataset does to nested objects."""
    if isinstance(value, dict):
        inner = {key: without_nulls(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in inner.items() if item or not value[key] or not isinstance(item, dict)}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def tools_of(value: JsonValue) -> tuple[JsonObject, ...]:
    """Tools, or their functions alone, as a list or as JSON, with null-filled fields. Raises ``ExchangeError``."""
    listed = without_nulls((from_text(value) if isinstance(value, str) and value.strip() else value) or [])
    return tuple(map(_tool, listed if isinstance(listed, list) else [None]))


def _tool(tool: JsonValue) -> JsonObject:
    """A tool in chat format. V1 logs a tool by its class name, with parameters only for a tool of MCP."""
    if isinstance(tool, dict) and isinstance(at_path(tool, "function", "name"), str):
        return tool
    mcp, own = object_at(tool, "mcp_tool"), object_at(tool)
    of_class = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", str(own.get("kind", ""))).lower()
    name = mcp.get("name") or own.get("name") or of_class.removesuffix("_tool")
    if not isinstance(name, str) or not name:
        raise ExchangeError('tools: must be a list of {"type": "function", "function": {"name": ...}}')
    # Anthropic and MCP have other names for the parameters.
    schemas = (each.get(key) for each in (own, mcp) for key in ("parameters", "input_schema", "inputSchema"))
    about = present(description=own.get("description"), parameters=next(filter(None, schemas), None))
    return {"type": "function", "function": {"name": name, **about}}


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def from_text(text: str | bytes) -> JsonValue:
    """JSON, with U+FFFD for what no file can hold. Raises ``ExchangeError`` that says where it is broken."""
    try:
        return from_json(text.removeprefix(_BYTE_ORDER_MARK) if isinstance(text, bytes) else text)
    except ValueError as error:
        try:
            decoded = text.decode("utf-8-sig", "replace") if isinstance(text, bytes) else text
            return from_json(json.dumps(whole_json(json.loads(decoded))))
        except (ValueError, RecursionError):
            raise ExchangeError(f"not valid JSON: {error}") from error


_PEEK = 2**20

ROW_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".traj", ".traj.gz")
CONVERSATION_FILE = "messages"
"""``trajectory_format`` of a row that is a whole file: a list of messages."""


class Unit(NamedTuple):
    """One row to come, as an object or as what an importer makes of it.

    ``at`` is its place ("file:line"). ``read`` raises ``ExchangeError``, which then concerns this row only.
    """

    at: str
    read: Callable[[], Any]


Units = Iterator[Unit]


def files_below(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """``path`` itself, or the files in it that end so. Raises ``ExchangeError`` when there is none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ExchangeError(f"{path}: no such file or folder")
    found = sorted(each for each in path.rglob("*") if each.name.endswith(suffixes) and each.is_file())
    if not found:
        raise ExchangeError(f"{path}: no file in it ends with {' or '.join(suffixes)}")
    return found


def rows_of(file: Path) -> Units:
    """The rows of one file: JSON Lines, JSON, Parquet; gzip. What cannot be read of the file is a row that says so."""
    try:
        yield from _parquet_rows(file) if file.name.endswith(".parquet") else _json_rows(file)
    except ExchangeError as error:
        yield Unit(str(file), partial(_refuse, error))


def _refuse(error: ExchangeError) -> Any:
    raise error


def _json_rows(file: Path) -> Units:
    with _opened(file) as stream:
        start = stream.peek(_PEEK).removeprefix(_BYTE_ORDER_MARK).lstrip()
        line, _, more = start.partition(b"\n")
        # One object a line, whatever the file is called; a pretty-printed document has not.
        objects = line.startswith(b"{") and line.rstrip().endswith(b"}") and bool(more.strip())
        if objects or (".jsonl" in file.name and not start.startswith(b"[")):
            for number, line in enumerate(stream, 1):
                if not line.isspace():
                    yield Unit(f"{file}:{number}", lambda line=line: _object(from_text(line)))
        else:
            with within(str(file)):
                document = from_text(stream.read())
            yield from _members(file, document)


def read_document(file: Path) -> JsonObject:
    """A file that is one JSON object. Raises ``ExchangeError``."""
    with _opened(file) as stream, within(str(file)):
        return _object(from_text(stream.read()))


@contextmanager
def _opened(file: Path) -> Iterator[io.BufferedReader[Any]]:
    try:
        with open(file, "rb", buffering=0) as raw:
            source: Any = gzip.GzipFile(fileobj=raw) if file.name.endswith(".gz") else raw
            yield io.BufferedReader(source, _PEEK)
    except (OSError, EOFError, zlib.error) as error:
        raise ExchangeError(f"{file}: cannot be read: {error}") from error


def _members(file: Path, document: JsonValue) -> Units:
    """The rows of an array. An object is one row, as a list of chat
    messages is, and one of events of OpenHands V0, as its ``save_trajectory_path`` and its server have them."""
    listed = document.get("trajectory") if isinstance(document, dict) else document
    if isinstance(document, list) and _all_have(document, {"role"}, {"content", "tool_calls"}):
        document = {"messages": document, "trajectory_format": CONVERSATION_FILE}
    elif isinstance(listed, list) and _all_have(listed, {"source"}, {"action", "observation"}):
        document = {"history": listed}
    rows = document if isinstance(document, list) else [document]
    for number, row in enumerate(rows):
        yield Unit(f"{file}[{number}]" if isinstance(document, list) else str(file), lambda row=row: _object(row))


def _all_have(values: Collection[JsonValue], names: set[str], some: set[str]) -> bool:
    """Whether all are objects with all of ``names`` and one of ``some``."""
    objects = [value for value in values if isinstance(value, dict) and names <= value.keys() and some & value.keys()]
    return 0 < len(objects) == len(values)


def _parquet_rows(file: Path) -> Units:
    datasets, pyarrow, parquet = optional("datasets"), optional("pyarrow"), optional("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            # Columns may hold JSON, which ``datasets`` marks.
            decode = datasets.Features.from_arrow_schema(table.schema_arrow).decode_example
            rows = (row for batch in table.iter_batches(batch_size=64) for row in batch.to_pylist())
            for number, row in enumerate(rows):
                # Times and decimals are no JSON; what has them is written as text.
                read = partial(lambda row: _object(from_text(json.dumps(decode(row), default=str))), row)
                yield Unit(f"{file}[{number}]", read)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ExchangeError(f"{file}: cannot be read as Parquet: {error}") from error


def optional(module: str) -> Any:
    """A module that comes with ``datasets``. Raises ``MissingExtraError`` without that library."""
    with from_extra("exchange", "datasets"):
        return import_module(module)


def _object(value: JsonValue) -> JsonObject:
    if not isinstance(value, dict):
        raise ExchangeError(f"must be a JSON object, not {type(value).__name__}")
    return value


UNKNOWN = "unknown"
STRATEGY = "imported"
SWE = "swe"
SCORE_VERSION = "imported-1"
UNKNOWN_TIMES = Times(started=0.0, finished=0.0)

_NAMESPACE = uuid.UUID("6b0f5f2e-0c1c-5f0e-9a55-5d2f6f8e7c11")
_FINISHING = {"finish", "submit"}


class Imported(Frozen):
    """One episode as it goes into a store, with what judges it and what people noted on it."""

    trajectory: Trajectory
    scores: tuple[Score, ...] = ()
    labels: tuple[Label, ...] = ()


def add_message(tree: EpisodeTree, message: Message, policy: PolicyRef | None) -> int:
    """Append ``message`` and move the head to it; it was sampled when there is a ``policy``."""
    reasoning, plain = reasoning_with(message), plain_message(message)
    metadata: JsonObject = present(reasoning_content=reasoning)
    if policy is None:
        tree.head = tree.append(plain)
        tree.nodes[tree.head].metadata.update(metadata)
        return tree.head
    answer = Completion(message=plain, policy=policy, metadata=metadata)
    if isinstance(message, RecordMessage):
        known = {"policy": message.policy or policy, "tokens": message.tokens, "finish_reason": message.finish_reason}
        answer = answer.model_copy(update=known)
    tree.commit(at := tree.propose(answer))
    tree.nodes[at].reward = message.reward if isinstance(message, RecordMessage) else None
    return at


def conversation(
    messages: Iterable[Message],
    model: str | PolicyRef | None = None,
    tools: Sequence[JsonObject] = (),
    *,
    given: int = 0,
) -> EpisodeTree:
    """A tree with one path, in which the model sampled the answers behind the first ``given`` messages,
    but for what the record marks as context only."""
    tree = EpisodeTree(tools=tools)
    for at, message in enumerate(_linked(messages)):
        sampled = message.role == "assistant" and at >= given and not _is_context_only(message)
        add_message(tree, message, policy_of(model) if sampled else None)
    return tree


def follow(tree: EpisodeTree, prompt: Iterable[Message]) -> None:
    """Move the head to the end of ``prompt``: along the nodes that the tree has of it, and then along new ones.

    White space around a text is no difference, nor an empty text that is null elsewhere; the other form of an answer is
    noted on it.
    """
    at: int | None = None
    for message in prompt:
        same = next(
            (child for child in reversed(tree.children(at)) if _alike(tree.nodes[child].message, message)), None
        )
        if same is None:
            tree.head = at
            at = add_message(tree, message, None)
            continue
        at, node = same, tree.nodes[same]
        if node.sampled and node.message != plain_message(message):
            node.metadata[REPLAYED_AS] = plain_message(message).model_dump(mode="json", exclude_defaults=True)
    tree.head = at


def _alike(known: Message, message: Message) -> bool:
    names = ("role", "tool_calls", "tool_call_id")
    same = all(getattr(known, name) == getattr(message, name) for name in names)
    return same and (known.content or "").strip() == (message.content or "").strip()


def policy_of(model: str | PolicyRef | None) -> PolicyRef:
    """The weights as far as a record names them."""
    return model if isinstance(model, PolicyRef) else PolicyRef(base_model=model or UNKNOWN)


def _linked(messages: Iterable[Message]) -> Iterator[Message]:
    """The messages with the ids that their record leaves out: of calls, and of the calls that results belong to.

    A result without an id is that of the first open call of its name, or of any name.
    """
    waiting: list[ToolCall] = []
    for at, message in enumerate(messages):
        if message.role == "assistant":
            waiting = [
                call if call.id else call.model_copy(update={"id": f"call_{at}_{number}"})
                for number, call in enumerate(message.tool_calls, 1)
            ]
            message = message.model_copy(update={"tool_calls": tuple(waiting)})
        elif message.role == "tool":
            known = [call for call in waiting if message.tool_call_id == call.id]
            called = known or [call for call in waiting if call.name == message.name] or waiting
            if called and (known or message.tool_call_id is None):
                message = message.model_copy(update={"tool_call_id": called[0].id})
                waiting = [call for call in waiting if call is not called[0]]
            elif message.tool_call_id is None:
                # The result of a call that stands in the text is text, too.
                message = message.model_copy(update={"role": "user"})
        yield message


def task_of(
    messages: Sequence[Message], environment: str, *names: str | None, row: str | None = None, given: int = 0
) -> Task:
    """The task of a conversation: by the first name that there is, or by the id of its ``row``; else by its first
    ``given`` messages, or by those before the first answer. They tell rows apart whose ids are numbers, too."""
    before = takewhile(lambda each: each.role != "assistant" or _is_context_only(each), messages)
    prompt = [plain_message(each).model_dump_json() for each in messages[:given] or [*before] or messages]
    digest = hashlib.sha256("\0".join(prompt).encode()).hexdigest()[:16]
    own = f"{row}-{digest}" if row and row.isdecimal() else row or digest
    by_user = (each.content for each in messages if each.role == "user" and not _is_context_only(each))
    instruction = next(by_user, None) or ""
    return Task(id=next(filter(None, names), own), environment=environment, instruction=instruction)


def _is_context_only(message: Message) -> bool:
    return isinstance(message, RecordMessage) and message.context_only


def finished(
    tree: EpisodeTree,
    form: str,
    task: Task,
    stop: StopReason | None = None,
    *,
    model: str | PolicyRef | None = None,
    run_id: str | None = None,
    group_id: str | None = None,
    identity: str | None = None,
    evidence: JsonObject | None = None,
    reward: float | None = None,
    resolved: bool | None = None,
    failure: Failure | None = None,
    times: Times = UNKNOWN_TIMES,
    tokens: int | None = None,
) -> Imported:
    """The episode as a trajectory, with a score when its reward is known or what it ``resolved``.

    ``form``: the name of the format. ``stop``: by default what the last message says. ``model``, ``run_id`` and
    ``group_id`` are those of the record, if it names them; ``tokens``: how many answers have ids.
    """
    run_id = run_id or UNKNOWN
    trajectory = tree.freeze(
        EpisodeRequest(task=task, run_id=run_id, group_id=group_id or f"{run_id}/{task.id}"),
        trajectory_id="",
        strategy=StrategySpec(name=STRATEGY, options={"format": form, "tokens": tokens}),
        policy=policy_of(model),
        stop=stop or end_of(tree.messages()),
        times=times,
        evidence=evidence,
        failure=failure,
    )
    # Times are left out: a copied file has new ones.
    content = trajectory.model_dump_json(exclude={"id", "times", "schema_version"})
    digest = hashlib.sha256(content.encode()).hexdigest()
    identity = identity or str(uuid.uuid5(_NAMESPACE, f"{form}\n{digest}"))
    found = trajectory.model_copy(update={"id": identity})
    reward = float(resolved) if reward is None and resolved is not None else reward
    if reward is None:
        return Imported(trajectory=found)
    detail = {"format": form, **present(resolved=resolved)}
    score = Score(trajectory_id=identity, reward=reward, detail=detail, reward_version=SCORE_VERSION)
    return Imported(trajectory=found, scores=(score,))


def row_episode(
    record: Record,
    form: str,
    answers: Sequence[Message],
    prompt: Sequence[Message] = (),
    *,
    environment: str = SWE,
    reward: float | None = None,
) -> Imported:
    """The episode of a row: the system prompt's column, the conversation, and facts of the known other columns.

    ``prompt``: the messages before the completions, if they are a separate column; none of them was sampled. Raises
    ``ExchangeError``, also for a row without completions.
    """
    if not any(message.role == "assistant" for message in answers):
        raise ExchangeError("there is no answer in it")
    messages, system = (*prompt, *answers), whole_text(text_of(record.get("system", "system_prompt")) or "")
    if system and (messages[0].role, messages[0].content) != ("system", system):
        messages = (Message(role="system", content=system), *messages)
    given = len(messages) - len(answers) if prompt else 0
    names = (record.read(str, "instance_id"), record.read(str, "task_id"))
    model, resolved = record.read(str, "model"), record.read(bool, "resolved")
    return finished(
        conversation(messages, model, tools_of(record.get("tools", "functions")), given=given),
        form,
        task_of(messages, environment, *names, row=record.read(str, "id"), given=given),
        model=model,
        run_id=record.read(str, "run_id"),
        evidence=present(
            resolved=resolved,
            test_result=without_nulls(record.get("test_result")),
            patch=record.read(str, "patch"),
            traj_id=record.read(str, "traj_id"),
        ),
        reward=record.read(float, "score", "reward") if reward is None else reward,
        resolved=resolved,
    )


def end_of(messages: Sequence[Message]) -> StopReason:
    """Why an episode ended whose record does not say so: by the agent's last word, or cut short."""
    last = next((message for message in reversed(messages) if message.role == "assistant"), None)
    if last is not None and (not last.tool_calls or any(call.name in _FINISHING for call in last.tool_calls)):
        return StopReason.TERMINATED
    return StopReason.TRUNCATED


def times_of(stamps: Iterable[object]) -> Times:
    """The first and the last of some times, each ISO 8601 or Unix seconds; what is no time is left out."""
    seconds: list[float] = []
    for stamp in stamps:
        with suppress(ValueError, OverflowError):
            date = datetime.fromisoformat(stamp) if isinstance(stamp, str) else None
            # Records write local times without a zone; those are taken for UTC.
            at = stamp if date is None else (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
            seconds += [float(at)] if isinstance(at, int | float) and math.isfinite(at) else []
    return Times(started=min(seconds), finished=max(seconds)) if seconds else UNKNOWN_TIMES


def date_of(seconds: float) -> datetime:
    """A Unix time as a date. Raises ``LeftOutError`` for a number that is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise LeftOutError(f"its time is no date: {seconds:g} seconds since 1970") from error


def spoken_messages(trajectory: Trajectory, nodes: Sequence[int]) -> list[SpokenMessage]:
    """The messages of some nodes, answers with their reasoning."""
    wanted = (trajectory.nodes[at] for at in nodes)
    thoughts = ((node, reasoning_of(node) if node.message.role == "assistant" else None) for node in wanted)
    return [SpokenMessage(**dict(node.message), reasoning=text, sampled=node.sampled) for node, text in thoughts]


def wire_of(message: Message) -> JsonObject:
    """An OpenAI chat message, its reasoning in ``reasoning_content``."""
    return {**to_wire(message), **present(reasoning_content=reasoning_with(message))}


def conversation_of(trajectory: Trajectory, path: Sequence[int]) -> list[JsonValue]:
    """The messages of some nodes, for a row."""
    return [wire_of(message) for message in spoken_messages(trajectory, path)]


def arguments_object(arguments: str) -> JsonObject | None:
    """The arguments of a call as an object; ``None`` when the text is none."""
    try:
        value = from_text(arguments or "{}")
    except ExchangeError:
        return None
    return value if isinstance(value, dict) else None

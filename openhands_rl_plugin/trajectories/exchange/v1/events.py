"""Stored conversations of OpenHands' V1 SDK: folders with an event a file, or one file with an event a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from pydantic import Field, JsonValue, ValidationError

from openhands_rl_plugin.core.records import SUB_AGENT, SubAgentOf, sub_agents_run
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject, PolicyRef, StopReason, Task, Trajectory
from openhands_rl_plugin.trajectories.exchange.episodes import UNKNOWN, Ending, Imported, Origin, end_of, finished
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, Foreign, parse
from openhands_rl_plugin.trajectories.exchange.reading import Source, Unit, files_below, read_document, rows_of
from openhands_rl_plugin.trajectories.exchange.v1.read import Log, read_log
from openhands_rl_plugin.trajectories.exchange.v1.write import SUB_AGENT_STATE

ENVIRONMENT = "openhands"
_STATE = "base_state.json"
_EVENTS = "events"
_SUB_AGENTS = "subagents"
EVENT_KINDS = frozenset(
    {
        "SystemPromptEvent",
        "MessageEvent",
        "ActionEvent",
        "ObservationEvent",
        "UserRejectObservation",
        "AgentErrorEvent",
        "ConversationErrorEvent",
        "Condensation",
        "CondensationRequest",
        "CondensationSummaryEvent",
        "ConversationStateUpdateEvent",
        "LLMCompletionLogEvent",
        "PauseEvent",
        "TokenEvent",
    }
)
_REGULAR_ENDS = {"MaxIterationsReached": StopReason.MAX_TURNS}


class Llm(Foreign):
    """The part that names the model."""

    model: str | None = None


class AgentState(Foreign):
    """The agent of a conversation."""

    llm: Llm = Llm()


class BaseState(Foreign):
    """``base_state.json`` as far as it is needed: secrets and settings are not read."""

    id: str = ""
    agent: AgentState = Field(default_factory=AgentState)
    execution_status: str | None = None
    leaf_event_id: str | None = None
    agent_state: JsonValue = None

    @property
    def sub_agent(self) -> SubAgentOf | None:
        """What our export says of it. The SDK's own states say nothing."""
        said = self.agent_state.get(SUB_AGENT_STATE) if isinstance(self.agent_state, dict) else None
        try:
            return SubAgentOf.model_validate(said)
        except ValidationError:
            return None


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """By its kind and its source."""
    return isinstance(kind := row.get("kind"), str) and kind in EVENT_KINDS and "source" in row


def is_conversation(path: Path) -> bool:
    """Whether a folder is a stored conversation, or has some in it."""
    return path.is_dir() and bool(_conversations(path))


def source(path: Path) -> Source:
    """A conversation's folder, a folder of such folders, or files with all events of a conversation each."""
    if path.is_dir() and (folders := _conversations(path)):
        ids = cache(partial(_ids_of, folders))
        units = (
            Unit(str(folder), number, lambda folder=folder: _from_folder(folder, ids))
            for number, folder in enumerate(folders, 1)
        )
        return Source(len(folders), units)
    files = files_below(path, (".jsonl", ".json", ".jsonl.gz"))
    units = (Unit(str(file), number, lambda file=file: _from_file(file)) for number, file in enumerate(files, 1))
    return Source(len(files), units)


def _conversations(path: Path) -> list[Path]:
    if (path / _EVENTS).is_dir():
        begun = path / _SUB_AGENTS
        return [path, *(_conversations(begun) if begun.is_dir() else ())]
    return sorted(each.parent for each in path.rglob(_EVENTS) if each.is_dir())


def _ids_of(folders: Sequence[Path]) -> dict[str, Path]:
    """The folders of conversations by the ids of their states."""
    return {_state_of(folder).id: folder for folder in folders}


def _state_of(folder: Path) -> BaseState:
    state = folder / _STATE
    return parse(BaseState, read_document(state)) if state.is_file() else BaseState()


def _from_folder(folder: Path, ids: Callable[[], Mapping[str, Path]], below: tuple[Path, ...] = ()) -> Imported:
    """``ids``: all conversations, among which an exported one has its parent; ``below``: whose parent it is."""
    if folder in below:
        raise ExchangeError(f"{folder}: conversations are sub-agents of each other")
    base = _state_of(folder)
    # The names are numbered with leading zeros.
    files = sorted((folder / _EVENTS).glob("event-*.json"))
    if not files:
        raise ExchangeError(f"{folder / _EVENTS}: there is no event in it")
    nested = folder.parent.name == _SUB_AGENTS and (folder.parent.parent / _EVENTS).is_dir()
    link = base.sub_agent
    above = folder.parent.parent if nested else ids().get(link.parent) if link is not None else None
    parent = _from_folder(above, ids, (*below, folder)).trajectory if above is not None else None
    return _episode(base.id or folder.name, base, list(_events(files)), parent)


def _events(files: Sequence[Path]) -> Iterator[JsonObject]:
    yield from (read_document(file) for file in files)


def _from_file(file: Path) -> Imported:
    base = _state_of(file.parent)
    events = [row.load() for row in rows_of(file)]
    name = file.name.partition(".")[0]
    return _episode(base.id or (name if name != _EVENTS else file.absolute().parent.name), base, events)


def _episode(name: str, base: BaseState, events: Sequence[JsonValue], parent: Trajectory | None = None) -> Imported:
    if not any(recognises(event) for event in events if isinstance(event, dict)):
        raise ExchangeError("there is no event of OpenHands' SDK in it")
    log = read_log(events, PolicyRef(base_model=base.agent.llm.model or "unknown"), base.leaf_event_id)
    asked = next((message.content for message in log.tree.messages() if message.role == "user"), None)
    link = base.sub_agent
    if parent is not None:
        # The SDK's own events do not say which agent of the registry it is.
        link = SubAgentOf(parent=parent.id, kind=UNKNOWN if link is None else link.kind)
    data: JsonObject = {} if link is None else {SUB_AGENT: link.model_dump()}
    task = Task(id=name, environment=ENVIRONMENT, instruction=asked or "", data=data)
    run_id = None if link is None else sub_agents_run(UNKNOWN if parent is None else parent.run_id)
    origin = Origin("v1-events", task, base.agent.llm.model, run_id)
    stop, failure = _ending(base.execution_status, log)
    evidence: JsonObject = {"condensations": log.condensations} if log.condensations else {}
    return finished(log.tree, origin, Ending(stop, evidence, failure=failure, times=log.times))


def _ending(status: str | None, log: Log) -> tuple[StopReason, Failure | None]:
    if status == "stuck":
        return StopReason.TRUNCATED, None
    # A conversation that went on after an error is no failure.
    if not log.errors or status == "finished":
        return (StopReason.TERMINATED if status == "finished" else end_of(log.tree.messages())), None
    code, detail = log.errors[-1]
    if code in _REGULAR_ENDS:
        return _REGULAR_ENDS[code], None
    failure = Failure(
        kind=FailureKind.INFRASTRUCTURE, message=f"{code}: {detail}"[:500], boundary="openhands.conversation"
    )
    return StopReason.ERROR, failure

"""OpenHands V0's ``llm_completions``: a folder an instance, in it a file a call of the model.

All calls of an instance become one tree: a prompt that extends the one before continues its path, and where the host
rewrote the history (a condenser, a changed prompt) a branch begins. A condenser's own calls are trees beside it.
For models that were prompted with text a file has the calls in native form too, and those are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import Field, FiniteFloat, JsonValue, model_validator

from openhands_rl_plugin.core.messages import plain_message
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    ACTED,
    CONDENSATION,
    KIND,
    JsonObject,
    Message,
    PolicyRef,
    Score,
    Times,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.conversations import conversation_of, read_system_prompt
from openhands_rl_plugin.trajectories.exchange.episodes import (
    SWE,
    UNKNOWN,
    Ending,
    Imported,
    Origin,
    end_of,
    finished,
    say,
    task_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    Conversation,
    ExchangeError,
    Foreign,
    LeftOutError,
    parse,
    tools_of,
)
from openhands_rl_plugin.trajectories.exchange.reading import Source, Unit, files_below, read_document
from openhands_rl_plugin.trajectories.exchange.v0 import Response, response_of
from openhands_rl_plugin.trajectories.exchange.v1 import read_tool
from openhands_rl_plugin.trajectories.exchange.writing import safe_name


class LLMSettings(Foreign):
    """What the call was made with, as far as it is needed."""

    model: str | None = None
    tools: JsonValue = None


class Logged(Foreign):
    """One file. ``fncall_*`` stand beside the text form that the model saw.

    V1's SDK calls the native form ``raw_messages`` and ``response``, and the text that the model said ``raw_response``.
    """

    messages: Conversation
    response: Response
    fncall_messages: Conversation = ()
    fncall_response: Response | None = None
    kwargs: LLMSettings = Field(default_factory=LLMSettings)
    tools: JsonValue = None
    timestamp: FiniteFloat = 0.0

    @model_validator(mode="before")
    @classmethod
    def _from_v1(cls, data: object) -> object:
        if not isinstance(data, dict) or data.get("raw_messages") is None or data.get("raw_response") is None:
            return data
        native = {"fncall_messages": data["raw_messages"], "fncall_response": data.get("response")}
        return {**data, **native, "response": data["raw_response"]}


def source(path: Path) -> Source:
    """``llm_completions`` itself, or the folder of one instance."""
    files = files_below(path, (".json",))
    folders = sorted({file.parent for file in files})

    def units() -> Iterator[Unit]:
        for number, folder in enumerate(folders, 1):
            own = [file for file in files if file.parent == folder]
            yield Unit(str(folder), number, lambda folder=folder, own=own: _episode(folder.name, own))

    return Source(len(folders), units())


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """The messages of a call, and the response to it."""
    return isinstance(row.get("messages"), list) and isinstance(row.get("response"), dict)


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[tuple[str, JsonObject]]:
    """A file for each sampled node, in the native form: its whole prompt, and the response.

    Raises ``LeftOutError`` when nothing was sampled.
    """
    sampled = [index for index, node in enumerate(trajectory.nodes) if node.sampled]
    if not sampled:
        raise LeftOutError("nothing was sampled in it")
    span = trajectory.times.finished - trajectory.times.started
    for number, index in enumerate(sampled):
        node = trajectory.nodes[index]
        model = (node.policy or trajectory.policy).served_name
        at = trajectory.times.started + span * number / len(sampled)
        name = f"{safe_name(trajectory.task.id)}/{trajectory.id}/{safe_name(model)}-{number:05d}.json"
        prompt = conversation_of(trajectory, trajectory.path(node.parent)) if node.parent is not None else []
        yield (
            name,
            {
                "messages": [*prompt],
                "response": _response(trajectory, index, model, at),
                "args": [],
                "kwargs": {"tools": [*trajectory.tools]} if trajectory.tools else {},
                "timestamp": at,
                "cost": None,
            },
        )


def _response(trajectory: Trajectory, index: int, model: str, at: float) -> JsonObject:
    node = trajectory.nodes[index]
    (message,) = conversation_of(trajectory, (index,))
    finish = node.finish_reason or ("tool_calls" if node.message.tool_calls else "stop")
    return response_of(f"{trajectory.id}-{index}", model, message, finish, int(at))


def _episode(instance: str, files: Sequence[Path]) -> Imported:
    logged = [_read(file) for file in files]
    # Files are named after the time, which is not a number of fixed length.
    logged.sort(key=lambda each: each.timestamp)
    merged = _Merged()
    for each in logged:
        merged.add(each)
    tree = merged.tree
    tree.head = merged.main_head()
    merged.mark_acted()
    origin = Origin("llm-completions", task_of(tree.messages(), SWE, instance), merged.model)
    times = Times(started=logged[0].timestamp, finished=logged[-1].timestamp)
    ending = Ending(end_of(tree.messages()), {"calls": len(logged)}, times=times)
    return finished(tree, origin, ending)


def _read(file: Path) -> Logged:
    try:
        logged = parse(Logged, read_document(file))
        if not _answer(logged).choices:
            raise ExchangeError("response.choices: is empty")
    except ExchangeError as error:
        raise error if str(error).startswith(str(file)) else ExchangeError(f"{file}: {error}") from error
    return logged


def _answer(logged: Logged) -> Response:
    return logged.fncall_response or logged.response


class _Merged:
    """The calls of one instance as one tree."""

    def __init__(self) -> None:
        self.tree = EpisodeTree()
        self.model: str | None = None
        self._children: dict[int | None, list[int]] = {}
        self._last: dict[int, int] = {}
        self._calls: Counter[int] = Counter()

    def add(self, logged: Logged) -> None:
        """Follow the prompt as far as it is known, append the rest of it, and the answer."""
        tree = self.tree
        response = _answer(logged)
        self.model = logged.kwargs.model or response.model or self.model
        tree.tools = tree.tools or _tools(logged)
        at: int | None = None
        for said in logged.fncall_messages or logged.messages:
            at = self._step(at, said)
        metadata: JsonObject = {}
        if logged.fncall_response is not None and logged.response.choices:
            metadata["text"] = logged.response.choices[0].message.content
        tree.head = at
        policy = PolicyRef(base_model=self.model or UNKNOWN)
        node = self._keep(at, say(tree, response.choices[0].message, policy, metadata))
        root = tree.path()[0]
        self._last[root] = node
        self._calls[root] += 1

    def main_head(self) -> int:
        """The last call of the conversation with the most calls: others in the folder are a condenser's."""
        root, _ = self._calls.most_common(1)[0]
        return self._last[root]

    def mark_acted(self) -> None:
        """Note which answers the host went on from, where the path to the head does not say so; of other conversations,
        that they are a condenser's."""
        nodes = self.tree.nodes
        main, path = self.tree.path()[0], set(self.tree.path())
        for at, node in enumerate(nodes):
            if at in path:
                continue
            if self.tree.path(at)[0] != main:
                node.metadata[KIND] = CONDENSATION
            elif node.sampled:
                node.metadata[ACTED] = True

    def _step(self, at: int | None, message: Message) -> int:
        known = self._children.get(at, ())
        same = next((child for child in reversed(known) if _alike(self.tree.nodes[child].message, message)), None)
        if same is None:
            self.tree.head = at
            return self._keep(at, say(self.tree, message, None))
        if (node := self.tree.nodes[same]).sampled and node.message != (plain := plain_message(message)):
            node.metadata["replayed_as"] = plain.model_dump(mode="json", exclude_defaults=True)
        return same

    def _keep(self, parent: int | None, node: int) -> int:
        self._children.setdefault(parent, []).append(node)
        return node


def _alike(known: Message, message: Message) -> bool:
    """Equal, but for white space around what was said and an empty text that is null elsewhere."""
    return (
        known.role == message.role
        and known.tool_calls == message.tool_calls
        and known.tool_call_id == message.tool_call_id
        and (known.content or "").strip() == (message.content or "").strip()
    )


def _tools(logged: Logged) -> tuple[JsonObject, ...]:
    """From the request; a text prompt has them in its system message."""
    if logged.kwargs.tools is not None:
        return tools_of(logged.kwargs.tools)
    if isinstance(logged.tools, list) and logged.fncall_response is None:
        return tuple(read_tool(tool) for tool in logged.tools if isinstance(tool, dict))
    first = logged.messages[0] if logged.messages else None
    return read_system_prompt(first.content or "").tools if first is not None else ()

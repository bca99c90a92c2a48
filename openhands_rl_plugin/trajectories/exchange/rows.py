"""Rows for training and evaluation: conversations with calls as text (as SWE-Gym publishes them) or native,
preferences, values of states, prompts of SWE-Gym's outcome verifier, SWE-bench predictions, and our own lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any, Literal, NamedTuple

from pydantic import JsonValue, ValidationError

from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.messages import transcript
from openhands_rl_plugin.core.records import Label
from openhands_rl_plugin.core.templates.function_text import RenderError, render_call
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    SCHEMA_VERSION,
    Frozen,
    JsonObject,
    Message,
    Score,
    StopReason,
    StrategySpec,
    Task,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.episodes import (
    SCORE_VERSION,
    STRATEGY,
    SWE,
    Imported,
    ImportedWithLabels,
    conversation,
    finished,
    identity_columns,
    patch_of,
    resolved,
    task_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    LeftOutError,
    Record,
    at_path,
    conversation_of,
    present,
    single_call_turns,
    spoken_messages,
    text_messages,
    tools_of,
    until_last_answer,
    what_is_wrong,
    wire_of,
    without_nulls,
)

IDENTITY = ("trajectory_id", "instance_id", "run_id", "model", "score", "resolved")
RECORD = ("test_result", "patch", "traj_id")
"""What a record of others says beside the judgement."""
PREFERENCE = ("prompt", "chosen", "rejected", "tools", "margin", "chosen_visits", "rejected_visits", "rejected_id")
"""What a preference has beside the judgement."""


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """Chat messages, as a list or as JSON."""
    listed = row.get("messages")
    if isinstance(listed, str):
        return listed.lstrip().startswith("[")
    return isinstance(listed, list) and bool(listed) and isinstance(listed[0], dict) and "role" in listed[0]


def text_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """A row for each executed path, one unless the history was rewritten: calls as text, results as what the user says,
    up to the last answer.

    Raises ``LeftOutError`` for an episode without an answer, or whose calls no text can carry.
    """
    for messages in _answered(trajectory):
        turns = until_last_answer(single_call_turns(messages))
        rendered: list[JsonValue] = [*text_messages(turns, trajectory.tools)]
        yield {"messages": rendered, **_columns(trajectory, scores)}


def native_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """A row for each executed path, one unless the history was rewritten: up to its last answer, with its tool calls
    and the tools. Raises ``LeftOutError`` for an episode without an answer."""
    for answered in _answered(trajectory):
        messages: list[JsonValue] = [wire_of(message) for message in until_last_answer(answered)]
        yield {"messages": messages, "tools": [*trajectory.tools], **_columns(trajectory, scores)}


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


def read_conversation(form: str, row: JsonObject) -> Imported:
    """An episode of a row of ours, of SWE-Gym's SFT set, or of its Sampled set (which has null-filled tools). Calls in
    the text stay there. Raises ``ExchangeError``."""
    record = Record(row)
    messages, tools = record.whole(record.messages("messages")), tools_of(record.get("tools", "functions"))
    names = (record.read(str, "instance_id"), record.read(str, "task_id"))
    evidence = present(
        resolved=record.read(bool, "resolved"),
        test_result=without_nulls(record.get("test_result")),
        patch=record.read(str, "patch"),
        traj_id=record.read(str, "traj_id"),
    )
    model = record.read(str, "model")
    return finished(
        conversation(messages, model, tools),
        form,
        task_of(messages, SWE, *names, row=record.read(str, "id")),
        model=model,
        run_id=record.read(str, "run_id"),
        evidence=evidence,
        reward=record.read(float, "score", "reward"),
        resolved=record.read(bool, "resolved"),
    )


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
        beside: JsonObject = {"rejected": rejected, "tools": [*trajectory.tools], "rejected_id": trajectory.id}
        known = identity_columns(trajectory, scores)
        pairs.append({**dict.fromkeys(PREFERENCE), **row, **beside, **more, **known})

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


def value_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One row for each valued action: the conversation up to it, and the mean return that search saw from there on.

    Raises ``LeftOutError`` for an episode without values.
    """
    executed = set(trajectory.acted())
    valued = [at for siblings in _valued(trajectory).values() for at in siblings]
    if not valued:
        raise LeftOutError("no action of it was valued by a search")
    for at in valued:
        yield {
            "messages": conversation_of(trajectory, trajectory.path(at)),
            "tools": [*trajectory.tools],
            "value": trajectory.nodes[at].value,
            "visits": trajectory.nodes[at].visits,
            "on_path": at in executed,
            **identity_columns(trajectory, scores),
        }


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


SYSTEM = """You are an expert judge evaluating AI assistant interactions. Your task is to determine if the assistant \
successfully resolved the user's request.

Key evaluation criteria:
1. Did the assistant complete the main task requested by the user?
2. Did the assistant handle all edge cases and requirements specified?
3. Were there any errors or issues in the final solution?
4. Did the assistant verify the solution works as intended?

Respond only with "<judgement>YES</judgement>" or "<judgement>NO</judgement>"."""
_USER = """Please evaluate the following interaction between an AI assistant and a user:

=== INTERACTION LOG ===
{log}
=== END INTERACTION ===

Based on the above interaction, did the assistant successfully resolve the user's initial request? Respond with YES \
or NO."""


_RULE = "-" * 100 + "\n"
_TITLES = {"tool": "TOOL EXECUTION RESULT"}


class LogSection(NamedTuple):
    """A part of a log, without the rule above it. The message after the system's is the instruction."""

    kind: Literal["system", "instruction", "turn"]
    text: str


def verifier_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One row: the prompt and the judgement. Raises ``LeftOutError`` when the episode has no judgement."""
    judged = resolved(trajectory, scores)
    if judged is None:
        raise LeftOutError("it is not judged: no score, and no report that says resolved")
    answer = {"role": "assistant", "content": f"<judgement>{'YES' if judged else 'NO'}</judgement>"}
    messages = [*question(joined(log_sections(transcript(trajectory), trajectory.tools))), answer]
    yield {"messages": messages, **identity_columns(trajectory, scores), "resolved": judged}


def question(log: str) -> list[JsonObject]:
    """The two messages that ask for a judgement of an interaction log."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _USER.format(log=log)}]


def joined(sections: Sequence[LogSection]) -> str:
    """The log that consists of these sections; turns are counted in pairs of messages."""
    return "".join(section.text if section.kind == "system" else _RULE + section.text for section in sections) + _RULE


def log_sections(messages: Sequence[Message], tools: Sequence[JsonObject]) -> list[LogSection]:
    """The parts of the log in order: the system prompt, the instruction, and every other message."""
    sections: list[LogSection] = []
    if messages and messages[0].role == "system":
        text = f"*** System Message that describes the assistant's behavior ***\n{messages[0].content or ''}\n"
        sections.append(LogSection("system", text))
        messages = messages[1:]
    by_name = {str(at_path(tool, "function", "name")): tool for tool in tools}
    for at, message in enumerate(_user_merged(messages)):
        title = _TITLES.get(message.role, message.role.upper())
        text = f"*** Turn {at // 2 + 1} - {title} ***\n{message.content or ''}\n"
        for number, call in enumerate(message.tool_calls):
            text += f"### Tool Call {number}\n{_as_text(call, by_name)}\n"
        sections.append(LogSection("instruction" if at == 0 else "turn", text))
    return sections


def _user_merged(messages: Sequence[Message]) -> Iterator[Message]:
    for by_user, group in groupby(messages, key=lambda message: message.role == "user"):
        if by_user:
            yield Message(role="user", content="\n".join(message.content or "" for message in group))
        else:
            yield from group


def _as_text(call: ToolCall, tools: dict[str, JsonObject]) -> str:
    try:
        return render_call(call, tools.get(call.name))
    except RenderError:
        # The judge sees a call that could not be executed as it was written.
        return f"<function={call.name}>\n{call.arguments}\n</function>"


def prediction_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One prediction. Raises ``LeftOutError`` for an episode without a recorded patch; an empty patch is one."""
    patch = patch_of(trajectory)
    if patch is None:
        raise LeftOutError("its evidence has no patch")
    model = trajectory.policy.served_name
    yield {"instance_id": trajectory.task.id, "model_patch": patch, "model_name_or_path": model}


def read_prediction(row: JsonObject) -> Imported:
    """An episode of which only the patch is known; an absent one is empty. Raises ``ExchangeError``."""
    record = Record(row)
    if not (name := record.text("instance_id")):
        raise ExchangeError("instance_id: is required")
    model, task = record.read(str, "model_name_or_path"), Task(id=name, environment=SWE)
    evidence: JsonObject = {"git_patch": record.text("model_patch")}
    return finished(EpisodeTree(), "predictions", task, StopReason.TERMINATED, model=model, evidence=evidence)


class Line(Frozen):
    """What a line of our own holds."""

    trajectory: Trajectory
    scores: tuple[Score, ...] = ()
    labels: tuple[Label, ...] = ()


def recognises_line(row: Mapping[str, JsonValue]) -> bool:
    """A trajectory with its nodes."""
    trajectory = row.get("trajectory")
    return isinstance(trajectory, dict) and "nodes" in trajectory


def line_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One line with everything, tokens included; ``export_store`` adds the labels."""
    yield Line(trajectory=trajectory, scores=tuple(scores)).model_dump(mode="json")


def read_line(row: JsonObject) -> Imported:
    """The episode as a file of others holds it: no reward reads its evidence, its newest outcome is an import's score,
    and labels are left out. Raises as ``read_own_line``."""
    found, scores = read_own_line(row)
    by = StrategySpec(name=STRATEGY, options={"strategy": found.strategy.model_dump(mode="json")})
    newest = newest_outcome(scores)
    kept = () if newest is None else (newest.model_copy(update={"reward_version": SCORE_VERSION}),)
    return Imported(found.model_copy(update={"strategy": by}), kept)


def read_own_line(row: JsonObject) -> ImportedWithLabels:
    """The same values again. Raises ``ExchangeError``, also for a schema that is newer than this version."""
    version = at_path(row, "trajectory", "schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ExchangeError(f"schema version {version} is newer than {SCHEMA_VERSION}; install a newer version")
    try:
        line = Line.model_validate(row)
    except ValidationError as error:
        raise ExchangeError(what_is_wrong(error, Line)) from error
    if any(each.trajectory_id != line.trajectory.id for each in (*line.scores, *line.labels)):
        raise ExchangeError("scores or labels: one belongs to another trajectory")
    found = ImportedWithLabels(line.trajectory, line.scores)
    found.labels = line.labels
    return found

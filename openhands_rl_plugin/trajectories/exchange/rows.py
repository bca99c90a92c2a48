"""Rows for training and evaluation: conversations with calls as text (as SWE-Gym publishes them) or native,
preferences, values of states, prompts of SWE-Gym's outcome verifier, SWE-bench predictions, and our own lines; and what
rows say about an episode: its score, verdict and patch.

Rows have OpenAI's chat messages with reasoning. Chat templates want the arguments of calls as objects: those of Qwen2.5
and Llama 3.1 print a text once more as JSON, so that a model would learn to quote its arguments. In the text form of
OpenHands calls and results are text, one call a turn, and the system prompt describes the tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby, takewhile
from typing import Any, Literal, NamedTuple

from pydantic import JsonValue, ValidationError

from openhands_rl_plugin.core.judgements import VERDICT, newest_outcome
from openhands_rl_plugin.core.messages import SpokenMessage, reasoning_of, reasoning_with, to_wire, transcript
from openhands_rl_plugin.core.templates.function_text import RenderError, render_call
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    SCHEMA_VERSION,
    JsonObject,
    Message,
    Score,
    StopReason,
    StrategySpec,
    Task,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    SCORE_VERSION,
    STRATEGY,
    SWE,
    ExchangeError,
    Imported,
    LeftOutError,
    Record,
    at_path,
    finished,
    from_text,
    object_at,
    present,
    what_is_wrong,
)

IDENTITY = ("trajectory_id", "instance_id", "run_id", "model", "score", "resolved")
RECORD = ("test_result", "patch", "traj_id")
"""What a record of others says beside the judgement."""
PREFERENCE = ("prompt", "chosen", "rejected", "tools", "margin", "chosen_visits", "rejected_visits", "rejected_id")
"""What a preference has beside the judgement."""


def date_of(seconds: float) -> datetime:
    """A Unix time as a date. Raises ``LeftOutError`` for a number that is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise LeftOutError(f"its time is no date: {seconds:g} seconds since 1970") from error


RESOLVED_AT = 1.0
# Sums of step rewards such as 10 x 0.1 must not miss the threshold by a rounding error.
_ROUNDING = 1e-9


def score_of(trajectory: Trajectory, scores: Sequence[Score]) -> float | None:
    """The newest score's reward, verifiers' aside; else the return, if there is one; ``None`` after a failure."""
    if trajectory.failure is not None:
        return None
    newest = newest_outcome(scores)
    return newest.reward if newest is not None else trajectory.known_return


def resolved(trajectory: Trajectory, scores: Sequence[Score]) -> bool | None:
    """What a score by hand says; else the newest score or the grader's report; else whether the score reaches 1.0;
    else unknown."""
    evidence = trajectory.evidence
    report = at_path(evidence, "test_result", "report") or evidence.get("report")
    newest = newest_outcome(scores)
    if newest is not None and newest.reward is not None and newest.reward_version == VERDICT:
        return newest.reward >= RESOLVED_AT - _ROUNDING
    judged = newest.detail.get("resolved") if newest is not None else None
    for candidate in (judged, evidence.get("resolved"), at_path(report, "resolved")):
        if isinstance(candidate, bool):
            return candidate
    score = score_of(trajectory, scores)
    return None if score is None else score >= RESOLVED_AT - _ROUNDING


def patch_of(trajectory: Trajectory) -> str | None:
    """The change that the agent made, as a diff; ``None`` when none was recorded, not even an empty one."""
    evidence = trajectory.evidence
    for patch in (evidence.get("git_patch"), at_path(evidence, "test_result", "git_patch"), evidence.get("patch")):
        if isinstance(patch, str):
            return patch
    return None


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


def with_objects(row: JsonObject) -> JsonObject:
    """The row with the arguments of all calls as objects, changed in place; a malformed text stays as it is."""
    listed: list[Any] = [each for column in row.values() if isinstance(column, list) for each in column]
    for message in listed:
        for call in (isinstance(message, dict) and message.get("tool_calls")) or ():
            known = arguments_object(call["function"]["arguments"])
            call["function"] |= {} if known is None else {"arguments": known}
    return row


def single_call_turns(messages: Sequence[Message]) -> list[Message]:
    """Split every message with several calls into one message a call, each followed by its own result.

    The text and the reasoning stand with the first of the calls. Raises ``LeftOutError`` where one of several calls got
    no result: between two others it cannot stand.
    """
    out: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls) < 2:
            out.append(message)
            continue
        following = [*takewhile(lambda each: each.role == "tool", messages[at:])]
        results, at = {each.tool_call_id: each for each in following}, at + len(following)
        for number, call in enumerate(message.tool_calls):
            if call.id not in results:
                raise LeftOutError("several calls were made at once and some of them got no result")
            beside = {"content": None, **({"reasoning": None} if isinstance(message, SpokenMessage) else {})}
            split = message.model_copy(update={"tool_calls": (call,), **(beside if number else {})})
            out += [split, results[call.id]]
    return out


def until_last_answer(messages: Sequence[Message]) -> list[Message]:
    """Without what came after the assistant's last message: nothing is learned from it."""
    last = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return list(messages[: last + 1])


_HEAD = "\nYou have access to the following functions:\n\n"
# The block that says IMPORTANT is never closed in the prompt of the published rows, and is kept so.
_TAIL = """

If you choose to call a function ONLY reply in the following format with NO suffix:

<function=example_function_name>
<parameter=example_parameter_1>value_1</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format, start with <function= and end with </function>
- Required parameters MUST be specified
- Only call one function at a time
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after.
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
"""
_NO_DESCRIPTION = "No description provided"


def system_prompt(content: str, tools: Sequence[JsonObject]) -> str:
    """``content`` with the description of the tools and the rules of the text form; itself without tools."""
    described = (_describe(number, object_at(tool, "function")) for number, tool in enumerate(tools, 1))
    return f"{content}{_HEAD}{'\n'.join(described)}{_TAIL}" if tools else content


def _describe(number: int, function: JsonObject) -> str:
    schema, listed = function.get("parameters"), "No parameters are required for this function.\n"
    if isinstance(schema, dict):
        required = at_path(schema, "required") or []
        parameters = enumerate(object_at(schema, "properties").items(), 1)
        lines = (f"  ({at}) {name} {_declared(info, name in required)}\n" for at, (name, info) in parameters)
        listed = f"Parameters:\n{''.join(lines)}"
    name, about = function.get("name", ""), function.get("description", "")
    begin = f"---- BEGIN FUNCTION #{number}: {name} ----\nDescription: {about}\n"
    return f"{begin}{listed}---- END FUNCTION #{number} ----\n"


def _declared(info: JsonValue, required: bool) -> str:
    known = info if isinstance(info, dict) else {}
    allowed, status = known.get("enum"), "required" if required else "optional"
    values = ", ".join(f"`{value}`" for value in allowed) if isinstance(allowed, list) else None
    suffix = "" if values is None else f"\nAllowed values: [{values}]"
    return f"({known.get('type', 'string')}, {status}): {known.get('description', _NO_DESCRIPTION)}{suffix}"


def text_messages(messages: Sequence[Message], tools: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Messages with at most one call each in the text form. Raises ``LeftOutError``."""
    if tools and (not messages or messages[0].role != "system"):
        yield {"role": "system", "content": system_prompt("", tools)}
    by_name = {str(at_path(tool, "function", "name")): tool for tool in tools}
    names: dict[str | None, str] = {}
    for at, message in enumerate(messages):
        content, role = message.content or "", message.role
        if role == "system" and at == 0:
            content = system_prompt(content, tools)
        elif role == "tool":
            name = message.name or names.get(message.tool_call_id, "function")
            content, role = f"EXECUTION RESULT of [{name}]:\n{content}", "user"
        for call in message.tool_calls:
            names[call.id] = call.name
            try:
                content = "\n\n".join(filter(None, (content, render_call(call, by_name.get(call.name)))))
            except RenderError as error:
                raise LeftOutError(str(error)) from error
        yield {"role": role, "content": content, **present(reasoning_content=reasoning_with(message))}


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


def read_prediction(record: Record) -> Imported:
    """An episode of which only the patch is known; an absent one is empty. Raises ``ExchangeError``."""
    if not (name := record.text("instance_id")):
        raise ExchangeError("instance_id: is required")
    model, task = record.read(str, "model_name_or_path"), Task(id=name, environment=SWE)
    evidence: JsonObject = {"git_patch": record.text("model_patch")}
    return finished(EpisodeTree(), "predictions", task, StopReason.TERMINATED, model=model, evidence=evidence)


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

"""Making trajectories of what was imported, and what rows say about a stored one: its times, score, verdict and patch.

No tokens were reported for imported ones, so none are invented: ``Node.tokens`` is ``None`` and the strategy says where
the episode came from. The id is a digest of the content, so the same record imported twice is one trajectory.
"""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.judgements import VERDICT, newest_outcome
from openhands_rl_plugin.core.messages import plain_message, reasoning_with
from openhands_rl_plugin.core.records import Label
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    JsonObject,
    Message,
    PolicyRef,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Times,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError, RecordMessage, at_path, from_text, present

UNKNOWN = "unknown"
STRATEGY = "imported"
SWE = "swe"
SCORE_VERSION = "imported-1"
UNKNOWN_TIMES = Times(started=0.0, finished=0.0)

_NAMESPACE = uuid.UUID("6b0f5f2e-0c1c-5f0e-9a55-5d2f6f8e7c11")
# What a store has around a record.
_ROOM = 20
_FINISHING = {"finish", "submit"}


class Imported(NamedTuple):
    """One episode as it goes into a store."""

    trajectory: Trajectory
    scores: tuple[Score, ...] = ()


class ImportedWithLabels(Imported):
    """One with what people noted on it."""

    labels: tuple[Label, ...] = ()


def say(tree: EpisodeTree, message: Message, policy: PolicyRef | None) -> int:
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
    messages: Iterable[Message], model: str | None = None, tools: Sequence[JsonObject] = (), *, given: int = 0
) -> EpisodeTree:
    """A tree with one path, in which the model sampled the answers behind the first ``given`` messages,
    but for what the record marks as context only."""
    tree = EpisodeTree(tools=tools)
    for at, message in enumerate(_linked(messages)):
        sampled = message.role == "assistant" and at >= given and not _is_context_only(message)
        say(tree, message, policy_of(model) if sampled else None)
    return tree


def policy_of(model: str | None) -> PolicyRef:
    """The weights as far as a record names them."""
    return PolicyRef(base_model=model or UNKNOWN)


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
    asked = (each.content for each in messages if each.role == "user" and not _is_context_only(each))
    instruction = next(asked, None) or ""
    return Task(id=next(filter(None, names), own), environment=environment, instruction=instruction)


def name_of(file: Path | None) -> str | None:
    """The task that SWE-agent and its like name a file after; other names of files say nothing."""
    match = file and re.fullmatch(r"(.+?)\.traj(\.json)?(\.gz)?", file.name)
    return match[1] if match else None


def _is_context_only(message: Message) -> bool:
    return isinstance(message, RecordMessage) and message.context_only


def finished(
    tree: EpisodeTree,
    form: str,
    task: Task,
    stop: StopReason | None = None,
    *,
    model: str | None = None,
    policy: PolicyRef | None = None,
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

    ``form``: the name of the format. ``stop``: by default what the last message says. ``model``, ``policy``, ``run_id``
    and ``group_id`` are those of the record, if it names them; ``tokens``: how many answers have ids. Raises
    ``ExchangeError`` for an episode that a store would not read back.
    """
    run_id = run_id or UNKNOWN
    trajectory = tree.freeze(
        EpisodeRequest(task=task, run_id=run_id, group_id=group_id or f"{run_id}/{task.id}"),
        trajectory_id="",
        strategy=StrategySpec(name=STRATEGY, options={"format": form, "tokens": tokens}),
        policy=policy or policy_of(model),
        stop=stop or end_of(tree.messages()),
        times=times,
        evidence=evidence,
        failure=failure,
    )
    # Times are left out: a copied file has new ones.
    content = trajectory.model_dump_json(exclude={"id", "times", "schema_version"})
    if content.count("[") + content.count("{") > 100:
        from_text("[" * _ROOM + content + "]" * _ROOM)
    identity = identity or named_identity(form, hashlib.sha256(content.encode()).hexdigest())
    found = trajectory.model_copy(update={"id": identity})
    reward = float(resolved) if reward is None and resolved is not None else reward
    if reward is None:
        return Imported(found)
    detail = {"format": form, **present(resolved=resolved)}
    return Imported(found, (Score(trajectory_id=identity, reward=reward, detail=detail, reward_version=SCORE_VERSION),))


def end_of(messages: Sequence[Message]) -> StopReason:
    """Why an episode ended whose record does not say so: by the agent's last word, or cut short."""
    last = next((message for message in reversed(messages) if message.role == "assistant"), None)
    if last is not None and (not last.tool_calls or any(call.name in _FINISHING for call in last.tool_calls)):
        return StopReason.TERMINATED
    return StopReason.TRUNCATED


def named_identity(*names: str) -> str:
    """The id that belongs to these names, always the same."""
    return str(uuid.uuid5(_NAMESPACE, "\n".join(names)))


def date_of(seconds: float) -> datetime:
    """A Unix time as a date. Raises ``LeftOutError`` for a number that is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise LeftOutError(f"its time is no date: {seconds:g} seconds since 1970") from error


def times_of(stamps: Iterable[object]) -> Times:
    """The first and the last of some times, each ISO 8601 or Unix seconds; what is no time is left out."""
    seconds: list[float] = []
    for stamp in stamps:
        with suppress(ValueError):
            date = datetime.fromisoformat(stamp) if isinstance(stamp, str) else None
            # Records write local times without a zone; those are taken for UTC.
            at = stamp if date is None else (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
            seconds += [float(at)] if isinstance(at, int | float) and math.isfinite(at) else []
    return Times(started=min(seconds), finished=max(seconds)) if seconds else UNKNOWN_TIMES


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

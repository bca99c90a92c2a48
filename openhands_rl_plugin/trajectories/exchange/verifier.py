"""Rows that train an outcome verifier, with the prompt of SWE-Gym's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from openhands_rl_plugin.core.messages import transcript
from openhands_rl_plugin.core.templates.function_text import RenderError, render_call
from openhands_rl_plugin.core.types import JsonObject, Message, Score, ToolCall, Trajectory
from openhands_rl_plugin.trajectories.exchange.episodes import identity_columns, resolved
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError
from openhands_rl_plugin.trajectories.exchange.sft import IDENTITY
from openhands_rl_plugin.trajectories.exchange.writing import Columns

COLUMNS: Columns = {"messages": [{"role": "string", "content": "string"}], **IDENTITY}

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


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One row: the prompt and the judgement. Raises ``LeftOutError`` when the episode has no judgement."""
    judged = resolved(trajectory, scores)
    if judged is None:
        raise LeftOutError("it is not judged: no score, and no report that says resolved")
    judgement = "YES" if judged else "NO"
    messages = [
        *prompt(transcript(trajectory), trajectory.tools),
        {"role": "assistant", "content": f"<judgement>{judgement}</judgement>"},
    ]
    yield {"messages": messages, **identity_columns(trajectory, scores), "resolved": judged}


def prompt(messages: Sequence[Message], tools: Sequence[JsonObject]) -> list[JsonObject]:
    """The two messages that ask for a judgement of a conversation."""
    return question(joined(log_sections(messages, tools)))


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
    by_name = {str(function["name"]): tool for tool in tools if isinstance(function := tool.get("function"), dict)}
    for at, message in enumerate(_user_merged(messages)):
        title = _TITLES.get(message.role, message.role.upper())
        text = f"*** Turn {at // 2 + 1} - {title} ***\n{message.content or ''}\n"
        for number, call in enumerate(message.tool_calls):
            text += f"### Tool Call {number}\n{_as_text(call, by_name)}\n"
        sections.append(LogSection("instruction" if at == 0 else "turn", text))
    return sections


def _user_merged(messages: Sequence[Message]) -> Iterator[Message]:
    waiting: list[Message] = []
    for message in messages:
        if message.role == "user":
            waiting.append(message)
            continue
        yield from _merged(waiting)
        waiting = []
        yield message
    yield from _merged(waiting)


def _merged(messages: Sequence[Message]) -> Iterator[Message]:
    if messages:
        yield Message(role="user", content="\n".join(message.content or "" for message in messages))


def _as_text(call: ToolCall, tools: dict[str, JsonObject]) -> str:
    try:
        return render_call(call, tools.get(call.name))
    except RenderError:
        # The judge sees a call that could not be executed as it was written.
        return f"<function={call.name}>\n{call.arguments}\n</function>"

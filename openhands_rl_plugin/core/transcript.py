"""The messages of an episode in the order in which they were said, however often its history was rewritten.

What others wrote is shown on a terminal, never obeyed: control sequences become visible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from openhands_rl_plugin.core.templates.function_text import read_function_text
from openhands_rl_plugin.core.types import Message, Node, ToolCall, Trajectory

FINISH = "finish"
"""The name of OpenHands' tool that ends an episode; its ``message`` is the answer."""

# Control characters except for tab and line feed, and what turns the direction of writing.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def transcript(trajectory: Trajectory) -> tuple[Message, ...]:
    """Every message once, in order. Without a rewritten history it is ``trajectory.messages()``."""
    return tuple(trajectory.nodes[at].message for at in transcript_nodes(trajectory))


def transcript_nodes(trajectory: Trajectory) -> Sequence[int]:
    """The nodes of ``transcript``. What a rewritten history repeats of the history before is left out: of the messages
    before its first answer those that stood there, in that order. Whatever else is said twice, such as two equal
    observations, stays."""
    told: set[int] = set()
    before: Sequence[int] = ()
    for end in trajectory.ends():
        path = trajectory.path(end)
        told.update(_new(trajectory.nodes, path, before) - told)
        before = path
    return sorted(told)


def _new(nodes: Sequence[Node], path: Sequence[int], before: Sequence[int]) -> set[int]:
    """The nodes of ``path`` that do not repeat those of the path ``before``."""
    known = set(before)
    own = [at for at in path if at not in known]
    answer = next((number for number, at in enumerate(own) if nodes[at].sampled), len(own))
    shared = set(path)
    left = [nodes[at] for at in before if at not in shared]
    new = own[answer:]
    for at in own[:answer]:
        message = nodes[at].message
        same = next((number for number, old in enumerate(left) if message in (old.message, _replayed(old))), None)
        if same is None:
            new.append(at)
        else:
            left = left[same + 1 :]
    return set(new)


def _replayed(node: Node) -> Message:
    """The message in the form in which its host repeats it."""
    form = node.metadata.get("replayed_as")
    return Message.model_validate(form) if isinstance(form, dict) else node.message


def last_answer(trajectory: Trajectory) -> str | None:
    """What the agent said last: the message of its ``finish``, also of one in the text, or a reply without a call.

    ``None`` where it said nothing, or where its last message is another call.
    """
    last = next((each for each in reversed(trajectory.messages()) if each.role == "assistant"), None)
    if last is None:
        return None
    if last.tool_calls:
        return _finish_message(last.tool_calls)
    parsed = read_function_text(last.content or "")
    return _finish_message(parsed.calls) if parsed.calls else last.content


def _finish_message(calls: Sequence[ToolCall]) -> str | None:
    said = next((call.arguments for call in calls if call.name == FINISH), None)
    try:
        given = json.loads(said) if said is not None else None
    except (ValueError, RecursionError):
        return None
    message = given.get("message") if isinstance(given, dict) else None
    return message if isinstance(message, str) else None


def visible(text: str) -> str:
    r"""``text`` with everything that a terminal would act upon written out: ESC is ``\x1b``."""
    return _UNSAFE.sub(_written_out, text)


def one_line(text: str, width: int) -> str:
    """``text`` in one line of at most ``width`` characters, with ``…`` where it was cut."""
    line = " ".join(visible(text[: 4 * width]).split())
    return line if len(line) <= width and len(text) <= 4 * width else f"{line[: width - 1]}…"


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def counted(count: int, what: str) -> str:
    """``(1, "task")`` -> ``"1 task"``, ``(2, "task")`` -> ``"2 tasks"``."""
    return f"{count} {what}{'' if count == 1 else 's'}"

"""What a chat template can say, found out by rendering, and conversations in the form that it takes.

Templates differ: arguments as an object or as text, one call a turn or several, no calls, no ``system`` role, roles
that must alternate. What a template cannot say natively is written as OpenHands writes it for models without native
calls, so a model is trained on the prompts that it will get.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.messages import SpokenMessage
from openhands_rl_plugin.core.types import JsonObject, Message, Trajectory
from openhands_rl_plugin.trajectories.exchange.conversations import (
    ARGUMENTS_FORMS,
    ArgumentsForm,
    arguments_object,
    single_call_turns,
    spoken_messages,
    wire_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError
from openhands_rl_plugin.trajectories.exchange.sft import text_messages

WireMessages = Sequence[dict[str, Any]]

Render = Callable[[WireMessages, Sequence[JsonObject], bool], str]
"""Messages, tools, and whether the generation prompt follows -> text. Raises ``TrainingError`` when refused."""

_CALL, _NAME, _VALUE, _RESULT, _TEXT, _REASON = (
    "probe_call",
    "probe_name",
    "probe_value",
    "probe result",
    "probe text",
    "probe reason",
)
_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": _CALL,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {_NAME: {"type": "string", "description": "A name."}},
            "required": [_NAME],
        },
    },
}


class TemplateTraits(NamedTuple):
    """What a template can say.

    ``arguments``: the form in which it prints the arguments of a call as one JSON object, ``None`` when it prints no
    calls, results or tools. ``parallel``: several calls in a turn. ``content``: text beside a call. ``system``: a
    message of that role. ``repeats``: two messages of one role in a row. ``reasoning``: ``reasoning_content``.
    """

    arguments: ArgumentsForm | None
    parallel: bool
    content: bool
    system: bool
    repeats: bool
    reasoning: bool


class RenderedMessage(NamedTuple):
    """A message as the template takes it, and whether the policy is trained to say it."""

    wire: dict[str, Any]
    trained: bool


def traits_of(render: Render) -> TemplateTraits:
    """Found out by rendering short conversations."""
    asked = {"role": "user", "content": "Begin."}
    system = {"role": "system", "content": "Rules."}
    printed = forms_printed(render)
    arguments = printed[0] if printed else None
    calls = [_probe_call(arguments or "object", _CALL), _probe_call(arguments or "object", "probe_other")]
    both = [asked, {"role": "assistant", "content": "", "tool_calls": calls}]
    one = [asked, {"role": "assistant", "content": _TEXT, "tool_calls": calls[:1]}]
    thought = [asked, {"role": "assistant", "content": _TEXT, "reasoning_content": _REASON}]
    return TemplateTraits(
        arguments=arguments,
        parallel="probe_other" in (_tried(render, both, [_TOOL]) or ""),
        content=_TEXT in (_tried(render, one, [_TOOL]) or ""),
        system="Rules." in (_tried(render, [system, asked]) or ""),
        repeats=_tried(render, [asked, asked]) is not None,
        reasoning=_REASON in (_tried(render, thought) or ""),
    )


def forms_printed(render: Render) -> tuple[ArgumentsForm, ...]:
    """The forms of arguments that a template prints as one JSON object, or in a way of its own; the better one first.

    None when it does not print calls, results and tools.
    """
    asked = {"role": "user", "content": "Begin."}
    return tuple(form for form in ARGUMENTS_FORMS if _prints_calls(render, asked, form))


def turns_for(
    trajectory: Trajectory, traits: TemplateTraits, leaf: int | None = None, context: Collection[int] = ()
) -> tuple[list[RenderedMessage], tuple[JsonObject, ...]]:
    """A path (default: that to the head) in the form that a template takes, and its tools where it prints those.

    Answers of the nodes ``context`` are not trained. Raises ``TrainingError`` when a call cannot be said in that form.
    """
    spoken: Sequence[Message] = [
        message.model_copy(update={"sampled": False}) if at in context else message
        for at, message in zip(trajectory.path(leaf), spoken_messages(trajectory, leaf), strict=True)
    ]
    native = traits.arguments is not None
    if not native or (not traits.parallel and any(len(message.tool_calls) > 1 for message in spoken)):
        spoken = single_call_turns(spoken).messages
    if native:
        turns = [RenderedMessage(_native(message, traits), _trained(message)) for message in spoken]
    else:
        turns = list(_as_text(spoken, trajectory.tools))
    if not traits.system:
        turns = _without_system(turns)
    return (turns if traits.repeats else _alternating(turns)), (trajectory.tools if native else ())


def _trained(message: Message) -> bool:
    """Malformed calls are context only: a template would write them as something that was not said."""
    well_formed = all(arguments_object(call.arguments) is not None for call in message.tool_calls)
    return isinstance(message, SpokenMessage) and message.sampled and well_formed


def _native(message: Message, traits: TemplateTraits) -> dict[str, Any]:
    wire: dict[str, Any] = {**wire_of(message), "content": message.content or ""}
    if traits.arguments == "object":
        for call in wire.get("tool_calls", ()):
            value = arguments_object(call["function"]["arguments"])
            if value is not None:
                call["function"]["arguments"] = value
    return wire


def _as_text(spoken: Sequence[Message], tools: Sequence[JsonObject]) -> Iterator[RenderedMessage]:
    try:
        written = list(text_messages(spoken, tools))
    except LeftOutError as error:
        raise TrainingError(str(error)) from error
    added = len(written) - len(spoken)  # a system message with the tools, where there was none
    yield from (RenderedMessage(dict(wire), False) for wire in written[:added])
    for wire, message in zip(written[added:], spoken, strict=True):
        yield RenderedMessage(dict(wire), _trained(message))


def _without_system(turns: Sequence[RenderedMessage]) -> list[RenderedMessage]:
    """System messages become the beginning of the user's next one."""
    out: list[RenderedMessage] = []
    waiting: list[str] = []
    for turn in turns:
        if turn.wire["role"] == "system":
            waiting.append(turn.wire["content"] or "")
        elif waiting and turn.wire["role"] == "user":
            content = "\n\n".join([*waiting, turn.wire["content"] or ""])
            out.append(turn._replace(wire={**turn.wire, "content": content}))
            waiting = []
        else:
            out.append(turn)
    return [RenderedMessage({"role": "user", "content": "\n\n".join(waiting)}, False), *out] if waiting else out


def _alternating(turns: Sequence[RenderedMessage]) -> list[RenderedMessage]:
    """Messages of one role in a row as one message, which is trained only if all of them are."""
    out: list[RenderedMessage] = []
    for turn in turns:
        if out and out[-1].wire["role"] == turn.wire["role"] and "tool_calls" not in turn.wire:
            last = out[-1]
            content = "\n\n".join(filter(None, (last.wire["content"], turn.wire["content"])))
            out[-1] = RenderedMessage({**last.wire, "content": content}, last.trained and turn.trained)
        else:
            out.append(turn)
    return out


def _prints_calls(render: Render, asked: dict[str, Any], form: str) -> bool:
    """Whether calls, results and tools are printed, and the arguments as JSON instead of text within JSON."""
    messages: list[dict[str, Any]] = [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [_probe_call(form, _CALL)]},
        {"role": "tool", "content": _RESULT, "tool_call_id": "call_1", "name": _CALL},
    ]
    text, plain = _tried(render, messages, [_TOOL]), _tried(render, messages[:1], [_TOOL])
    if text is None or plain is None or _CALL not in plain:
        return False
    called = text.replace(plain, "", 1)
    printed = all(part in called for part in (_CALL, _NAME, _VALUE, _RESULT))
    return printed and f'\\"{_NAME}' not in called and f"'{_NAME}'" not in called


def _probe_call(form: str, name: str) -> dict[str, Any]:
    arguments = {_NAME: _VALUE}
    value = arguments if form == "object" else json.dumps(arguments)
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": value}}


def _tried(render: Render, messages: WireMessages, tools: Sequence[JsonObject] = ()) -> str | None:
    try:
        return render(messages, tools, False)
    except TrainingError:
        return None

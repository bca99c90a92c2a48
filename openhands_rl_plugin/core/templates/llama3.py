"""The templates of Llama 3 and Llama 3.1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openhands_rl_plugin.core.templates.bare_json import parse_bare_json
from openhands_rl_plugin.core.templates.base import arguments_object, refuse_empty, to_json, with_calls, without_stop
from openhands_rl_plugin.core.templates.parsed import ParsedAnswer, RenderError
from openhands_rl_plugin.core.types import JsonObject, Message

STOP = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

_BEGINNING = "<|begin_of_text|>"
_OPENED = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_TOOLS_HEAD = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    'answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument '
    "name and its value}.Do not use variables.\n\n"
)


@dataclass(frozen=True)
class Llama3:
    """Llama 3: the template knows no tools; calls are written into the content, or they would be lost."""

    stop: tuple[str, ...] = STOP

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        refuse_empty(messages)
        turns = (
            _turn(message.role, with_calls(message).strip() if message.tool_calls else _trimmed(message))
            for message in messages
        )
        return _BEGINNING + "".join(turns) + (_OPENED if add_generation_prompt else "")

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_bare_json(without_stop(text, self.stop), tools)


@dataclass(frozen=True)
class Llama31:
    """Llama 3.1: tools stand in the first message after the system's; one call a turn, without text beside it.

    ``today`` is the date in the system message; the template's own is fixed, so that prompts do not change overnight.
    """

    today: str = "26 Jul 2024"
    stop: tuple[str, ...] = STOP

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        refuse_empty(messages)
        rest = list(messages)
        system = _trimmed(rest.pop(0)) if messages[0].role == "system" else ""
        environment = "Environment: ipython\n" if tools else ""
        dates = f"Cutting Knowledge Date: December 2023\nToday Date: {self.today}\n\n"
        parts = [_BEGINNING, _turn("system", f"{environment}{dates}{system}")]
        if tools:
            if not rest:
                raise RenderError("Llama 3.1 shows tools in the first message after the system's; add one")
            offered = "".join(f"{to_json(tool, indent=4)}\n\n" for tool in tools)
            parts.append(_turn("user", f"{_TOOLS_HEAD}{offered}{_trimmed(rest.pop(0))}"))
        parts += [_message(message) for message in rest]
        return "".join(parts) + (_OPENED if add_generation_prompt else "")

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_bare_json(without_stop(text, self.stop), tools)


def _message(message: Message) -> str:
    if message.tool_calls:
        call, *others = message.tool_calls
        if others:
            raise RenderError("Llama 3.1 writes one call a turn; split the message into one for each call")
        return _turn("assistant", f'{{"name": "{call.name}", "parameters": {arguments_object(call)}}}')
    if message.role == "tool":
        return _turn("ipython", str(None) if message.content is None else to_json(message.content))
    return _turn(message.role, _trimmed(message))


def _trimmed(message: Message) -> str:
    """The content without white space around it; the template prints null as Python does."""
    return str(message.content).strip()


def _turn(role: str, content: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"

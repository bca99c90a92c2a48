"""``[rl.workspace] prompt = "compact"``: the instructions and tools of a model with a short context.

Names, arguments and types are those of the host's own tools, so that a call means the same under both prompts. The
texts are shorter: an argument is described where its tool is, and those that all tools have in the system prompt.
Nothing here imports OpenHands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openhands_rl_plugin.config.host import TOOLS
from openhands_rl_plugin.core.types import JsonObject

SYSTEM = (
    "You are OpenHands agent. Solve the user's task with the tools: find the cause, change only what is needed, run "
    "the tests, then call finish. Never send private data out."
)
_RISK = "security_risk: LOW reads, MEDIUM changes files or runs code, HIGH sends data out or changes the system."
_SUMMARY = "summary: the call in ten words."

_SHELL = (
    "Run command in a shell that keeps its state, at most timeout seconds. is_input true: command is input for "
    "what still runs (text, C-c, empty to wait)."
)
_EDITOR = (
    "command: view a file or folder (absolute path; view_range as [1, 40]), create from file_text, str_replace "
    "old_str (exact lines, found once) by new_str, insert new_str after insert_line, undo_edit."
)
_TEXTS = {
    TOOLS["v0"].shell: _SHELL,
    TOOLS["v1"].shell: f"{_SHELL} reset true: new shell.",
    TOOLS["v0"].editor: _EDITOR,
    TOOLS["v1"].editor: _EDITOR,
    "finish": "End the task with a message.",
}
# Tools of the hosts' own that are not offered: a task is done without them, and they take hundreds of tokens.
_LEFT_OUT = frozenset({"think", "task_tracker", "browser", "execute_ipython_cell"})

# How the hosts name the project's folder: V1 in the editor's description, V0 in that of its argument ``path``.
_PROJECT = re.compile(r"current working directory is: (/\S+)|e\.g\. `[^`]+` or `(/[^`]*)`")

_FORM = """
To call a tool, end your answer with:
<function=NAME>
<parameter=NAME>VALUE</parameter>
</function>
"""


def system_prompt(*, summary: bool, instructions: str = SYSTEM) -> str:
    """``instructions``, and the arguments that several tools have. ``summary``: whether that is one of them."""
    return "\n".join([instructions, _RISK, *([_SUMMARY] if summary else [])])


def compact_tools(tools: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The tools that are offered, as the host writes them for a server, with short texts.

    Those that others added, such as MCP servers', are as they were.
    """
    return [_compact(tool) for tool in tools if tool["function"]["name"] not in _LEFT_OUT]


def described(
    prompt: Sequence[Mapping[str, Any]], converted: Sequence[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]]
) -> list[Any]:
    """The prompt with the tools in its system message, for a model without tool calling.

    ``converted``: the other messages, in the form that the host has for such a model, without its own texts on tools.
    """
    suffix = _FORM + "".join(f"\n{_signature(tool['function'])}" for tool in tools)
    given = [message for message in prompt if message["role"] == "system"]
    first, *more = given or [{"role": "system", "content": ""}]
    return [{**first, "content": _with_suffix(first["content"], suffix)}, *more, *converted]


def _compact(tool: Mapping[str, Any]) -> Any:
    function = tool["function"]
    text = _TEXTS.get(function["name"])
    if text is None:
        return tool
    parameters = function.get("parameters") or {}
    properties = {name: _brief(name, schema, text) for name, schema in parameters.get("properties", {}).items()}
    if project := _project(function):
        text = f"{text} Project: {project}"
    changed = {"description": text, "parameters": {**parameters, "properties": properties}}
    return {**tool, "function": {**function, **changed}}


def _brief(name: str, schema: Mapping[str, Any], text: str) -> JsonObject:
    """The schema without its text, where the tool's or the system prompt's says what it is."""
    mentioned = re.search(rf"\b{re.escape(name)}\b", f"{text} {_RISK} {_SUMMARY}")
    return {key: value for key, value in schema.items() if key != "description" or not mentioned}


def _project(function: Mapping[str, Any]) -> str:
    properties = (function.get("parameters") or {}).get("properties", {})
    texts = (function["description"], properties.get("path", {}).get("description", ""))
    found = next(filter(None, map(_PROJECT.search, texts)), None)
    return (found[1] or found[2]) if found else ""


def _signature(function: Mapping[str, Any]) -> str:
    """``name(argument, optional?, one: a|b): what it does``."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required", ())
    named = (_argument(name, schema, name in required) for name, schema in parameters.get("properties", {}).items())
    return f"{function['name']}({', '.join(named)}): {function['description']}\n"


def _argument(name: str, schema: Mapping[str, Any], required: bool) -> str:
    values = "|".join(map(str, schema.get("enum", ()))) or schema.get("description", "")
    return f"{name}{'' if required else '?'}{f': {values}' if values else ''}"


def _with_suffix(content: Any, suffix: str) -> Any:
    """Append ``suffix`` to a message content, which is a text or a list of parts."""
    if isinstance(content, str):
        return content + suffix
    *before, last = content
    return [*before, {**last, "text": last["text"] + suffix}]

"""The messages that open an episode: the task, the available actions and the answer format."""

from __future__ import annotations

from openhands_rl_plugin.core.types import Message, Task

ACTION_LANGUAGES = {
    "webshop": (
        "search[keywords] - search the shop\n"
        "click[value] - click a button, product or option that the page shows; click[Buy Now] ends the task"
    ),
    "textcraft": (
        "get <count> <item> - take an ingredient from the world\n"
        "craft <count> <item> using <count> <ingredient>, ... - follow one of the given recipes\n"
        "inventory - list what you carry"
    ),
    "sciworld": (
        "look around, look at <object>, look in <object>, inventory, task, wait, wait1\n"
        "go to <place>, open <object>, close <object>, activate <object>, deactivate <object>\n"
        "pick up <object>, put down <object>, move <object> to <place>, pour <object> into <container>, "
        "dunk <object> into <container>, mix <container>\n"
        "connect <object> to <object>, disconnect <object>, use <object> on <object>, focus on <object>, "
        "read <object>, eat <object>, flush <object>"
    ),
    "babyai": (
        "turn right, turn left, move forward, toggle, drop, check available actions\n"
        "go to <object> <id>, pickup <object> <id>, go to goal\n"
        "go through <door> <id>, toggle and go through <door> <id>"
    ),
    "alfworld": (
        "go to <place>, look, inventory, examine <object>\n"
        "take <object> from <place>, put <object> in/on <place> (in newer versions: move <object> to <place>)\n"
        "open <object>, close <object>, use <object>\n"
        "clean <object> with <place>, heat <object> with <place>, cool <object> with <place>"
    ),
}

_ROLE = "Do the task step by step in an environment. Each turn you see its state and choose one action."
_REACT = "Answer in this form:\nThought: <your reasoning>\nAction: <one action>"
_PLAIN = "Answer with the action only."


def action_language(environment: str) -> str:
    """The actions of a known environment (``agentgym/webshop`` counts as ``webshop``), or an empty text."""
    return ACTION_LANGUAGES.get(environment.rsplit("/", 1)[-1], "")


def opening_messages(
    task: Task, state: str, *, react_format: bool, actions: str, system_prompt: str | None = None
) -> tuple[Message, Message]:
    """A system message with the task and how to act, then the first state as a user message.

    ``system_prompt`` replaces the general instructions and the list of actions, but neither the answer format, which
    the client requires, nor the task.
    """
    general = [system_prompt] if system_prompt is not None else [_ROLE, f"Actions:\n{actions}" if actions else ""]
    parts = [*general, _REACT if react_format else _PLAIN, f"Task: {task.instruction}" if task.instruction else ""]
    system = "\n".join(part for part in parts if part)
    return Message(role="system", content=system), Message(role="user", content=state)

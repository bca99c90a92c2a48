"""Prompts and tools in the SDK's wire format, written once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from openhands.sdk.llm import LLM
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.tool import ToolDefinition

from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.compact_prompt import compact_tools, is_offered
from openhands_rl_plugin.hosts.v1.values import has_images

_RISK = "add_security_risk_prediction"


class Written(list[dict[str, Any]]):
    """Messages as ``LLM.format_messages_for_llm`` returns them, which nobody changes. So a copy is the same."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Written:
        return self


class WrittenTool:
    """A tool whose schemas are written once, which takes milliseconds; in all else the tool itself."""

    def __init__(self, tool: ToolDefinition, *, compact: bool) -> None:
        self._tool = tool
        self._compact = compact
        self._written: dict[str, Any] = {}

    def to_openai_tool(self, **asked: Any) -> JsonObject:
        """As of the tool. A copy, in which litellm may write."""
        key = repr(asked)
        if key not in self._written:
            written = self._tool.to_openai_tool(**asked)
            self._written[key] = compact_tools([written])[0] if self._compact else written
        return copied(self._written[key])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)


class Prompts:
    """Writes the prompts of one conversation, and its tools, once. ``compact``: fewer tools, with short texts."""

    def __init__(self, *, compact: bool) -> None:
        self.compact = compact
        self._settings: dict[str, Any] = {}
        self._messages: Sequence[SdkMessage] = ()
        self._written = Written()
        self._tools: tuple[ToolDefinition, ...] = ()
        self._offered: list[Any] = []
        self._risk = self._fixed = False

    def write(self, llm: LLM, messages: Sequence[SdkMessage]) -> Written:
        """What ``llm.format_messages_for_llm`` returns. Not to be changed: the next prompt shares it.

        Of a conversation that goes on from the last prompt, only what is new is written.
        """
        known = self._known(llm, messages)
        # Copies: the SDK may mark messages for the prompt cache while it writes them.
        new = llm.format_messages_for_llm([each.model_copy() for each in messages[known:]])
        # Without ``self``, an LLM that is changed later would be compared with itself.
        self._settings, self._messages = dict(llm.__dict__), tuple(messages)
        self._written = Written([*self._written[:known], *new])
        return self._written

    def offer(
        self, llm: LLM, tools: Sequence[ToolDefinition], arguments: dict[str, Any]
    ) -> tuple[list[Any] | None, dict[str, Any]]:
        """The tools that are sent, and the arguments of the completion."""
        if self._fixed:
            return self._offered or None, {**arguments, _RISK: self._risk}
        if len(tools) != len(self._tools) or not all(map(operator.is_, tools, self._tools)):
            self._tools = tuple(tools)
            told = [tool for tool in tools if not self.compact or is_offered(tool.name)]
            # A log of completions shows the tools' own fields, which are not what is sent of compact ones.
            plain = llm.log_completions and not self.compact
            self._offered = told if plain else [WrittenTool(tool, compact=self.compact) for tool in told]
        self._risk = bool(arguments.get(_RISK))
        return self._offered or None, arguments

    def forked(self) -> Prompts:
        """For a copy of the conversation: with the tools of this one, whatever the copy has."""
        twin = Prompts(compact=self.compact)
        twin._offered, twin._risk, twin._fixed = self._offered, self._risk, bool(self._tools)
        return twin

    def _known(self, llm: LLM, messages: Sequence[SdkMessage]) -> int:
        """How many of the messages are written as they were in the last prompt."""
        before = self._messages
        if not before or llm.__dict__ != self._settings:
            return 0
        # Which messages are marked, and how large an image may be, depends on the others.
        if llm.is_caching_prompt_active() or has_images(messages):
            return 0
        return len(before) if tuple(messages[: len(before)]) == before else 0


def copied(value: Any) -> Any:
    """A deep copy of JSON; ``copy.deepcopy`` takes ten times as long."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value

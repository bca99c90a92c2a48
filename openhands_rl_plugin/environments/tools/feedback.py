"""Feedback for a model whose response could not be executed: the error and a suggestion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from openhands_rl_plugin.core.types import JsonObject


class FeedbackCode(StrEnum):
    """The kind of error."""

    NO_TOOL_CALL = "no_tool_call"
    INVALID_ACTION_FORMAT = "invalid_action_format"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    TOOL_RUNTIME_ERROR = "tool_runtime_error"
    IGNORED_AFTER_FINAL = "ignored_after_final"


_NEXT = {
    FeedbackCode.NO_TOOL_CALL: "Call one of the allowed tools.",
    FeedbackCode.INVALID_ACTION_FORMAT: "Write the call again, with a JSON object as its arguments.",
    FeedbackCode.UNKNOWN_TOOL: "Call one of the allowed tools by its exact name.",
    FeedbackCode.INVALID_ARGUMENTS: "Call the tool again with arguments that keep to its parameters.",
    FeedbackCode.TOOL_RUNTIME_ERROR: "Try other arguments or another tool.",
    FeedbackCode.IGNORED_AFTER_FINAL: "Nothing: the task has ended.",
}


@dataclass(frozen=True, slots=True)
class Feedback:
    """``message`` describes the error in one or two sentences."""

    code: FeedbackCode
    message: str
    tool: str = ""

    def render(self, allowed: Sequence[str], ending: Sequence[str] = ()) -> str:
        """The text for the model. ``ending``: the tools through which an answer reaches the user."""
        error: JsonObject = {"code": self.code.value, "message": self.message}
        if self.tool:
            error["tool"] = self.tool
        suggestion = _NEXT[self.code]
        if self.code is FeedbackCode.NO_TOOL_CALL and ending:
            suggestion += f" The user reads only what you give to {' or '.join(ending)}."
        told: JsonObject = {"ok": False, "error": error, "next_action_suggestion": suggestion}
        if self.code in (FeedbackCode.NO_TOOL_CALL, FeedbackCode.UNKNOWN_TOOL, FeedbackCode.INVALID_ACTION_FORMAT):
            told["allowed_tools"] = list(allowed)
        return json.dumps(told, ensure_ascii=False)

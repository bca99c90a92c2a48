"""The parsed answer of a model. Errors are values here: nothing in this folder raises on a model's text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.types import ToolCall


class RenderError(RLError):
    """A call or a conversation cannot be written in the wanted form."""


class ProblemKind(StrEnum):
    """The error of a call, or the correction made to read it."""

    UNCLOSED = "unclosed"  # a block or a value does not end
    BAD_JSON = "bad_json"  # what should be JSON is not
    BAD_SHAPE = "bad_shape"  # JSON, but not a call: no name, arguments that are no object, an empty block
    STRAY_TEXT = "stray_text"  # text or tags inside a call, or closing tags after one, where none may stand
    DUPLICATE = "duplicate"  # a key or a parameter is given twice
    UNKNOWN_FUNCTION = "unknown_function"
    UNKNOWN_PARAMETER = "unknown_parameter"
    MISSING_PARAMETER = "missing_parameter"
    BAD_VALUE = "bad_value"  # not of the parameter's type, or not one of its allowed values
    IN_THOUGHT = "in_thought"  # a call inside <think> is not executed
    REENCODED = "reencoded"  # arguments came as a JSON string, as null, or under another key
    NESTED = "nested"  # more tags than needed around a call


class Span(NamedTuple):
    """Half-open range of characters in the answer."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Problem:
    """``message`` names cause and remedy, to be fed back to the model."""

    kind: ProblemKind
    message: str
    span: Span


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer taken apart. Every call that the model began is in ``calls`` or in ``problems``, whole.

    ``before`` is all text ahead of the first call or problem (with the thought, as the model wrote it) and ``after``
    all text behind it that belongs to none. ``spans`` has the place of each of ``calls``. ``notes`` say what was put
    right in a call that is in ``calls``, and which calls stood in a thought while others did not. ``thought`` is what
    stood in ``<think>``.
    """

    before: str
    calls: tuple[ToolCall, ...] = ()
    after: str = ""
    problems: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()
    spans: tuple[Span, ...] = ()
    thought: str = ""

    @property
    def feedback(self) -> str:
        """All problems as one message to the model; empty when there is none."""
        return "\n".join(problem.message for problem in self.problems)

"""A reward for tasks with a known answer: 1.0 if the answer matches the label, else 0.0."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Literal

from pydantic import Field, JsonValue

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.judgements import host_evidence
from openhands_rl_plugin.core.types import Frozen, Score, Trajectory

# A sign after a word or a digit is a dash; a comma between digits separates thousands.
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_LONGEST = 1_000_000


class MatchingOptions(Frozen):
    """``mode``: how the answer is compared with the label.

    ``exact``: equal characters. ``normalised``: equal words, ignoring case, white space and punctuation around them.
    ``number``: the last number of the answer equals the label's, within the relative ``tolerance``.
    """

    mode: Literal["exact", "normalised", "number"] = "normalised"
    tolerance: float = Field(default=1e-6, ge=0, lt=1)


class MatchingReward:
    """1.0 when the evidence's ``answer`` matches its ``label`` (or one of a list of labels), else 0.0.

    An episode that ended without an answer gets 0.0.
    """

    Options = MatchingOptions

    def __init__(self, options: MatchingOptions | None = None) -> None:
        self.options = options or MatchingOptions()

    @property
    def version(self) -> str:
        """The name of the reward with its mode, because modes give different scores."""
        mode, tolerance = self.options.mode, self.options.tolerance
        return f"matching-1@{mode}/{tolerance:g}" if mode == "number" else f"matching-1@{mode}"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` for a failed one, and without a usable label."""
        evidence = host_evidence(trajectory)
        labels, answer = self._labels(trajectory.id, evidence.get("label")), evidence.get("answer")
        if answer is not None and not isinstance(answer, str):
            raise GraderError(f"{trajectory.id} has an answer that is no text in its evidence")
        matched = answer is not None and any(self._matches(answer, label) for label in labels)
        return Score(
            trajectory_id=trajectory.id,
            reward=1.0 if matched else 0.0,
            detail={"answered": answer is not None},
            reward_version=self.version,
        )

    def _labels(self, identity: str, label: JsonValue) -> list[str]:
        labels = [_text(one) for one in (label if isinstance(label, list) else [label])]
        known = [one for one in labels if one is not None]
        if not known or len(known) < len(labels):
            raise GraderError(f"{identity} has no label in its evidence: give its task data.label")
        if self.options.mode == "number" and any(_number(one) is None for one in known):
            raise GraderError(f"{identity} has a label without a number: choose another mode of matching")
        return known

    def _matches(self, answer: str, label: str) -> bool:
        match self.options.mode:
            case "exact":
                return answer == label
            case "normalised":
                return _normalised(answer) == _normalised(label)
            case "number":
                given, wanted = _number(answer), _number(label)
                if given is None or wanted is None:
                    return False
                return math.isclose(given, wanted, rel_tol=self.options.tolerance, abs_tol=0.0)


def _text(label: JsonValue) -> str | None:
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return None
    return label if isinstance(label, str) else repr(label)


def _normalised(text: str) -> str:
    joined = " ".join(unicodedata.normalize("NFKC", text[:_LONGEST]).casefold().split())
    # An answer that is nothing but punctuation is compared as it is.
    return joined.strip("".join(filter(_is_edge, {*joined}))) or joined


def _is_edge(character: str) -> bool:
    return character == " " or (unicodedata.category(character)[0] == "P" and character != "-")


def _number(text: str) -> float | None:
    found = [match[0] for match in _NUMBER.finditer(text[-_LONGEST:])]
    return float(found[-1].replace(",", "")) if found else None

"""Whether a model's chat template takes exported rows, found out by rendering each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import JsonObject, Score, Trajectory
from openhands_rl_plugin.training.data.chat_forms import forms_printed
from openhands_rl_plugin.training.data.demonstrations import ChatTokenizer, TokenMaker
from openhands_rl_plugin.trajectories.exchange.conversations import ArgumentsForm
from openhands_rl_plugin.trajectories.exchange.formats import Files


class TemplateCheck:
    """Renders the columns ``conversations`` of rows on their way. ``refused``: reason -> how many rows."""

    def __init__(self, tokenizer: ChatTokenizer, conversations: Sequence[str]) -> None:
        self.rendered = 0
        self.refused: Counter[str] = Counter()
        self._render = TokenMaker(tokenizer).render
        self._conversations = conversations
        self.printed = forms_printed(self._render)

    @property
    def arguments(self) -> ArgumentsForm | None:
        """The form that suits the template; ``None`` when it prints no calls."""
        return self.printed[0] if self.printed else None

    def watching(self, files: Files) -> Files:
        """The same rows, each rendered."""

        def watched(
            trajectory: Trajectory, scores: Sequence[Score], beaten: Sequence[Trajectory]
        ) -> Iterator[tuple[str, JsonObject]]:
            for name, row in files(trajectory, scores, beaten):
                self._look_at(row)
                yield name, row

        return watched

    def _look_at(self, row: JsonObject) -> None:
        tools: Any = row.get("tools") or []
        try:
            # A preference is a conversation with two ends; the columns are in that order.
            first, *ends = (row[name] for name in self._conversations)
            for end in ends or [[]]:
                messages: Any = [*_listed(first), *_listed(end)]
                self._render(messages, tools, False)
            self.rendered += 1
        except TrainingError as error:
            self.refused[str(error)] += 1


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

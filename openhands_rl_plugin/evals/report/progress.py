"""The progress display of an evaluation: a bar with its times and the results so far."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from openhands_rl_plugin.evals.runs.outcome import UNKNOWN, Outcome, OutcomeKind
from openhands_rl_plugin.trajectories.view.progress import TimesColumn

_EVERY = 20


class EvaluationProgress:
    """Draws on stderr; without a terminal, prints a line every twenty attempts. Use as a context manager."""

    def __init__(self, left: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimesColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task("evaluating", total=left)
        self._left = left
        self._outcomes: list[OutcomeKind] = []
        self._tokens = 0
        self._cost: float | None = None

    def __enter__(self) -> EvaluationProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def finished(self, outcome: Outcome) -> None:
        """Count an attempt."""
        self._outcomes.append(outcome.kind)
        self._tokens += outcome.prompt_tokens + outcome.completion_tokens
        if outcome.cost is not None:
            self._cost = (self._cost or 0.0) + outcome.cost
        self._progress.update(self._bar, advance=1, description=self.line())
        done = len(self._outcomes)
        if not self._console.is_terminal and (done % _EVERY == 0 or done == self._left):
            self._console.print(f"{done} of {self._left}: {self.line()}", highlight=False, soft_wrap=True)

    def line(self) -> str:
        """The results so far."""
        resolved = self._outcomes.count(OutcomeKind.RESOLVED)
        unknown = sum(kind in UNKNOWN for kind in self._outcomes)
        parts = [f"resolved {resolved}/{len(self._outcomes) - unknown}"]
        if unknown:
            parts.append(f"{unknown} failed or not graded")
        parts.append(f"{self._tokens / 1000:,.0f}k tokens")
        if self._cost is not None:
            parts.append(f"cost {self._cost:,.2f}")
        return ", ".join(parts)

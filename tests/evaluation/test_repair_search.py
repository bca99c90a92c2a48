"""What the comparison of searches on repair tasks makes of the outcomes."""

from __future__ import annotations

from rich.console import Console

from evaluation.performance.search.repair import BUDGETS, Played, Row, chart, differences, table


def played(strategy: str, *spent: int) -> Played:
    """A task each: resolved for so many sampled tokens, or not, where they are negative."""
    rows = [Row(task=str(at), resolved=n > 0, billed=10 * abs(n), sampled=abs(n)) for at, n in enumerate(spent)]
    return Played(strategy=strategy, rows=tuple(rows), failed=1)


def test_a_task_counts_for_the_budgets_that_it_was_resolved_within() -> None:
    one = played("ReAct", 70, 400, -50, 3000)
    assert [sum(one.within("sampled", budget).values()) for budget in BUDGETS["sampled"]] == [1, 1, 1, 2, 2, 2]
    assert [sum(one.within("billed", budget).values()) for budget in BUDGETS["billed"]] == [1, 1, 2, 2, 2, 3]


def test_searches_are_compared_task_by_task_with_react_at_equal_tokens() -> None:
    plain, best = played("ReAct", *[-600] * 20, *[70] * 20), played("BestOfN", *[280] * 40)
    lines = list(differences([plain, best], "sampled"))
    assert len(lines) == len(BUDGETS["sampled"])
    assert lines[0].startswith("75 sampled tokens: BestOfN - ReAct: -0.50 [") and "over 40 tasks" in lines[0]
    assert lines[-1].startswith("2,400 sampled tokens: BestOfN - ReAct: +0.50 [+0.3")
    assert not list(differences([best], "sampled"))
    with (console := Console(width=110)).capture() as printed:
        console.print(table([plain, best], "sampled"))
    text = printed.get()
    assert "ReAct" in text and "335" in text and "1.00" in text
    assert "BestOfN" in chart([plain, best], "sampled")

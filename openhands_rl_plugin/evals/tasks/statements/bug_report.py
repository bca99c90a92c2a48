"""Bug reports from failing tests: steps, actual result, expected result. They never contain the fix."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.evals.tasks.hidden_tests import file_of, function_of
from openhands_rl_plugin.evals.tasks.sandbox import FailureNote
from openhands_rl_plugin.evals.tasks.statements.examples import FailureExample, body_of, example_of

LEAK_LENGTH = 12
_MOST_TRIED, _MOST_SHOWN, _MOST_VALUE, _MOST_NAMED = 8, 2, 900, 6
_UNSTABLE = re.compile(r"0x[0-9a-f]{6,}|/tmp/|/testbed|object at |\d+\.\d{9,}s")

_KINDS, _CLEAR = ("equal", "raises", "runs", "holds"), ("equal", "raises")

type RunSnippet = Callable[[str, bool], dict[str, str]]
"""``(script, whether the bug is there)`` -> what ``snippets.py`` found."""


@dataclass(frozen=True)
class ShownExample:
    """An example that was run: its title and the text about its result."""

    example: FailureExample
    title: str
    text: str


def statement_of(
    label: str, python: str, texts: Callable[[str], str | None], failures: dict[str, FailureNote], run: RunSnippet
) -> str | None:
    """The report on the tests that failed; ``None`` when nothing in them can be shown.

    ``texts`` gives the text of a test file. Every example has been run: it fails with the bug and not without.
    """
    shown = _examples(texts, failures, run)
    covered = {function_of(each.example.test) for each in shown}
    if shown:
        title = shown[0].title
        parts = [f"I am using {label} with Python {python}.", "To reproduce:", shown[0].text]
        for other in shown[1:]:
            parts += ["It goes wrong here as well:", other.text]
    elif (plain := _plain(texts, failures)) is not None:
        title, text, test = plain
        covered.add(function_of(test))
        parts = [f"I am using {label} with Python {python}. My code does this:", text]
    else:
        return None
    if others := _others(failures, covered):
        parts.append("Also affected, as far as I can see:\n\n" + "\n".join(f"- {each}" for each in others))
    return "\n\n".join([title, *parts]) + "\n"


def leaks(statement: str, patch: str) -> bool:
    """Whether a changed line of a patch that is longer than ``LEAK_LENGTH`` characters stands in a statement."""
    return any(line in statement for line in changed_lines(patch) if len(line) > LEAK_LENGTH)


def changed_lines(patch: str) -> list[str]:
    """The added and removed lines of a patch, without what is around them."""
    return [
        line[1:].strip() for line in patch.splitlines() if line[:1] in "+-" and not line.startswith(("+++ ", "--- "))
    ]


def _examples(
    texts: Callable[[str], str | None], failures: dict[str, FailureNote], run: RunSnippet
) -> list[ShownExample]:
    found: list[FailureExample] = []
    for test, note in sorted(failures.items()):
        if (text := texts(note.file)) is not None and (example := example_of(text, test, note)) is not None:
            found.append(example)
    found.sort(key=lambda example: (_KINDS.index(example.claim.kind), len(example.code), example.test))
    shown: list[ShownExample] = []
    for example in _apart(found)[:_MOST_TRIED]:
        if shown and (
            example.claim.kind not in _CLEAR or function_of(example.test) == function_of(shown[0].example.test)
        ):
            continue
        if (one := _shown(example, run)) is not None:
            shown.append(one)
        if len(shown) == _MOST_SHOWN:
            break
    return shown


def _apart(examples: Sequence[FailureExample]) -> list[FailureExample]:
    """One of each test function first, then the others."""
    first: dict[str, FailureExample] = {}
    for example in examples:
        first.setdefault(f"{file_of(example.test)}::{function_of(example.test)}", example)
    return [*first.values(), *(example for example in examples if example not in first.values())]


def _shown(example: FailureExample, run: RunSnippet) -> ShownExample | None:
    with_bug, without = run(example.script, True), run(example.script, False)
    claim = example.claim
    if claim.kind == "raises":
        as_expected = without.get("error") == claim.expected != with_bug.get("error", "")
    else:
        as_expected = without.get("HOLDS") == "True" and with_bug.get("HOLDS") != "True" and bool(with_bug)
    if not as_expected:
        return None
    called = f"`{claim.called}()`" if claim.called else "the code below"
    raised = _quoted_error(with_bug["error"], with_bug.get("message", "")) if "error" in with_bug else ""
    if claim.kind == "raises":
        expected = f"It should raise `{claim.expected}`."
        actual = f"Instead it raises {raised}." if raised else "Nothing is raised."
        title = f"{called} does not raise `{claim.expected}`"
    elif raised:
        equal = claim.kind == "equal"
        expected = _value("Expected result:", without["EXPECTED"]) if equal else "There should be no error."
        actual = f"What happens: it raises {raised}."
        title = f"{called} fails with `{with_bug['error']}`"
    elif claim.kind == "holds":
        expected, actual = "This should be true.", "What happens: it is false."
        title = f"Unexpected behaviour of {called}"
    else:
        if with_bug["ACTUAL"] == without["EXPECTED"]:
            return None
        expected = _value("Expected result:", without["EXPECTED"])
        actual = _value("Actual result:", with_bug["ACTUAL"])
        title = f"{called} gives a wrong result"
    text = "\n\n".join([f"```python\n{example.code}\n```", expected, actual])
    if _UNSTABLE.search(text):
        return None
    return ShownExample(example, title[:1].upper() + title[1:] if title[:1].isalpha() else title, text)


def _plain(texts: Callable[[str], str | None], failures: dict[str, FailureNote]) -> tuple[str, str, str] | None:
    """Title, text and test of the shortest failure that cannot be taken out of its test."""
    found: list[tuple[int, str, str]] = []
    for test, note in failures.items():
        text = texts(note.file)
        if note.line and text is not None and (code := body_of(text, test, note)) is not None:
            found.append((len(code), test, code))
    for _, test, code in sorted(found):
        note = failures[test]
        text = (
            f"```python\n{code}\n```\n\nThe last step fails with {_quoted_error(note.error, note.message)}."
            " (It is part of a test, whose set-up makes what is not defined here.)"
        )
        if not _UNSTABLE.search(text):
            return f"Wrong behaviour: {_words(function_of(test))}", text, test
    return None


def _quoted_error(kind: str, text: str) -> str:
    message = next((line for line in text.splitlines() if line.strip()), "")[:300]
    return f"`{kind}: {message}`" if message else f"`{kind}`"


def _value(label: str, text: str) -> str:
    """A value as Python writes it; a text of several lines as it is printed."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        value = None
    if isinstance(value, str) and "\n" in value.strip("\n") and "```" not in value:
        text = value.strip("\n")
    if len(text) > _MOST_VALUE:
        text = text[:_MOST_VALUE] + " ..."
    return f"{label}\n\n```\n{text}\n```"


def _others(failures: Iterable[str], covered: set[str]) -> list[str]:
    """Other failures, by the names of their tests."""
    names = sorted({function_of(test) for test in failures} - covered)
    words = [each for each in dict.fromkeys(map(_words, names)) if each]
    more = [f"and {len(words) - _MOST_NAMED} more"] if len(words) > _MOST_NAMED else []
    return [*words[:_MOST_NAMED], *more]


def _words(name: str) -> str:
    """``test_parse_empty`` -> ``parse empty``, ``testParseEmpty`` -> ``parse empty``."""
    name = re.sub(r"^tests?_*", "", name, flags=re.IGNORECASE)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").strip().lower()

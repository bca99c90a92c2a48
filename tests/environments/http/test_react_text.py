from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.environments.http.react import parse_plain, parse_react


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thought: a lamp\nAction: search[red lamp]", "search[red lamp]"),
        ("Thought:\nI think ...\n\nAction:\nclick[Buy Now]", "click[Buy Now]"),
        ("Action: first\nAction: second", "second"),
        ("Action: go\nObservation: invented\nThought: more", "go"),
        ("action : go", "go"),
        ("**Action:** go", "go"),
        ("Action 2: go", "go"),
        ("Action: `go`", "go"),
        ("Action:\n```python\ngo\n```", "go"),
        ("Thought: x\r\nAction: go\r\n", "go"),
        ("Action: Action: go", "Action: go"),
    ],
)
def test_the_last_action_line_wins(text: str, action: str):
    assert (parse_react(text).action, parse_react(text).error) == (action, None)


CODE = 'def f(x):\n    if x:\n\n        return "Action: no"\n    return 1'
JSON = '{\n  "tool_name": "write",\n  "arguments": {"text": "a\\nb"}\n}'


@pytest.mark.parametrize("action", [CODE, JSON, "first line\nsecond line", "    indented\n  less", "a `b` c\n`d`"])
def test_an_action_of_several_lines_arrives_whole(action: str):
    fenced = f"```python\n{action}\n```"
    for text in (f"Thought: so\nAction:\n{fenced}", f"Action: {fenced}", f"Action:\n{fenced}\nThat should do it."):
        assert parse_react(text).action == action, text
    for text in (f"Action: {action}", f"Action:\n{action}\nObservation: made up\nThought: x"):
        assert parse_react(text).action == action.strip(), text
    assert parse_plain(fenced).action == action
    answer = f"It is so:\n{fenced}\nor\n{fenced}"
    assert parse_plain(answer).action == answer, "what stands between fences is kept, and so are they"


def test_several_fences_are_no_action():
    document = "# T\n```\ncode\n```\nmore"
    assert parse_react(f"Action:\n````markdown\n{document}\n````").action == document
    for text in (
        f"Action:\n```markdown\n{document}\n```",
        "Action: ```python\nx = 1\n```\nand then\n```python\ny = 2\n```",
        "Action:\n```\na\n```\nthen\n```\nb\n```",
    ):
        assert parse_react(text).action is None and "several code fences" in (parse_react(text).error or "")


def test_a_line_of_code_is_no_action_line():
    yaml = "on: push\naction: run\nsteps: []"
    assert parse_react(f"Thought: x\nAction:\n```yaml\n{yaml}\n```").action == yaml
    assert parse_react(f"Thought: as in\n```yaml\n{yaml}\n```\nAction: go").action == "go"
    assert parse_react("```\nThought: x\nAction: go\n```").action == "go", "the whole answer in a fence"
    assert parse_react("Thought: ```\nAction: go\nfar").action == "go\nfar", "a fence that nothing closes is none"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "no line"),
        ("The next action: search", "no line"),
        ("Action:", "empty"),
    ],
)
def test_what_is_wrong_is_reported(text: str | None, complaint: str):
    parsed = parse_react(text)
    assert parsed.action is None
    assert parsed.error is not None and complaint in parsed.error


@pytest.mark.parametrize(
    ("text", "action"),
    [("go", "go"), ("```\na\nb\n```", "a\nb"), ("`go`", "go"), ("", None), ("```\n```", None)],
)
def test_plain_text_is_the_action(text: str, action: str | None):
    parsed = parse_plain(text)
    assert parsed.action == action
    assert (parsed.error is None) == (action is not None)


_PIECES = st.sampled_from(
    ["Action:", "Thought:", "\n", "`", "```", "```py", "</s>", "<|im_end|>", " ", "*", "go", "\r", "\0"]
)


@settings(deadline=None)
@given(st.one_of(st.none(), st.text(), st.lists(st.one_of(_PIECES, st.text(max_size=5)), max_size=30).map("".join)))
def test_any_text_gives_an_action_or_an_error(text: str | None):
    for parsed in (parse_react(text), parse_plain(text)):
        assert (parsed.action is None) != (parsed.error is None)
        if parsed.action is not None:
            assert parsed.action.strip() and parsed.action == parsed.action.strip("\n").rstrip()


def test_a_long_hostile_text_is_read_quickly():
    for text in (
        "*" * 300_000,
        "Action" + " " * 300_000,
        "```x\n" * 60_000,
        "Action: ```\n" + "cat <<EOF\n" * 60_000,
        "Action: x\n" * 60_000 + "Action:",
    ):
        started = time.process_time()
        assert parse_react(text) and parse_plain(text)
        # A pattern that backtracks needs hours for these; a linear one milliseconds.
        assert time.process_time() - started < 5.0

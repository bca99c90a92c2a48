"""Each message that the page explains is one that the source can print."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from page_session import DOCS, ROOT

PAGE = (DOCS / "howto/troubleshooting.md").read_text(encoding="utf-8").partition("## No message")[0]
MESSAGES = re.findall(r"^\| `(.+)` \| ", PAGE, re.MULTILINE)


@cache
def texts() -> list[str]:
    """Every text of the source, with ``...`` for what is filled in."""
    found = []
    for file in sorted((ROOT / "openhands_rl_plugin").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_page_has_many_messages() -> None:
    assert len(MESSAGES) >= 20


@pytest.mark.parametrize("message", MESSAGES)
def test_the_source_has_it(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.replace("``", "`").split("...")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in texts())

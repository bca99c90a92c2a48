"""Examples are run: those in docstrings, and the Python blocks of README.md."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin import Message, Task, ToolEnvironment
from openhands_rl_plugin.core.types import ToolCall
from openhands_rl_plugin.testing import check_strategy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def has_example(file: Path) -> bool:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, documented)]
    return any(">>> " in (ast.get_docstring(node) or "") for node in nodes)


WITH_EXAMPLES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "openhands_rl_plugin").rglob("*.py"))
    if has_example(file)
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings(module: str) -> None:
    """Those of one module share their names, so that the module's own docstring can import what all of them use."""
    imported = importlib.import_module(module)
    names = dict(vars(imported))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in sorted(doctest.DocTestFinder().find(imported), key=lambda each: each.lineno or 0):
        example.globs = names
        runner.run(example, clear_globs=False)
    assert runner.tries and not runner.failures


def block_with(word: str) -> str:
    (found,) = (block for block in BLOCKS if word in block)
    return found


def names_of(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_what_the_readme_imports_is_there(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("openhands_rl_plugin"):
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


async def test_the_readmes_strategy_passes_its_conformance_check() -> None:
    await check_strategy(names_of(block_with("class Careful"))["Careful"]())


async def test_the_readmes_tool_is_called() -> None:
    price = names_of(block_with("class Price"))["Price"]
    call = ToolCall(id="1", name="price", arguments='{"product": "lamp"}')
    environment = ToolEnvironment(tools=[price()])
    await environment.reset(Task(id="t", environment="tools", instruction="What does the lamp cost?"))
    answer = await environment.step(Message(role="assistant", content="", tool_calls=(call,)))
    await environment.close()
    assert "18.50" in str(answer.messages)

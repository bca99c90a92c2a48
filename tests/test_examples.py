"""Examples are run: those in docstrings, and those of README.md, whose configuration and commands are checked too."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin import Message, Task, ToolEnvironment, cli
from openhands_rl_plugin.apps.demo.model import ensure_model
from openhands_rl_plugin.config.starting import starting_config
from openhands_rl_plugin.config.toml import settings_from_sections
from openhands_rl_plugin.core.types import ToolCall
from openhands_rl_plugin.testing import check_strategy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
BLOCKS = [text for language, text in FENCED if language == "python"]
TABLES = [text for language, text in FENCED if language == "toml"]
GUIDES = [ROOT / "evaluation/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = [text for language, text in FENCED if not language] + [
    text
    for guide in GUIDES
    for text in re.findall(r"^```(?:\w*)\n(.*?)^```", guide.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]
LINES = [
    line.strip()
    for text in SHELL
    for line in text.replace("\\\n", " ").splitlines()
    if re.match(r"(\w+=\S+ )*(openhands-rl|python -m openhands|pip|make|vllm) ", line)
]


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


@pytest.mark.parametrize("table", TABLES, ids=range(len(TABLES)))
def test_the_readmes_configuration_has_keys_that_are_there(table: str) -> None:
    settings_from_sections(tomllib.loads(table.replace("./adapters/verifier-v000001", "DIR")))


def test_the_readmes_configuration_is_a_part_of_what_config_init_writes() -> None:
    readme = next(tomllib.loads(table) for table in TABLES if "[core]" in table)
    text = starting_config(model="model", base_url="http://127.0.0.1:8100/v1", workspace="./workspace")
    written = tomllib.loads(text)
    for section, keys in readme.items():
        for key, value in keys.items():
            whole = written[section][key]
            assert (whole | value if isinstance(value, dict) else value) == whole, (section, key)


@pytest.mark.parametrize("line", LINES)
def test_the_readmes_commands_are_commands(line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    match words:
        case ["openhands-rl", command, *rest]:
            parser = cli.parser_of(command)
            parser.parse_args([command, *rest])
        case ["python", "-m", "openhands.core.main", *rest]:
            from openhands.core.config.arg_utils import get_headless_parser

            get_headless_parser().parse_args(rest)
        case ["pip", "install", package]:
            name, _, extras = package.rstrip("]").partition("[")
            assert name == project["name"]
            assert set(filter(None, extras.split(","))) <= set(project["optional-dependencies"])
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["vllm", "serve", _, *rest]:
            # The options with which tests and benchmarks start a real vLLM (``make test-vllm``).
            served = (ROOT / "evaluation/performance/serving/vllm_server.py").read_text()
            known = {"--served-model-name", "--max-model-len"}
            assert [word for word in rest if word.startswith("--") and word not in known and word not in served] == []
        case _:
            pytest.fail(f"README has a command that nothing checks: {line}")


@pytest.mark.slow
def test_the_readmes_example_learns(tmp_path: Path) -> None:
    """On the model that it is written for, in a folder of its own."""
    pytest.importorskip("torch")
    (tmp_path / "capitals.py").write_text(block_with("class Capitals"))
    ensure_model()  # so that the time is that of the example
    done = subprocess.run([sys.executable, "capitals.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = re.search(r"held-out countries: ([\d.]+) before, ([\d.]+) after", done.stdout)
    assert said and float(said[2]) >= float(said[1]) + 0.3, done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capitals", "capitals.py"]

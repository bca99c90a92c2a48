"""How fast answers with calls are taken apart, and how many calls of the corpus are read as they were meant.

    python -m evaluation.performance.formats.parsing [--repeats 5] [--peers-python PATH] [--json FILE]

Three loads: answers as models write them (a sentence, and a call with some hundred characters of arguments); the same
calls in OpenHands' text form; and the corpus of malformed and odd calls. ``--peers-python`` is a Python with verl; its
hermes parser takes turns with ours in every repeat. It is timed as it is, with a thread for decoding each answer (there
is nothing to decode here), and without that thread. Ours checks nothing against tools, as verl's does not.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from openhands_rl_plugin.core.templates.function_text import parse_function_text, render_call
from openhands_rl_plugin.core.templates.json_calls import parse_tool_call_json, render_tool_call
from openhands_rl_plugin.core.templates.parsing import ParsedAnswer
from openhands_rl_plugin.core.types import ToolCall

CORPUS = Path(__file__).parents[3] / "tests" / "core" / "templates" / "corpus" / "tool_call.jsonl"
SECONDS = 1.0
"""How long one sample takes, about."""

WAYS = {"verl": "as_it_is", "verl, no thread": "inline"}
_WORDS = ("the", "file", "has", "a function", "that reads", "values", "from", "its parent", "in order", "or fails")

Calls = list[list[tuple[str, Any]]]
"""For each answer its calls: a name and the arguments as a value."""


@dataclass(frozen=True)
class Load:
    """Answers, and who of ours parses them; ``with_peers``: verl's parser knows the form too."""

    name: str
    texts: tuple[str, ...]
    parse: Callable[[str], ParsedAnswer]
    with_peers: bool


@dataclass(frozen=True)
class Figure:
    """Parses a second, median of the repeats; ``ratio`` is ours over theirs."""

    load: str
    parser: str
    per_second: float
    ratio: float | None


def loads(count: int = 300) -> list[Load]:
    """The same answers in every run."""
    source = random.Random(0)
    calls = [_call(source, number) for number in range(count)]
    said = [f"I will look at part {number} of it now.\n\n" for number in range(count)]
    return [
        Load(
            "<tool_call>, as models write it",
            tuple(f"{one}{render_tool_call(call)}" for one, call in zip(said, calls, strict=True)),
            parse_tool_call_json,
            with_peers=True,
        ),
        Load("<tool_call>, corpus", tuple(row["text"] for row in corpus()), parse_tool_call_json, with_peers=True),
        Load(
            "<function=...>, as models write it",
            tuple(f"{one}{render_call(call)}" for one, call in zip(said, calls, strict=True)),
            parse_function_text,
            with_peers=False,
        ),
    ]


def corpus() -> list[dict[str, Any]]:
    """The rows that need no tools to be judged."""
    rows = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if not row.get("tools")]


def _call(source: random.Random, number: int) -> ToolCall:
    indents = (" " * source.choice([0, 4, 8]) for _ in range(source.randint(1, 12)))
    text = "\n".join(indent + " ".join(source.choices(_WORDS, k=5)) for indent in indents)
    path = f"/repo/module_{number}.py"
    arguments = {"command": "str_replace", "path": path, "old_str": text, "new_str": text.upper()}
    return ToolCall(name="str_replace_editor", arguments=json.dumps(arguments))


def ours(load: Load, passes: int) -> float:
    """Seconds for all answers of the load, ``passes`` times."""
    started = time.perf_counter()
    for _ in range(passes):
        for text in load.texts:
            load.parse(text)
    return time.perf_counter() - started


class Peer:
    """verl's parser in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout

    def ask(self, index: int, passes: int, way: str) -> tuple[float, Calls]:
        """Seconds for all answers of a list, and the calls that were found."""
        self._stdin.write(f"{index} {passes} {way}\n")
        self._stdin.flush()
        answer = json.loads(self._stdout.readline())
        return answer["seconds"], [[(name, json.loads(text)) for name, text in one] for one in answer["calls"]]


@contextmanager
def peer(python: str, measured: Sequence[Load]):
    """The process of verl's parser, which knows the answers of all loads."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers.json"
        file.write_text(json.dumps([load.texts for load in measured]), encoding="utf-8")
        script = Path(__file__).with_name("parsing_peer.py")
        command = [python, str(script), str(file)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield Peer(process)
            assert process.stdin is not None
            process.stdin.close()


def measure(repeats: int, python: str | None) -> tuple[list[Figure], list[tuple[str, int, int]]]:
    """All figures, and for each parser how many rows of the corpus it read as they were meant, of how many."""
    measured = loads()
    if python is None:
        return _figures(measured, repeats, None), [_recall("openhands_rl_plugin", _our_calls())]
    with peer(python, measured) as other:
        figures = _figures(measured, repeats, other)
        _, found = other.ask(1, 1, "inline")
        return figures, [_recall("openhands_rl_plugin", _our_calls()), _recall("verl", found)]


def _figures(measured: Sequence[Load], repeats: int, other: Peer | None) -> list[Figure]:
    figures = []
    for index, load in enumerate(measured):
        passes = max(1, round(SECONDS / ours(load, 1)))
        rates: dict[str, list[float]] = {}
        ways = WAYS if other is not None and load.with_peers else {}
        if other is not None and ways:
            other.ask(index, 1, "inline")
        for repeat in range(repeats):
            names = ["openhands_rl_plugin", *ways]
            for name in names if repeat % 2 == 0 else reversed(names):
                theirs = other is not None and name in ways
                count = max(1, passes // 4) if theirs else passes
                seconds = other.ask(index, count, ways[name])[0] if other and theirs else ours(load, count)
                rates.setdefault(name, []).append(count * len(load.texts) / seconds)
        own = statistics.median(rates["openhands_rl_plugin"])
        for name, several in rates.items():
            rate = statistics.median(several)
            figures.append(Figure(load.name, name, rate, own / rate if name in ways else None))
    return figures


def _our_calls() -> Calls:
    answers = (parse_tool_call_json(row["text"]) for row in corpus())
    return [[(call.name, json.loads(call.arguments)) for call in answer.calls] for answer in answers]


def _recall(parser: str, found: Calls) -> tuple[str, int, int]:
    rows = corpus()
    meant: Calls = [[(name, arguments) for name, arguments in row["calls"]] for row in rows]
    with_calls = [(one, other) for one, other in zip(meant, found, strict=True) if one]
    return parser, sum(one == other for one, other in with_calls), len(with_calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers-python", help="a Python that has verl 0.9.1 (with cachetools and uvicorn) installed")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    figures, recalls = measure(options.repeats, options.peers_python)
    table = Table("load", "parser", "parses/s", "ours over theirs", title=f"medians of {options.repeats} repeats")
    for one in figures:
        table.add_row(one.load, one.parser, f"{one.per_second:,.0f}", f"{one.ratio:.1f}" if one.ratio else "")
    console = Console()
    console.print(table)
    for name, read, meant in recalls:
        console.print(f"{name}: {read} of {meant} answers of the corpus that hold calls were read as they were meant")
    figures_json = json.dumps({"figures": [asdict(one) for one in figures], "recall": recalls})
    if options.json:
        options.json.write_text(figures_json, encoding="utf-8")
    print(figures_json)


if __name__ == "__main__":
    main()

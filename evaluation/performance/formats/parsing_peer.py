"""Parses answers with verl's hermes parser, run by a Python that has verl; nothing of this project is imported.

    PYTHON evaluation/performance/formats/parsing_peer.py FILE

``FILE`` holds lists of answers as JSON. For every line ``INDEX PASSES WAY`` on standard input, all answers of a list
are parsed so often, and one line of JSON is printed. ``as_it_is``: verl's parser decodes in a thread for each answer.
``inline``: the same parser in a loop whose executor runs everything at once, which leaves the parsing alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.tool_parser import ToolParser  # pyright: ignore[reportMissingImports]


class Texts:
    """A tokenizer for answers that are texts already."""

    def decode(self, ids: str) -> str:
        return ids


class Inline(ThreadPoolExecutor):
    """Runs what is submitted at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


async def parsed(texts: list[str], passes: int, way: str) -> dict[str, Any]:
    if way == "inline":
        asyncio.get_running_loop().set_default_executor(Inline())
    parser = ToolParser.get_tool_parser("hermes", Texts())
    calls: list[list[tuple[str, str]]] = []
    started = time.perf_counter()
    for _ in range(passes):
        calls = []
        for text in texts:
            _, found = await parser.extract_tool_calls(text)
            calls.append([(call.name, call.arguments) for call in found])
    return {"seconds": time.perf_counter() - started, "calls": calls}


def main() -> None:
    # It logs every call that it drops, which would be timed too.
    logging.disable(logging.ERROR)
    lists = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for line in sys.stdin:
        index, passes, way = line.split()
        print(json.dumps(asyncio.run(parsed(lists[int(index)], int(passes), way))), flush=True)


if __name__ == "__main__":
    main()

"""What recording adds to a completion whose prompt has 6,000 to 35,000 tokens.

    python -m evaluation.performance.hosts.recording [--quick] [--repeats 10] [--turns 30] [--json FILE]

A session goes through OpenHands' own ``LLM`` to a server in a process of its own that answers at once. Every turn is
asked in three ways, one after the other and in changing order, and the differences are taken turn by turn:

* stock: no token ids, nobody records;
* with ids: the same request as the session's, but nobody records;
* session: as the agent does, by the direct call: the conversation is followed, the strategy decides, the answer is put
  into the episode's tree. It is faster than litellm, so the difference is negative.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openhands.core.config import LLMConfig
from openhands.llm.llm import LLM
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from evaluation.performance.hosts.scripted_session import FIRST_PROMPT, LAST_PROMPT, Session, session_server
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.hosts.shared.sessions import standalone_episode
from openhands_rl_plugin.hosts.v0.agent import connect

TARGET_MS = 1.0

Ask = Callable[[int], None]


def _llm(url: str, **more: Any) -> LLM:
    config = LLMConfig(
        model="openai/policy-v000001",
        base_url=url,
        api_key=SecretStr("none"),
        native_tool_calling=True,
        caching_prompt=False,
        num_retries=1,
        **more,
    )
    return LLM(config, service_id="agent")


class Ways:
    """The three ways to ask, over one conversation of their own each; made anew for every repeat."""

    def __init__(self, url: str, session: Session) -> None:
        self._session = session
        self._stock = _llm(url)
        self._with_ids = _llm(url, completion_kwargs={"logprobs": True, "extra_body": {"return_token_ids": True}})
        self._recorded = _llm(url)
        self._episode = standalone_episode(
            RLSettings(), session="s", instruction="", base_model="policy", environment_mode=False
        )
        self._episode.upstream = connect(self._recorded, self._episode.answer)
        self.all: dict[str, Ask] = {"stock": self.stock, "with ids": self.with_ids, "session": self.session}

    def _arguments(self, turn: int) -> dict[str, Any]:
        return {
            "messages": self._session.prompts[turn],
            "tools": self._session.tools,
            "seed": turn,
            "temperature": 1.0,
            "max_completion_tokens": 512,
        }

    def stock(self, turn: int) -> None:
        """OpenHands as it is."""
        self._stock.completion(**self._arguments(turn))

    def with_ids(self, turn: int) -> None:
        """OpenHands as it is, with a server that sends token ids."""
        self._with_ids.completion(**self._arguments(turn))

    def session(self, turn: int) -> None:
        """As a turn of the controller goes through the session."""
        self._recorded.completion(**self._arguments(turn))
        tokens = self._episode.tree.nodes[-1].tokens
        assert tokens is not None and tokens.extends is (turn > 0)


@dataclass(frozen=True)
class Row:
    """Medians in milliseconds: of one way, and of its difference to another in the same turn."""

    way: str
    compared_with: str
    wall_ms: float
    cpu_ms: float
    added_wall_ms: float
    added_cpu_ms: float


Times = dict[str, list[tuple[float, float]]]


def measure(url: str, session: Session, repeats: int) -> Times:
    """Wall and processor milliseconds of every call, by way. The first repeat warms up and is dropped."""
    times: Times = {}
    for repeat in range(repeats + 1):
        ways = Ways(url, session)
        names = list(ways.all)
        for turn in range(len(session.prompts)):
            at = (repeat + turn) % len(names)
            for name in names[at:] + names[:at]:
                wall, cpu = time.perf_counter(), time.process_time()
                ways.all[name](turn)
                spent = (1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu))
                if repeat:
                    times.setdefault(name, []).append(spent)
                # litellm goes on working in threads of its own after the answer, which the next call should not pay.
                time.sleep(0.01)
    return times


def rows(times: Times) -> list[Row]:
    """The comparisons that matter."""
    pairs = [("session", "stock"), ("session", "with ids"), ("with ids", "stock")]
    return [_row(times, way, other) for way, other in pairs]


def _row(times: Times, way: str, other: str) -> Row:
    wall, cpu = zip(*times[way], strict=True)
    other_wall, other_cpu = zip(*times[other], strict=True)
    return Row(
        way=way,
        compared_with=other,
        wall_ms=round(statistics.median(wall), 2),
        cpu_ms=round(statistics.median(cpu), 2),
        added_wall_ms=round(statistics.median(a - b for a, b in zip(wall, other_wall, strict=True)), 2),
        added_cpu_ms=round(statistics.median(a - b for a, b in zip(cpu, other_cpu, strict=True)), 2),
    )


def _table(results: list[Row]) -> Table:
    table = Table(title=f"Added to a completion of {FIRST_PROMPT:,} to {LAST_PROMPT:,} prompt tokens (medians, ms)")
    for column in ("way", "compared with", "wall", "CPU", "added wall", "added CPU"):
        table.add_column(column, justify="left" if column in ("way", "compared with") else "right")
    for row in results:
        table.add_row(*(str(value) for value in asdict(row).values()))
    return table


def main() -> None:
    """Measure, print a table and one line of JSON, and write the same JSON to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two repeats of ten turns, to see that it works")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.turns = 2, 10
    # litellm's response types make pydantic warn on every completion.
    warnings.filterwarnings("ignore", module="pydantic")
    before = os.getloadavg()[0]
    with session_server(options.turns) as url:
        results = rows(measure(url, Session.make(options.turns), options.repeats))
    Console().print(_table(results))
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_before": round(before, 2)}
    added = results[0].added_wall_ms
    report = json.dumps(
        {
            "machine": machine,
            "rows": [asdict(row) for row in results],
            "target_ms": TARGET_MS,
            "reached": added <= TARGET_MS,
        }
    )
    print(report)
    if options.json is not None:
        options.json.write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

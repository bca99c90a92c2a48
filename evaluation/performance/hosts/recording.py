"""What recording adds to a completion whose prompt has 6,000 to 35,000 tokens.

    python -m evaluation.performance.hosts.recording [--quick] [--repeats 10] [--turns 30] [--json FILE]

A session goes through OpenHands' own ``LLM`` to a server in a process of its own that answers at once. Every
turn is asked in four ways, one after the other and in changing order, and the differences are taken turn by turn:

* stock: no token ids, no recorder;
* with ids: the same request as the recorder's, but nobody records;
* recorded: the conversation is followed, the call recorded, and the answer put into the episode's tree;
* engine: the same through the agent's engine, which adds its threads and the metadata of the attempt.

The difference between two calls over HTTP is noisy, and negative where the recorder saves litellm work: it takes the
token ids out of the answer before that is read. So the recorder's own work is timed by itself too, with that part.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from openhands.core.config import LLMConfig
from openhands.llm.llm import LLM
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from evaluation.performance.hosts.scripted_session import FIRST_PROMPT, LAST_PROMPT, Session, session_server
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.tree import EpisodeTree, HostConversation
from openhands_rl_plugin.hosts.shared.litellm_calls import TokenInterceptor
from openhands_rl_plugin.hosts.shared.standalone_run import standalone_episode
from openhands_rl_plugin.hosts.v0.engine import ControllerEngine, HostTurn
from openhands_rl_plugin.hosts.v0.recorder import CallLog, record_completions, recording

TARGET_MS = 1.0

OWN_WORK = "recorder's own work"

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


class Stopwatch:
    """Milliseconds of wall and of this thread's processor time, added up while it runs."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def lap(self) -> tuple[float, float]:
        """The times so far; begins anew."""
        times = self.wall, self.cpu
        self.wall = self.cpu = 0.0
        return times

    @contextmanager
    def running(self, sign: int = 1) -> Iterator[None]:
        """Add the time of the block; with ``sign`` -1, take it off."""
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.wall += sign * 1000 * (time.perf_counter() - wall)
            self.cpu += sign * 1000 * (time.thread_time() - cpu)

    def timed[T](self, call: Callable[..., T], sign: int = 1) -> Callable[..., T]:
        """``call``, timed; it keeps the bound arguments that the recorder looks for."""

        def run(*args: Any, **kwargs: Any) -> T:
            with self.running(sign):
                return call(*args, **kwargs)

        run.keywords = getattr(call, "keywords", {})  # type: ignore[attr-defined]
        return run


class Ways:
    """The four ways to ask, over one session of their own each; made anew for every repeat."""

    def __init__(self, url: str, session: Session) -> None:
        self._session = session
        self._stock = _llm(url)
        self._with_ids = _llm(url, completion_kwargs={"logprobs": True, "extra_body": {"return_token_ids": True}})
        self.own_work = Stopwatch()
        self._recorded: Any = _llm(url)
        # What litellm takes inside the recorder is taken off what the recorder takes.
        self._recorded._completion_unwrapped = self.own_work.timed(self._recorded._completion_unwrapped, sign=-1)
        record_completions(self._recorded)
        self._recorded._completion_unwrapped = self.own_work.timed(self._recorded._completion_unwrapped)
        self._tree = EpisodeTree()
        self._conversation = HostConversation(self._tree)
        settings = RLSettings()
        self._episode = standalone_episode(
            settings, session="s", instruction="", base_model="policy", environment_mode=False
        )
        self._engine_conversation = HostConversation(self._episode.tree)
        self._engine_llm = _llm(url)
        self._engine = ControllerEngine(self._engine_llm, self._episode)
        self.all: dict[str, Ask] = {
            "stock": self.stock,
            "with ids": self.with_ids,
            "recorded": self.recorded,
            "engine": self.engine,
        }

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

    def recorded(self, turn: int) -> None:
        """All that recording is: follow the prompt, record the call, keep the answer."""
        with self.own_work.running():
            self._conversation.follow(self._session.prompts[turn])
        # What the recorder does while litellm waits for the answer is its own work, too.
        tapped = patch.object(TokenInterceptor, "take", self.own_work.timed(TokenInterceptor.take))
        after = self._tree.tokens_before(self._tree.head)
        with tapped, recording(CallLog(session="s", step=turn, base_model="policy", after=after)) as log:
            self._recorded.completion(**self._arguments(turn))
        completion = log.attempts[-1].completion
        assert completion is not None and completion.tokens is not None
        with self.own_work.running():
            node = self._tree.propose(completion)
            self._conversation.acted(node)
        assert (tokens := self._tree.nodes[node].tokens) is not None and tokens.extends is (turn > 0)

    def engine(self, turn: int) -> None:
        """The agent's engine, as a turn of the controller goes through it."""
        prompt, tree = self._session.prompts[turn], self._episode.tree
        self._engine_conversation.follow(prompt)
        tree.tools = tree.tools or tuple(self._session.tools)
        self._engine.open(
            HostTurn(session="s", step=turn, path=tree.messages(), prompt=prompt, wire=prompt, tools=tree.tools)
        )
        completion = background().wait_for(self._engine.complete(tree.messages(), tools=tree.tools))[0]
        self._engine_conversation.acted(tree.propose(completion))


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
                if repeat and name == "recorded":
                    times.setdefault(OWN_WORK, []).append(ways.own_work.lap())
                # litellm goes on working in threads of its own after the answer, which the next call should not pay.
                time.sleep(0.01)
    return times


def rows(times: Times) -> list[Row]:
    """The comparisons that matter."""
    pairs = [("recorded", "with ids"), ("recorded", "stock"), ("engine", "with ids"), ("with ids", "stock")]
    return [_own_work(times), *(_row(times, way, other) for way, other in pairs)]


def _own_work(times: Times) -> Row:
    wall, cpu = (round(statistics.median(values), 2) for values in zip(*times[OWN_WORK], strict=True))
    return Row(OWN_WORK, "", wall_ms=wall, cpu_ms=cpu, added_wall_ms=wall, added_cpu_ms=cpu)


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

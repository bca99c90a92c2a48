"""OpenHands sessions in one process: observations lost, and steps a second with an instant model.

    python -m evaluation.performance.hosts.sessions [--sessions 16] [--commands 20] [--workers 0] [--json FILE]

Every session in a workspace runs real OpenHands: controller, event stream, memory, runtime. The model is a server in a
process of its own that answers at once. There, every command's answer is compared with the one answer that is right in
this session at this turn. A session of the environment, the embedded shop in another process, has none; its
steps are actions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.protocols import EpisodeRunner
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, Task, Trajectory
from openhands_rl_plugin.hosts.pool import open_runner
from openhands_rl_plugin.hosts.shared.sessions import HostOptions

_SHOP = """
import sys, time
from openhands_rl_plugin.contrib.webshop import running_webshop
with running_webshop() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Measurement:
    """One row. Times are in seconds, CPU is that of this process (without workers) in milliseconds."""

    what: str
    sessions: int
    steps: int
    lost: int
    failed: int
    wall: float
    steps_per_second: float
    cpu_ms_per_step: float


@contextmanager
def _shop() -> Iterator[str]:
    command = [sys.executable, "-c", _SHOP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


def _request(name: str, replies: list[dict[str, str]], number: int, turns: int) -> EpisodeRequest:
    task = Task(
        id=f"{name}-{number}",
        environment=name,
        instruction=script(replies),
        data={"idx": number},
        limits=Limits(max_turns=turns, max_obs_length=1024),
    )
    return EpisodeRequest(task=task, run_id="measure", group_id=f"{name}-{number}")


def _working(number: int, commands: int) -> EpisodeRequest:
    replies = [{"bash": f"echo {number}:{at}; echo {number} >> mine; sort -u mine"} for at in range(commands)]
    return _request("workspace", [*replies, {"finish": "done"}], number, commands + 1)


def _shopping(number: int, steps: int) -> EpisodeRequest:
    replies = [{"text": f"Thought: look again\nAction: search[item {at}]"} for at in range(steps)]
    return _request("webshop", replies, number, steps)


def _lost(number: int, commands: int, trajectory: Trajectory) -> int:
    """Commands without the right answer; a wrong one counts as lost."""
    answers = [message.content or "" for message in trajectory.messages() if message.role == "tool"]
    right = sum(answer.startswith(f"{number}:{at}\n{number}\n") for at, answer in enumerate(answers[:commands]))
    return commands - right


async def _measure(
    what: str,
    opened: AbstractAsyncContextManager[EpisodeRunner],
    requests: Sequence[EpisodeRequest],
    warm_up: Sequence[EpisodeRequest],
    commands: int,
) -> Measurement:
    async with opened as runner:
        # The first episode of a process imports, connects and fills caches.
        await asyncio.gather(*(runner.run(request) for request in warm_up))
        cpu, started = _cpu_seconds(), time.perf_counter()
        episodes = await asyncio.gather(*(runner.run(request) for request in requests))
        wall, cpu = time.perf_counter() - started, _cpu_seconds() - cpu
    in_workspace = requests[0].task.environment == "workspace"
    steps = sum(trajectory.usage.steps for trajectory in episodes)
    return Measurement(
        what=what,
        sessions=len(requests),
        steps=steps,
        lost=sum(_lost(at, commands, trajectory) for at, trajectory in enumerate(episodes)) if in_workspace else 0,
        failed=sum(trajectory.failure is not None for trajectory in episodes),
        wall=round(wall, 2),
        steps_per_second=round(steps / wall, 1),
        cpu_ms_per_step=round(1000 * cpu / max(steps, 1), 1),
    )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _measure_all(sessions: int, commands: int, workers: int) -> list[Measurement]:
    with instant_model() as model, _shop() as shop:
        host, port = shop.rsplit(":", 1)
        serving = ServingSettings(base_url=model, model="instant")
        settings = RLSettings(serving=serving, env_server_base=host, env_port=int(port), max_workers=sessions)
        workspace = HostOptions(environment_mode=False)
        working = [_working(number, commands) for number in range(sessions)]
        # The shop ends an episode after fifteen actions.
        actions = min(commands, 15)
        shopping = [_shopping(number, actions) for number in range(sessions)]
        rows = [
            await _measure("workspace", open_runner(settings, workspace), working, [_working(sessions, 2)], commands),
            await _measure("webshop", open_runner(settings), shopping, [_shopping(sessions, 2)], actions),
        ]
        if workers:
            pool = open_runner(settings, workers=workers)
            warm_up = [_shopping(sessions + number, 2) for number in range(workers)]
            rows.append(await _measure(f"webshop, {workers} workers", pool, shopping, warm_up, actions))
        return rows


def _table(rows: Sequence[Measurement]) -> Table:
    table = Table(title="OpenHands sessions with an instant model")
    for column in ("", "sessions", "steps", "lost", "failed", "wall s", "steps/s", "CPU ms/step"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(*(str(value) for value in asdict(row).values()))
    return table


def main() -> None:
    """Measure, print a table and one line of JSON, and write the same JSON to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--commands", type=int, default=20, help="commands of each session")
    parser.add_argument("--workers", type=int, default=0, help="also measure a pool of this many processes")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    # litellm's response types make pydantic warn on every completion.
    warnings.filterwarnings("ignore", module="pydantic")
    before = os.getloadavg()[0]
    rows = asyncio.run(_measure_all(options.sessions, options.commands, options.workers))
    Console().print(_table(rows))
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_before": round(before, 2)}
    report = json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]})
    print(report)
    if options.json is not None:
        options.json.write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

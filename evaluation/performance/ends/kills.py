"""Ends `openhands-rl loop` and `evaluate` at random moments with SIGTERM, SIGINT and SIGKILL, and restarts them.

    python -m evaluation.performance.ends.kills --kills 100            # bare: forks of a process that has imported all
    python -m evaluation.performance.ends.kills --kills 20 --whole     # as they are typed, with all their processes

Both run OpenHands' controllers: `loop` in the shop with a tiny random model, `evaluate` in sandboxes over a git
repository with a scripted model. Ten seconds after a signal, no process of the command may be left. At the end no
episode, row or stage may be missing or duplicated.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from evaluation.performance.ends.family import adopt_orphans, descendants, end, reap
from evaluation.performance.ends.jobs import Evaluating, Looping
from evaluation.performance.ends.processes import IMPORTED, Fork, Process
from evaluation.performance.hosts.instant_model import instant_model
from openhands_rl_plugin.apps.serving import running_command
from openhands_rl_plugin.cli.terminal import silence_libraries
from openhands_rl_plugin.models.generator.threads import prepare_threads

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}
_PATIENCE = 10.0
"""Seconds that processes may outlive their command."""
_STARTING, _WORKING = 8.0, 3.0
"""Seconds: the moments of a signal, after the start and after some progress."""

_MAKE_MODEL = (
    "import sys; from pathlib import Path; from evaluation.performance.serving.random_weights import tiny_model; "
    "tiny_model(Path(sys.argv[1]))"
)


@dataclass
class Tally:
    """Kills and problems. ``seconds``: from each signal to the end of the last process."""

    kills: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The report."""
        yield f"{self.kills.total()} kills: " + ", ".join(f"{count} {name}" for name, count in self.kills.items())
        for name, seconds in self.seconds.items():
            ordered = sorted(seconds)
            middle = ordered[len(ordered) // 2]
            yield f"  {name}: the last process gone after {middle:.1f} s (median), {ordered[-1]:.1f} s (longest)"
        yield f"wrong: {len(self.wrong)}"
        yield from (f"  {line}" for line in self.wrong)


def main() -> int:
    """Print the tally; exit code 1 when anything was left, lost or done twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="signals in all")
    parser.add_argument("--only", choices=["loop", "evaluate"], help="one of the two commands")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and the signals")
    parser.add_argument("--size", type=int, default=12, help="iterations, and a fifth of the instances, of a run")
    parser.add_argument("--whole", action="store_true", help="start the commands as they are typed")
    parser.add_argument("--minutes", type=float, default=600.0, help="no more signals to a command after so long")
    args = parser.parse_args()
    silence_libraries()
    prepare_threads()
    chosen = [args.only] if args.only else ["evaluate", "loop"]
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary, instant_model(0.05) as url:
        folder = Path(temporary)
        for number, name in enumerate(chosen):
            share = args.kills // len(chosen) + (number < args.kills % len(chosen))
            with jobs(name, folder, url, args.size, whole=args.whole) as make:
                until = time.monotonic() + 60 * args.minutes
                torment(make, share, args.seed, folder / name, tally, Process if args.whole else Fork, until)
    print("\n".join(tally.lines()), flush=True)
    return int(bool(tally.wrong))


Job = Looping | Evaluating


@contextmanager
def jobs(name: str, folder: Path, url: str, size: int, *, whole: bool) -> Iterator[Callable[[Path], Job]]:
    """Yield a factory of runs of one command. For bare runs it imports all libraries and starts the servers first."""
    if not whole:
        for each in IMPORTED:
            import_module(each)
    if name == "evaluate":
        yield lambda at: Evaluating(at, url, size, whole=whole)
        return
    model = folder / "tiny"
    command = [sys.executable, "-c", _MAKE_MODEL, str(model)]  # torch's threads must not be up where runs are forked
    subprocess.run(command, check=True, capture_output=True)
    if whole:
        yield lambda at: Looping(at, model, size, None)
        return
    serve = ["serve", "--model", str(model), "--dtype", "float32", "--max-adapters=64", "--threads=1", "--adapters=/"]
    with (
        running_command(["env", "webshop"], folder / "shop.log") as shop,
        running_command([*serve, "--served-model-name", "tiny"], folder / "serve.log") as server,
    ):
        yield lambda at: Looping(at, model, size, (shop, server))


def torment(
    make: Callable[[Path], Job],
    kills: int,
    seed: int,
    folder: Path,
    tally: Tally,
    kind: type[Process | Fork],
    until: float = math.inf,
) -> None:
    """Kill a command ``kills`` times, in as many runs as that takes; each run is restarted until it finishes.

    ``until``: a time of the monotonic clock, after which it sends no more signals.
    """
    adopt_orphans()
    chance = random.Random(f"{seed}/{folder.name}")
    done = runs = 0
    while done < kills and time.monotonic() < until:
        job = make(folder / f"run-{runs}")
        runs += 1
        while done < kills and time.monotonic() < until:
            number = SIGNALS[done % len(SIGNALS)]
            with started(kind, job) as process:
                ended = not await_moment(process, job, chance)
                if ended:
                    break
                strike(process, job, number, tally)
                done += 1
                print(
                    f"{job.name} {done}/{kills}: {number.name}, {job.progress()} steps, {len(tally.wrong)} wrong",
                    flush=True,
                )
        with started(kind, job) as process:
            code = process.wait(timeout=900)
        output = job.log.read_text(errors="replace")
        tally.wrong += [f"{job.name} ended with {code}: {output[-300:]}"] if code else []
        tally.wrong += [f"{job.name}: {line}" for line in asyncio.run(job.problems())]


@contextmanager
def started(kind: type[Process | Fork], job: Job) -> Iterator[Process | Fork]:
    """Start the command in its own session, and kill it at the end of the block."""
    process = kind(job.words, job.log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def await_moment(process: Process | Fork, job: Job, chance: random.Random) -> bool:
    """Wait for a random moment. Returns false if the command ended first."""
    steps = chance.choice((0, 0, 1, 2, 4))
    if not steps:
        time.sleep(chance.uniform(0.0, _STARTING))
        return process.poll() is None
    before = job.progress()
    while process.poll() is None and job.progress() < before + steps:
        time.sleep(0.05)
    time.sleep(chance.uniform(0.0, _WORKING))
    return process.poll() is None


def strike(process: Process | Fork, job: Job, number: signal.Signals, tally: Tally) -> None:
    """Send the signal, and wait until every process that the command started has ended."""
    begun = time.monotonic()
    log_size = job.log.stat().st_size
    process.send_signal(number)
    while (left := descendants() - job.apart) and time.monotonic() < begun + _PATIENCE:
        process.poll()
        reap(process.pid)
        time.sleep(0.05)
    seconds = time.monotonic() - begun
    name = f"{job.name} {number.name}"
    tally.kills[name] += 1
    tally.seconds.setdefault(name, []).append(seconds)
    if left:
        tally.wrong.append(f"{name}: left after {_PATIENCE:g} s: {[*map(end, left)]}")
    code = process.wait()
    output = job.log.read_bytes()[log_size:].decode(errors="replace")
    over = code == 0 and seconds < 1 and not asyncio.run(job.problems())
    caught = code != -number and not over  # Python was up, and not at the end
    if code != _CODES[number] and caught:
        tally.wrong.append(f"{name}: exit code {code}: {output[-300:]}")
    if number is not signal.SIGKILL and caught and job.advice not in output and output[-1:] != "\n":
        tally.wrong.append(f"{name}: did not say how to go on: {output[-300:]!r}")


if __name__ == "__main__":
    sys.exit(main())

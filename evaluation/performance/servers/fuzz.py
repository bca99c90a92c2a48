"""Hostile requests against ``serve``, ``gateway``, ``agent`` and ``env webshop``, beside honest clients.

    .venv/bin/python -m evaluation.performance.servers.fuzz --model MODEL --requests 10000

Counted are requests after which a server is gone, that hang for more than five seconds, whose answer or log has a
traceback, or that are answered with 500; and answers that eight honest clients lost, two at each server. The servers
are processes of the command line; the gateway and the agent use the model of ``serve``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from evaluation.performance.servers.requests import SURFACES, Fuzzer
from evaluation.performance.servers.sending import HANGS_AFTER, Outcome, send

_HONEST = {
    "serve": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 4}),
    "gateway": (
        "/v1/chat/completions",
        {"model": "", "messages": [{"role": "user", "content": "one"}], "max_tokens": 3},
    ),
    "agent": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 4}),
    "webshop": ("/reset", {"idx": 3}),
}
_TRACEBACK = "Traceback (most recent call last)"
_SENDERS = 2
_SMALL = ("--threads", "1", "--max-model-len", "64")
"""What asks for no bound generates 64 tokens at most, which is no hang."""


@dataclass
class Server:
    """A server's process, its URL, and what it wrote."""

    name: str
    process: subprocess.Popen[str]
    url: str
    log: Path


@dataclass
class Tally:
    """What was counted."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    honest: int = 0
    lost: list[str] = field(default_factory=list)
    slowest: float = 0.0


@contextmanager
def servers(model: str, folder: Path) -> Iterator[list[Server]]:
    """The four servers of the command line, until the block ends."""
    with ExitStack() as stack:

        def start(name: str, *words: str) -> Server:
            return stack.enter_context(started(name, folder, words))

        serve = start("serve", "serve", "--model", model, "--served-model-name", "tiny", *_SMALL)
        upstream = f"{serve.url}/v1"
        gateway = start("gateway", "gateway", "--upstream", upstream, "--store", str(folder / "store"))
        agent = start(
            "agent", "agent", "--base-url", upstream, "--model", "tiny", "--max-tokens", "8", "--max-turns", "2"
        )
        yield [serve, gateway, agent, start("webshop", "env", "webshop", "--products", "100")]


@contextmanager
def started(name: str, folder: Path, words: tuple[str, ...]) -> Iterator[Server]:
    """A server of the command line with these words, on a free port, until the block ends."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "openhands_rl_plugin", *words, "--port", "0"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environ)
    try:
        assert process.stdout is not None
        line = next((each for each in process.stdout if "http://127.0.0.1" in each and "recording" not in each), "")
        if not line:
            raise SystemExit(f"{name} did not start: {log.read_text()[-2000:]}")
        url = line[line.index("http://") :].split("/v1")[0].split(": ")[0].strip()
        yield Server(name, process, url, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def fuzz(found: list[Server], count: int, seed: int) -> dict[str, Tally]:
    """Send ``count`` requests, a fourth to each server, while eight honest clients work."""
    tallies = {server.name: Tally() for server in found}
    done = threading.Event()
    with ThreadPoolExecutor(len(found) * (_SENDERS + 2)) as pool:
        honest = [pool.submit(_honest, server, tallies[server.name], done) for server in found for _ in range(2)]
        share = -(-count // (len(found) * _SENDERS))
        jobs = [
            pool.submit(_hostile, server, tallies[server.name], share, seed * 1000 + number)
            for server in found
            for number in range(_SENDERS)
        ]
        for job in jobs:
            job.result()
        done.set()
        for job in honest:
            job.result()
    for server in found:
        if server.process.poll() is not None:
            tallies[server.name].bad.append(f"the process ended with {server.process.returncode}")
        if traces := server.log.read_text(errors="replace").count(_TRACEBACK):
            tallies[server.name].bad.append(f"{traces} tracebacks in the log")
    return tallies


def _hostile(server: Server, tally: Tally, count: int, seed: int) -> None:
    fuzzer = Fuzzer(SURFACES[server.name], seed)
    for _ in range(count):
        request = fuzzer.next()
        outcome = send(server.url, request)
        tally.sent += 1
        tally.outcomes[outcome.label] += 1
        tally.slowest = max(tally.slowest, outcome.seconds)
        if problem := _problem(outcome):
            tally.bad.append(f"{problem}: {request.data[:300]!r}")


def _problem(outcome: Outcome) -> str:
    if outcome.seconds > HANGS_AFTER:
        return "took more than 5 s"
    if outcome.label in ("refused", "500"):
        return outcome.label
    return "a traceback in the answer" if _TRACEBACK.encode() in outcome.answer else ""


def _honest(server: Server, tally: Tally, done: threading.Event) -> None:
    path, body = _HONEST[server.name]
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        while not done.is_set():
            try:
                answer = client.post(path, json=body)
                right = answer.status_code == 200 and isinstance(answer.json(), dict)
                problem = "" if right else f"{answer.status_code} {answer.text[:200]}"
            except (httpx.HTTPError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            tally.honest += 1
            if problem:
                tally.lost.append(problem)
            done.wait(0.02)


def main() -> None:
    """Print one line for each server, and fail when anything was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a small model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, servers(args.model, Path(folder)) as found:
        tallies = fuzz(found, args.requests, args.seed)
    for name, tally in tallies.items():
        print(json.dumps({"server": name, "sent": tally.sent, "outcomes": dict(tally.outcomes), "bad": len(tally.bad)}))
        print(json.dumps({"honest": tally.honest, "lost": len(tally.lost), "slowest_s": round(tally.slowest, 2)}))
        shown = {each.partition(":")[0]: each for each in reversed(tally.bad)}
        for each in (*shown.values(), *tally.lost[:5]):
            print(f"    {each}")
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(any(tally.bad or tally.lost for tally in tallies.values()))


if __name__ == "__main__":
    main()

"""The model server and the gateways that are measured, each a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from evaluation.performance.gateway.load import Target
from evaluation.performance.gateway.traffic import MODEL

OURS, UNFLUSHED = "openhands-rl", "openhands-rl, durable = false"
PEERS = ("agentlightning", "rllm", "rllm-sqlite", "openenv")

_FOLDER = Path(__file__).parent
_START_SECONDS = 90.0


@contextmanager
def model_server() -> Iterator[int]:
    """Yields its port."""
    with _process([sys.executable, str(_FOLDER / "traffic.py")]) as process:
        yield int(_line_with("", process))


@contextmanager
def gateway(name: str, python: str, model_port: int, folder: str) -> Iterator[tuple[int, Target]]:
    """A gateway in front of the model server, ready to be called; yields its process id and where to call it."""
    base = f"http://127.0.0.1:{model_port}/v1"
    if name in (OURS, UNFLUSHED):
        config = Path(folder) / "config.toml"
        durable = "true" if name == OURS else "false"
        config.write_text(f'[rl.storage]\npath = "{folder}"\ndurable = {durable}\n', encoding="utf-8")
        options = ["--upstream", base, "--config", str(config), "--port", "0"]
        with _process([python, "-m", "openhands_rl_plugin.cli", "gateway", *options]) as process:
            port = int(_line_with("base_url", process).split("/v1")[0].rpartition(":")[2])
            yield process.pid, Target(port, headers={"x-litellm-session-id": "{session}"})
        return
    port = _free_port()
    with _process([python, str(_FOLDER / "peer.py"), name, base, str(port), folder], silent=True) as process:
        _wait_for(port)
        yield process.pid, _target(name, port, base)


def memory(pid: int) -> float:
    """Resident memory of a process in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _target(peer: str, port: int, upstream: str) -> Target:
    """The URL, headers and registrations by which a peer learns of a session."""
    if peer == "agentlightning":
        return Target(
            port,
            "/proxy/rollout/{session}/attempt/0/mode/train/openai/v1/chat/completions",
            registrations=(
                ("/api/models", [{"model": MODEL, "endpoint": upstream}]),
                ("/api/rollouts", [{"input": {}, "rollout_id": "{session}"}]),
            ),
        )
    if peer == "openenv":
        registration = ("/sessions", {"session_id": "{session}"})
        return Target(port, headers={"authorization": "Bearer {session}"}, registrations=(registration,))
    return Target(port, "/sessions/{session}/v1/chat/completions")


@contextmanager
def _process(command: Sequence[str], *, silent: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed at the end. ``silent``: nobody reads what it prints, which would block it."""
    printed = subprocess.DEVNULL if silent else subprocess.PIPE
    with subprocess.Popen(command, stdout=printed, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line_with(words: str, process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return line.strip()
    raise SystemExit(f"{process.args} ended before it was ready")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit(f"nothing listens on port {port} after {_START_SECONDS:g} s")

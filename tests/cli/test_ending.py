"""Ctrl-C and ``kill``: a command cleans up for a bounded time, says how to go on, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from marked import left_after, mark, marked

BUSY = """
import asyncio, hashlib, sys, threading, time
from openhands_rl_plugin.cli.terminal import ENDING

def compute():
    print("up", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)  # as torch does: without the lock

def in_steps():
    print("up", flush=True)
    while True:
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass  # as a clean-up that hangs

async def in_a_thread():
    await asyncio.to_thread(compute)

def left_behind():
    threading.Thread(target=compute).start()  # the interpreter waits for it
    time.sleep(60)

ENDING.install()
ENDING.advice, ENDING.patience = "go on so", float(sys.argv[2])
try:
    {"here": in_steps, "left": left_behind, "thread": lambda: ENDING.run(in_a_thread())}[sys.argv[1]]()
except KeyboardInterrupt:
    sys.exit(ENDING.say())
"""


@contextmanager
def started(*words: str, **options) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *words], stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def busy(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    time.sleep(0.3)


@pytest.mark.parametrize("where", ["here", "left", "thread"])
def test_what_does_not_end_is_cut_short_and_prints_how_to_go_on(where: str) -> None:
    with started("-c", BUSY, where, "0.5") as process:
        busy(process)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, printed = process.communicate(timeout=30)
    assert (process.returncode, printed) == (143, "terminated; go on so\n")
    assert 0.4 < time.monotonic() - begun < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_meets_generated_code_has_the_usual_exit_code(number: signal.Signals, tmp_path: Path) -> None:
    """As a dataclass's that is imported: ``python -m`` would end by SIGINT then."""
    met = f"exec('import os, time; os.kill(os.getpid(), {int(number)}); time.sleep(9)')"
    left = "ENDING.install(); left = type('Pipe', (), {'__del__': lambda self: 1 / 0})()"
    busy = BUSY.replace('"here": in_steps', f'"exec": lambda: {met}').replace("ENDING.install()", left)
    (tmp_path / "busy.py").write_text(busy)
    with started("-m", "busy", "exec", "5", cwd=tmp_path) as process:
        _, printed = process.communicate(timeout=30)
    assert (process.returncode, printed.endswith("; go on so\n")) == (128 + number, True)


def test_a_second_signal_ends_it_at_once() -> None:
    with started("-c", BUSY, "thread", "60") as process:
        busy(process)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=30)
    assert (process.returncode, printed) == (143, "terminated; go on so\n")
    assert time.monotonic() - begun < 20


CHILD = """
import sys, time
from pathlib import Path
from openhands_rl_plugin.apps.serving import running_command
with running_command(["env", "webshop"], Path(sys.argv[1])) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def test_ctrl_c_in_the_terminal_is_for_the_parent_only(tmp_path: Path) -> None:
    """The whole foreground group hears it; the servers of a loop answer until the loop itself ends them."""
    environment = mark()
    words = ["-c", CHILD, str(tmp_path / "log")]
    with started(*words, stdin=subprocess.PIPE, env=environment, start_new_session=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        (child,) = {*marked(environment)} - {parent.pid}
        assert os.getpgid(child) != os.getpgid(parent.pid)
        assert httpx.get(f"{url}/health", trust_env=False).is_success
        parent.kill()
    assert left_after(environment, 5) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("words", [["--kills", "6", "--size", "3"], ["--kills", "6", "--size", "1", "--whole"]])
def test_nothing_is_lost_done_twice_or_left_by_signals_at_any_moment(words: list[str]) -> None:
    command = [sys.executable, "-m", "evaluation.performance.ends.kills", "--seed", "3", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and "6 kills" in done.stdout and "wrong: 0" in done.stdout, done.stdout + done.stderr

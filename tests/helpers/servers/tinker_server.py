"""SkyRL's own server of the Tinker API, on a tiny model: the real one, from ``.ci/peers tinker``."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

PYTHON = "OPENHANDS_RL_TINKER_SERVER_PYTHON"
# The server starts its engine with `uv run --extra ...`, which wants a checkout: this runs the module that is named,
# with the Python of the server's environment.
_UV = '#!/bin/sh\nwhile [ $# -gt 0 ] && [ "$1" != "-m" ]; do shift; done\n"{python}" "$@"\n'

_QUICK = "--xla_backend_optimization_level=0"


@contextmanager
def skyrl_server(model: Path, folder: Path, *, adapters: int = 4, rank: int = 8) -> Iterator[str]:
    """Its base URL; ``adapters`` includes the one that it reserves for the base model. Skips where there is none."""
    if not (python := os.environ.get(PYTHON)):
        pytest.skip(f"{PYTHON} is not set: .ci/peers tinker")
    folder.mkdir(parents=True)
    uv = folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(_UV.format(python=python))
    uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    # One sequence at a time has one shape, which is compiled once.
    options = f'{{"max_lora_adapters": {adapters}, "max_lora_rank": {rank}, "train_micro_batch_size": 1}}'
    words = [str(uv), "run", "-m", "skyrl.tinker.api", "--base-model", str(model), "--backend", "jax"]
    words += ["--backend-config", options, "--database-url", f"sqlite:///{folder / 'tinker.db'}"]
    words += ["--checkpoints-base", str(folder / "checkpoints"), "--host", "127.0.0.1", "--port", str(port)]
    environ = {**os.environ, "PATH": f"{uv.parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": _QUICK}
    url = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(words, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(url, server, folder / "server.log")
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, 15)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, 9)


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 180
    while server.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{url}/api/v1/healthz", timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-3000:]}")

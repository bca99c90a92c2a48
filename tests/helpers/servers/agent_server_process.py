"""OpenHands' agent server as a process of its own on loopback, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from launchers import free_port

PLUGIN = "openhands_rl_plugin.hosts.v1"
NO_AGENTS_OF_OTHERS = "an agent server without agents of others in its requests"


def takes_agents_of_others() -> bool:
    """Whether its requests name an agent by its kind; the release that imports modules took the stock agent only."""
    from openhands.agent_server.models import StartConversationRequest
    from openhands.sdk.agent.base import AgentBase

    return StartConversationRequest.model_fields["agent"].annotation is AgentBase


@contextmanager
def running_agent_server(folder: Path, *, modules: str = PLUGIN) -> Iterator[str]:
    """Its URL. ``modules``: ``--import-modules``; empty without them. It writes below ``folder``."""
    port = free_port()
    options = ["--import-modules", modules] if modules else []
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "OH_PERSISTENCE_DIR": str(folder / "persisted"),
        "OH_ENABLE_VSCODE": "false",
        "OH_ENABLE_VNC": "false",
        "OH_PRELOAD_TOOLS": "false",
    }
    log = folder / "agent-server.log"
    with log.open("w") as output:
        command = [str(Path(sys.executable).parent / "agent-server"), "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen([*command, *options], cwd=folder, env=environ, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise AssertionError(f"the agent server ended: {log.read_text()[-3000:]}")
        try:
            if httpx.get(f"{url}/alive", timeout=2).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"the agent server did not start: {log.read_text()[-3000:]}")

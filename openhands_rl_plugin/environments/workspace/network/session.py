"""A session's proxy on the host's side: its process, and what it refused."""

from __future__ import annotations

import fcntl
import json
import socket
import subprocess
import sys
import threading
from importlib.resources import files

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.environments.workspace.network.allowed import PORT, AllowedNetwork

_LOG = redacting_logger(__name__)
_CLOSE_PATIENCE = 2.0
# The shell before bwrap uses the first ten for itself.
_LEAST_HANDLE = 20
_HAND_OVER = """import socket
with socket.socket(fileno={handle}) as channel, socket.create_server(("127.0.0.1", {port})) as listener:
    socket.send_fds(channel, [b"!"], [listener.fileno()])
del socket, channel, listener
"""


class SessionProxy:
    """The process of a session's proxy, which ends with it. ``handle`` is for the sandbox's first process.

    Hosts that were refused are logged once. Raises ``InfrastructureError`` when the process cannot be started.
    """

    def __init__(self, allowed: AllowedNetwork) -> None:
        outside, inside = socket.socketpair()
        with outside, inside:
            command = [sys.executable, "-I", "-S", str(files(__package__).joinpath("proxy.py")), str(outside.fileno())]
            try:
                self._process = subprocess.Popen(
                    [*command, allowed.model_dump_json(exclude={"variables"})],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(outside.fileno(),),
                    env={},  # it reads what commands send, so it holds no keys
                    start_new_session=True,
                )
            except OSError as error:
                raise InfrastructureError(f"the proxy of the sandbox cannot be started: {error}") from error
            self._inside = socket.socket(fileno=fcntl.fcntl(inside, fcntl.F_DUPFD_CLOEXEC, _LEAST_HANDLE))
        self.handle = self._inside.fileno()
        self.refused: dict[str, int] = {}
        """How often each ``host:port`` was refused; complete after ``close``."""
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="sandbox-proxy", daemon=True)
        self._reader.start()

    def program(self) -> str:
        """What the sandbox's first process executes before anything else: it listens, and hands that over."""
        return _HAND_OVER.format(handle=self.handle, port=PORT)

    def handed_on(self) -> None:
        """The sandbox has been started: only it holds the handle now, or nobody."""
        self._inside.close()

    def close(self) -> None:
        """End the process, and log how often something was refused."""
        self._closed = True
        self._inside.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_CLOSE_PATIENCE)
        if self.refused:
            said = ", ".join(f"{target} ({count})" for target, count in list(self.refused.items())[:20])
            _LOG.warning("a session's network: %d refused in all: %s", sum(self.refused.values()), said)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in (each for each in lines if each.endswith(b"\n")):
                said = json.loads(line)
                if isinstance(said, dict):
                    self.refused = said
                else:
                    self.refused.setdefault(said[0], 1)
                    _LOG.warning("a session's network: %s was refused: %s", *said)
        if not self._closed:
            _LOG.warning("a session's network: its proxy ended, so nothing is reached any more")

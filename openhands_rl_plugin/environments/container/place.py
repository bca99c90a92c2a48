"""Where a container of another program is, and how one command is run in it.

Its owner listens at a socket of this machine, in a folder that no other user reads. A connection is one command, a
line ``{"command": text, "timeout": seconds or null}``, answered by ``{"return_code", "stdout", "stderr"}``, or by
``{"error"}`` where it could not be run. A command whose connection is closed is given up.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.types import Frozen

LONGEST_LINE = 64 * 1024**2
"""Bytes of a request or an answer."""
_SLACK = 30.0
"""Seconds that the owner has beyond a command's own limit, to say how it ended."""


class ContainerPlace(Frozen):
    """``folder`` is this session's own in the container; ``start`` the directory in which its commands begin."""

    socket: Path
    folder: str
    start: str


class Executed(BaseModel):
    """The result of one command, as its owner reads it."""

    model_config = ConfigDict(frozen=True)

    return_code: int
    stdout: str = ""
    stderr: str = ""


def execute(place: ContainerPlace, command: str, *, timeout: float | None) -> Executed:
    """Run ``command`` by the container's bash. Blocks; from any thread, also several at a time.

    ``timeout``: seconds, after which the owner gives the command up. Raises ``InfrastructureError``.
    """
    request = json.dumps({"command": command, "timeout": timeout}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(None if timeout is None else timeout + _SLACK)
            line.connect(str(place.socket))
            line.sendall(request)
            with line.makefile("rb") as answers:
                said = answers.readline(LONGEST_LINE)
    except OSError as error:
        raise InfrastructureError(f"the container's owner does not answer: {error}") from error
    try:
        answer = json.loads(said)
        if "error" in answer:
            raise InfrastructureError(f"the container: {answer['error']}")
        return Executed.model_validate(answer)
    except (ValueError, TypeError, ValidationError) as error:
        raise InfrastructureError("the container's owner ended before a command was answered") from error

"""What ``torchrun`` and ``accelerate launch`` are started with."""

from __future__ import annotations

import socket
from pathlib import Path

CLUSTER = Path(__file__).parents[2] / "evaluation" / "configs" / "cluster"
ACCELERATE = ["--config_file", str(CLUSTER / "accelerate-fsdp2.yaml")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""Running in the foreground of a terminal: until Ctrl-C, and without output of libraries."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import threading
import warnings
from contextlib import suppress

from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.core.redaction import REDACTED, redact_text

_LOGIN = re.compile(r"/([^\s/:@'\"]*):[^\s/@'\"]+@")
"""That of a URL, also of one that was taken for a path and has lost a slash."""


def sayable(text: str) -> str:
    """What others wrote, for a terminal or a log: errors repeat URLs with passwords, and what servers echo."""
    return visible(redact_text(_LOGIN.sub(rf"/\1:{REDACTED}@", text)))


def typed(args: argparse.Namespace) -> str:
    """The command line, without secrets."""
    return sayable(shlex.join(["openhands-rl", *args.words]))


def wait_until_stopped(ended: threading.Event | None = None) -> None:
    """Return after Ctrl-C or ``kill``, or when ``ended`` is set, so that the caller can shut its server down."""
    with suppress(KeyboardInterrupt):
        (ended or threading.Event()).wait()


def add_access_log(parser: argparse.ArgumentParser) -> None:
    """``--access-log``, the same for every server."""
    about = "print a line for each request: address, method, path, status, seconds; no bodies, no keys"
    parser.add_argument("--access-log", action="store_true", help=about)


def log_accesses_if_asked(args: argparse.Namespace) -> None:
    """What ``--access-log`` asks for."""
    if args.access_log:
        from openhands_rl_plugin.core.servers import log_accesses

        log_accesses()


def silence_libraries() -> None:
    """Keep libraries from printing over progress bars, and from using the network.

    OpenHands' LLM library downloads a price list at import; transformers queries the hub and draws bars of its own.
    """
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

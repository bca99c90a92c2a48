"""A command in the terminal: what it prints, how a signal ends it.

Ctrl-C and ``kill`` leave a command some seconds to clean up in; a second signal ends it at once. What is cut short is
safe: runs, stores and adapters survive ``kill -9``, and children end with their parent.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any

from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.core.redaction import REDACTED, redact_text

PATIENCE = 3.0
"""Seconds to clean up in, unless a command says otherwise: children have ended two seconds later."""


class Interrupted(KeyboardInterrupt):
    """A signal came. Python itself ends by SIGINT where a plain ``KeyboardInterrupt`` met an ``exec``."""


class ProcessEnd:
    """The end of one process. ``advice``: how to go on. ``patience``: seconds to clean up in after a signal.

    ``number``: the signal that came, 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self.advice = ""
        self.patience = PATIENCE
        self._said = False
        self._task: asyncio.Task[Any] | None = None

    def install(self) -> None:
        """Let both signals interrupt the main thread, for a bounded time. Call it once a process."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGINT of a job in the background
                signal.signal(number, self._signalled)

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """``asyncio.run``, whose task a signal cancels."""

        async def cancellable() -> T:
            self._task = asyncio.current_task()
            try:
                return await work
            finally:
                self._task = None

        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            raise Interrupted from None

    def say(self) -> int:
        """Print that a signal ended the command, and how to go on. Returns the exit code: 130, or 143 for SIGTERM."""
        number, self._said = self.number or signal.SIGINT, True
        word = "terminated" if number == signal.SIGTERM else "interrupted"
        # On a terminal first the cursor, which progress bars hide.
        os.write(2, f"{'\x1b[?25h' * os.isatty(2)}{word}{'; ' if self.advice else ''}{self.advice}\n".encode())
        return 128 + number

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            self._cut()
        self.number = number
        sys.unraisablehook = lambda _: None  # of what is cut short: a pipe whose event loop is closed, say
        bound = threading.Timer(self.patience, self._cut)
        bound.daemon = True
        bound.start()
        if self._task is None:
            raise Interrupted
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)  # wakes the loop, too

    def _cut(self) -> None:
        os._exit(128 + self.number if self._said else self.say())


ENDING = ProcessEnd()

_LOGIN = re.compile(r"/([^\s/:@'\"]*):[^\s/@'\"]+@")
"""The login in a URL, also in one that was normalised as a path and has lost a slash."""


def sayable(text: str) -> str:
    """Foreign text, made safe for a terminal or a log: errors repeat URLs with passwords, and servers' texts."""
    return visible(redact_text(_LOGIN.sub(rf"/\1:{REDACTED}@", text)))


def wait_until_stopped() -> None:
    """Return after Ctrl-C or ``kill``, so that the caller can shut its server down."""
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


def silence_libraries(*, offline: bool = True) -> None:
    """Keep libraries from printing over progress bars, and, where this is ``offline``, from asking the hub.

    OpenHands' LLM library downloads a price list at import; transformers draws bars of its own, and warns of its own
    code. The hub shows its bars of downloads.
    """
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "TQDM_DISABLE": "1"}
    for name, value in {**quiet, **({"HF_HUB_OFFLINE": "1"} if offline else {})}.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore", FutureWarning)

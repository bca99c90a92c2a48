"""How a command ends on Ctrl-C and ``kill``: it cleans up for a while, then it is over; a second signal is the end.

A thread hears the signals, because the main one may be busy for minutes (torch computes, a library is imported). What
it cuts short is safe: runs, stores and adapters survive ``kill -9``, and children end with their parent.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from types import FrameType

_HEARD = (signal.SIGINT, signal.SIGTERM)
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_SHOW_CURSOR = "\x1b[?25h"
"""Progress bars hide it."""

PATIENCE = 3.0
"""Seconds to clean up in, unless a command says otherwise: children have ended two seconds later."""


class ProcessEnd:
    """The end of one process. ``advice``: how to go on. ``patience``: seconds to clean up in after a signal.

    ``own_interrupt``: Ctrl-C has a meaning of its own and ends nothing. ``number``: the signal that came, 0 for none.
    ``left_with``: the exit code, where it is not ``code``.
    """

    def __init__(self) -> None:
        self.number = 0
        self.advice = ""
        self.patience = PATIENCE
        self.own_interrupt = False
        self.left_with: int | None = None
        self._said = threading.Lock()

    def begin(self, advice: str = "", patience: float = PATIENCE, *, own_interrupt: bool = False) -> None:
        """What holds for the command that begins now: the arguments are the fields."""
        self.advice, self.patience, self.own_interrupt = advice, patience, own_interrupt
        if not self.number:
            self._said = threading.Lock()  # tests have several commands in one process

    def install(self) -> None:
        """From now on SIGTERM interrupts the main thread as SIGINT does, and both are bounded. Once a process."""
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a job in the background: ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._interrupt)
        hearing, heard = socket.socketpair()
        heard.setblocking(False)
        signal.set_wakeup_fd(heard.detach(), warn_on_full_buffer=False)
        atexit.register(self._leave)  # before others do: it is the last
        threading.Thread(target=self._hear, args=(hearing,), name="signals", daemon=True).start()

    @property
    def code(self) -> int:
        """The exit code of a command that a signal ended: 130 or 143."""
        return 128 + (self.number or signal.SIGINT)

    def say(self) -> None:
        """Say once that a signal ended the command, and how to go on."""
        if self._said.acquire(blocking=False):
            sys.stderr.write(self._last_line())
            sys.stderr.flush()

    def _last_line(self) -> str:
        word = _WORDS[signal.Signals(self.number or signal.SIGINT)]
        shown = _SHOW_CURSOR if self.number and os.isatty(2) else ""
        return f"{shown}{word}{'; ' if self.advice else ''}{self.advice}\n"

    def _leave(self) -> None:
        """End with the exit code: Python ends by SIGINT where an interrupt met an ``exec``, as dataclasses have."""
        # The thread that hears of a signal may not have been given the lock yet.
        if self.number or self._said.locked():
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self.code if self.left_with is None else self.left_with)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        # asyncio's own handler, which cancels the main task, or Python's, which raises.
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    def _hear(self, hearing: socket.socket) -> None:
        # No other thread is started: where the interpreter is about to end and waits for one, that is refused.
        with suppress(TimeoutError):
            while True:
                for number in hearing.recv(64):
                    if number not in _HEARD or (number == signal.SIGINT and self.own_interrupt):
                        continue
                    if hearing.gettimeout() is not None:
                        self._end()
                    self.number = self.number or number
                    hearing.settimeout(self.patience)
        self._end()

    def _end(self) -> None:
        if self._said.acquire(blocking=False):
            os.write(2, self._last_line().encode())  # whoever hangs may hold the lock of ``sys.stderr``
        os._exit(self.code)


ENDING = ProcessEnd()

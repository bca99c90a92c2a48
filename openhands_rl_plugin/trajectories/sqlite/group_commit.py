"""Calls of many tasks, stored together: each group is one transaction and one flush of the disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from openhands_rl_plugin.core.errors import StorageError, describe


@dataclass(eq=False)
class WriteCall[Writer]:
    """One call on its way to the disk: ``pack`` and then ``store`` what it made, both in the committer's thread."""

    pack: Callable[[], Any]
    store: Callable[[Writer, Any], Any]
    outcome: asyncio.Future[Any]
    packed: Any = None
    answer: Any = None
    error: BaseException | None = None


class GroupCommitter[Writer]:
    """Packs calls and hands over all that came meanwhile as one group.

    ``around`` is entered for the packing of a group. ``commit`` stores the packed calls in one transaction and sets
    ``answer`` or ``error`` of each; it is never called twice at a time. One thread does both: with a second one, to
    pack a group while another is flushed, both waited for Python's lock longer than the flush takes.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[WriteCall[Writer]]], None],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._commit = commit
        self._around = around
        self._waiting: list[WriteCall[Writer]] = []
        self._called = False  # whether the thread has been notified of waiting calls
        self._lock = threading.Lock()  # guards the fields above
        self._settling = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    async def call[Packed, Answer](
        self, pack: Callable[[], Packed], store: Callable[[Writer, Packed], Answer]
    ) -> Answer:
        """The answer of ``store``, once it is on the disk. Raises ``StorageError``."""
        loop = asyncio.get_running_loop()
        call: WriteCall[Writer] = WriteCall(pack, store, loop.create_future())
        with self._lock:
            self._waiting.append(call)
        # A moment later, so that all who call now are stored together.
        loop.call_soon(self._wake)
        return await call.outcome

    async def close(self) -> None:
        """Store the waiting calls and end the thread. Later calls start a new one."""
        self._wake()
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.shutdown)

    def alone(self) -> AbstractContextManager[object]:
        """While it is held, nothing is committed."""
        return self._settling

    def _wake(self) -> None:
        """Have the thread store the waiting calls, unless it has been notified already."""
        with self._lock:
            if self._called or not self._waiting:
                return
            self._called = True
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectory-storage")
            thread = self._thread
        try:
            thread.submit(self._settle)
        except RuntimeError:
            # No threads are to be had once the interpreter shuts down, which is when a last episode may be saved.
            self._settle()

    def _settle(self) -> None:
        """Store the waiting calls, and wake their callers."""
        with self._settling:
            with self._lock:
                group, self._waiting, self._called = self._waiting, [], False
            try:
                with self._around():
                    for call in group:
                        _pack(call)
                self._commit(group)
            except BaseException as error:
                for call in group:
                    call.error = call.error or error
                raise
            finally:
                for loop, calls in groupby(group, lambda call: call.outcome.get_loop()):
                    # No caller waits in a closed loop.
                    with suppress(RuntimeError):
                        loop.call_soon_threadsafe(_tell, tuple(calls))


def _pack(call: WriteCall[Any]) -> None:
    try:
        call.packed = call.pack()
    except StorageError as error:
        call.error = error


def _tell(calls: Sequence[WriteCall[Any]]) -> None:
    for call in calls:
        if call.outcome.done():
            continue  # no caller waits any more, but it is stored
        if call.error is None:
            call.outcome.set_result(call.answer)
        else:
            # One of its own for every caller, because tracebacks are added to it.
            error = StorageError(str(call.error) if isinstance(call.error, StorageError) else describe(call.error))
            error.__cause__ = call.error
            call.outcome.set_exception(error)

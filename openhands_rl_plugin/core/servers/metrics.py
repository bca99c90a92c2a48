"""Counters, gauges and histograms in Prometheus' text format."""

from __future__ import annotations

import math
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STARTED = time.time()
_Labels = tuple[tuple[str, str], ...]
Samples = Iterable[tuple[Mapping[str, str], float]]


class Counter:
    """A sum that only grows, for each set of labels."""

    def __init__(self) -> None:
        self._values: dict[_Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float = 1, **labels: str) -> None:
        """Add to the sum of these labels."""
        key = tuple(labels.items())
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def lines(self, name: str) -> list[str]:
        """The samples."""
        with self._lock:
            return [_line(name, labels, value) for labels, value in self._values.items()]


class Histogram:
    """How many observations were at most so large, for each set of labels; ``bounds`` ascend."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts: dict[_Labels, list[int]] = {}
        self._sums: dict[_Labels, float] = {}
        self._lock = threading.Lock()

    def observe(self, value: float, **labels: str) -> None:
        """Count one observation."""
        key = tuple(labels.items())
        with self._lock:
            self._counts.setdefault(key, [0] * len(self._bounds))[bisect_left(self._bounds, value)] += 1
            self._sums[key] = self._sums.get(key, 0.0) + value

    def lines(self, name: str) -> list[str]:
        """The samples: cumulative buckets, sum and count."""
        found: list[str] = []
        with self._lock:
            for labels, counts in self._counts.items():
                total = 0
                for bound, count in zip(self._bounds, counts, strict=True):
                    total += count
                    found.append(_line(f"{name}_bucket", (*labels, ("le", _number(bound))), total))
                found += [_line(f"{name}_sum", labels, self._sums[labels]), _line(f"{name}_count", labels, total)]
        return found


class _Read:
    """Values that are read when they are asked for."""

    def __init__(self, read: Callable[[], Samples]) -> None:
        self._read = read

    def lines(self, name: str) -> list[str]:
        return [_line(name, tuple(labels.items()), value) for labels, value in self._read()]


class Metrics:
    """The metrics of one server, by name. Safe in any thread."""

    def __init__(self) -> None:
        self._all: dict[str, tuple[str, str, Counter | Histogram | _Read]] = {}
        self.read("process_resident_memory_bytes", "Resident memory in bytes.", lambda: [({}, _resident())])
        self.read("process_open_fds", "Open file descriptors.", lambda: [({}, _descriptors())])
        self.read("process_cpu_seconds_total", "CPU time.", lambda: [({}, time.process_time())], "counter")
        self.read("process_start_time_seconds", "Unix time of the start.", lambda: [({}, _STARTED)])

    def counter(self, name: str, about: str) -> Counter:
        """The counter of that name, made when it is new."""
        return self._known(name, about, "counter", Counter())

    def histogram(self, name: str, about: str, bounds: tuple[float, ...] = SECONDS) -> Histogram:
        """The histogram of that name, made when it is new."""
        return self._known(name, about, "histogram", Histogram(bounds))

    def read(
        self, name: str, about: str, read: Callable[[], Samples], kind: Literal["gauge", "counter"] = "gauge"
    ) -> None:
        """Values that ``read`` gives, in the thread that writes the text."""
        self._all[name] = (about, kind, _Read(read))

    def text(self) -> str:
        """All samples in the text format."""
        found: list[str] = []
        for name, (about, kind, metric) in list(self._all.items()):
            found += (f"# HELP {name} {about}", f"# TYPE {name} {kind}", *metric.lines(name))
        return "\n".join(found) + "\n"

    def _known[M: Counter | Histogram](self, name: str, about: str, kind: str, fresh: M) -> M:
        known = self._all.setdefault(name, (about, kind, fresh))[2]
        assert isinstance(known, type(fresh)), f"{name} is another kind of metric"
        return known


def _line(name: str, labels: _Labels, value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    return f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(float(value))


def _resident() -> float:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0.0


def _descriptors() -> float:
    try:
        return float(len(os.listdir("/proc/self/fd")))
    except OSError:
        return 0.0

"""What a run was made on: processor, memory, graphics processors, and the versions of what matters."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_GPUS = Path("/proc/driver/nvidia/gpus")
_NAMED = ("openhands_rl_plugin", "torch", "transformers", "peft", "openhands-ai", "openhands-sdk")


def machine() -> str:
    """One line: ``"AMD EPYC 7763, 2 cores, 8 GB, no GPU"``. Loads no torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    named = _first("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or platform.machine()
    kilobytes = _first("/proc/meminfo", r"MemTotal:\s*(\d+)")
    memory = [f"{int(kilobytes) / 2**20:.0f} GB"] if kilobytes else []
    return ", ".join([named, f"{cores} cores", *memory, _gpus() or "no GPU"])


def versions(packages: Iterable[str] = _NAMED) -> dict[str, str]:
    """Package -> version, of those that are installed, and of Python."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _gpus() -> str:
    try:
        names = [_first(each / "information", r"Model:\s*(.+)") or "GPU" for each in sorted(_GPUS.iterdir())]
    except OSError:
        return ""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _first(file: str | Path, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(file).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return " ".join(found[1].split()) if found else ""

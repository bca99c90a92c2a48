"""What a run was made on: processor, memory, graphics processors, and the versions of what matters."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import subprocess
import sys
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


_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_ASK_GPU = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")


def free_memory() -> int | None:
    """Bytes that a model could have: those of the first GPU, or where there is none, of this machine or container.

    ``None`` where neither says so. Loads no torch.
    """
    try:
        printed = subprocess.run(_ASK_GPU, capture_output=True, text=True, timeout=10, check=True).stdout
        return int(printed.split()[0]) * 1024**2
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        pass
    found = [_available(), *(_left_of(*files) for files in _LIMITS)]
    return min((each for each in found if each is not None), default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _left_of(limit: str, used: str) -> int | None:
    try:
        return max(0, int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such group, or "max"
        return None


def return_freed_memory() -> None:
    """Hand freed pages back to the system; without glibc nothing happens.

    glibc keeps what is freed below its top. After passes of different sizes that is as much as is in use, and another
    process of the machine (the server of the policy, say) may need it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def forget_unused() -> None:
    """Free objects that only refer to each other, as the layers of a model do, and return their memory."""
    gc.collect()
    return_freed_memory()

"""What a run was made on: processor, memory, graphics processors, and the versions of what matters."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_NAMED = ("openhands_rl_plugin", "torch", "transformers", "peft", "openhands-ai", "openhands-sdk")


def machine() -> str:
    """One line: ``"AMD EPYC 7763, 2 cores, 8 GB, no GPU"``. Loads no torch."""
    model = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    named, gpus = model[1] if model else platform.machine(), Counter(_of_gpus("name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    shown = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    return f"{named}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GB, {shown}"


def versions(packages: Iterable[str] = _NAMED) -> dict[str, str]:
    """Package -> version, of those that are installed, and of Python."""
    found = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def free_memory() -> int:
    """Bytes that a model could have: those of the first GPU, or where there is none, of this machine or container.

    Loads no torch.
    """
    if (gpus := _of_gpus("memory.free")) and gpus[0].isdecimal():
        return int(gpus[0]) * 1024**2
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if found := re.search(r"MemAvailable:\s*(\d+)", _read("/proc/meminfo")):
        free = int(found[1]) * 1024
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return max(0, min(free, int(limit) - int(used))) if limit.isdecimal() and used else free


def _of_gpus(field: str) -> list[str]:
    ask = ("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits")
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def return_freed_memory() -> None:
    """Hand freed pages back to the system; without glibc nothing happens.

    glibc keeps what is freed below its top. After passes of different sizes that is as much as is in use, and another
    process of the machine (the server of the policy, say) may need it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def forget_unused() -> None:
    """Free objects that only refer to each other, as the layers of a model do, and return their memory."""
    gc.collect()
    return_freed_memory()

"""Giving memory back that was freed."""

from __future__ import annotations

import ctypes
import gc
import sys


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

"""The types of options that are numbers: each is bounded where it is read."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable


def finite(text: str) -> float:
    """Any number but NaN and infinity."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r:.40}")
    return number


def whole(text: str) -> int:
    """A whole number of at most 63 bits, which stores, seeds and servers can keep."""
    try:
        number = int(text)
    except ValueError:
        number = sys.maxsize + 1
    if abs(number) > sys.maxsize:
        raise argparse.ArgumentTypeError(f"must be a whole number of at most {sys.maxsize}, got {text!r:.40}")
    return number


def at_least[Number: (int, float)](
    least: Number, read: Callable[[str], Number], most: float = math.inf
) -> Callable[[str], Number]:
    """The type of an option with a lower bound, and maybe an upper one."""

    def bounded(text: str) -> Number:
        if not least <= (number := read(text)) <= most:
            low = "must be above 0" if 0 < least < 1 else f"must be at least {least:g}"
            raise argparse.ArgumentTypeError(low if number < least else f"must be at most {most:g}")
        return number

    return bounded


positive, natural, port = at_least(1, whole), at_least(0, whole), at_least(0, whole, 65535)
not_negative, above_zero = at_least(0.0, finite), at_least(sys.float_info.min, finite)

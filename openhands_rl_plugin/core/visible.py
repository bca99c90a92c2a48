"""Text of others for a terminal: control sequences become visible, and are not obeyed."""

from __future__ import annotations

import re

# Control characters except for tab and line feed, and what turns the direction of writing.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""``text`` with everything that a terminal would act upon written out: ESC is ``\x1b``."""
    return _UNSAFE.sub(_written_out, text)


def one_line(text: str, width: int) -> str:
    """``text`` in one line of at most ``width`` characters, with ``…`` where it was cut."""
    line = " ".join(visible(text[: 4 * width]).split())
    return line if len(line) <= width and len(text) <= 4 * width else f"{line[: width - 1]}…"


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

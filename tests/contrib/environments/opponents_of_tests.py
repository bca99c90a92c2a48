"""An opponent, as a user writes one: from what its player sees to its action."""

from __future__ import annotations

import re

asked = 0


def last_free_cell(seen: str) -> str:
    """The free cell with the highest number."""
    global asked
    asked += 1
    free = re.findall(r"'\[(\d)\]'", seen.rpartition("Available Moves")[2])
    return f"[{max(free)}]"

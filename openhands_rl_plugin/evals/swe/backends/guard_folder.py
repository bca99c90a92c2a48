"""The guard's folders of a sandbox: what it gives to a test run, and where that may write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from openhands_rl_plugin.evals.swe.grading import GuardEquipment

GUARD, GUARD_OUT = "/guard", "/guard-out"
"""Their names inside; on the host they are ``guard`` and ``out`` of a folder of the run's own."""

_MOST_LEFT = 64 * 2**20


def make_guard_folders(scratch: Path, equipment: GuardEquipment) -> None:
    """Make both."""
    for name in ("guard", "out"):
        (scratch / name).mkdir(mode=0o700)
    for name, text in equipment.files.items():
        (scratch / "guard" / name).write_text(text)


def read_left(scratch: Path) -> Mapping[str, bytes]:
    """Regular files that the run left, without too large ones."""
    files = [path for path in (scratch / "out").iterdir() if path.is_file() and not path.is_symlink()]
    return {path.name: path.read_bytes() for path in files if path.stat().st_size <= _MOST_LEFT}

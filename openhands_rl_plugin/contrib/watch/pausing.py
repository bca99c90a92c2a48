"""The pause: a file in the watch's folder, which anybody may make or remove."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.core.errors import StorageError, describe
from openhands_rl_plugin.core.files import write_file

PAUSED = "paused"


def is_paused(folder: Path) -> bool:
    """Whether nothing is to begin now."""
    return (folder / PAUSED).exists()


def pause(folder: Path) -> None:
    """Let the step in progress end, and begin no other. Raises ``StorageError``."""
    write_file(folder / PAUSED, "openhands-rl watch resume removes this file\n", parents=True)


def resume(folder: Path) -> bool:
    """Go on; whether it was paused. Raises ``StorageError``."""
    try:
        (folder / PAUSED).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"{folder / PAUSED} cannot be removed: {describe(error)}") from error
    return True

"""The undo history of an editor that works on copies of a sandbox's files."""

from __future__ import annotations

from pathlib import Path

KEPT = 10
"""Versions of a file."""


class NamedInside:
    """Goes before OpenHands' ``FileHistoryManager`` (V0's and V1's are alike), whose keys are paths of the host.

    With the files' names inside the sandbox the history can be copied to another session.
    """

    copies: Path
    """The folder that holds the copies."""

    def _get_metadata_key(self, file_path: Path) -> str:
        return f"{file_path.relative_to(self.copies)}.metadata"

    def _get_history_key(self, file_path: Path, counter: int) -> str:
        return f"{file_path.relative_to(self.copies)}.{counter}"

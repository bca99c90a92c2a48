"""Chooses the model that a request is sent to."""

from __future__ import annotations

import os
from pathlib import Path

from openhands_rl_plugin.core.errors import StorageError, describe
from openhands_rl_plugin.models.adapters.store import AdapterStore, check_name

LATEST = "latest"


class AdapterRoute:
    """Maps some model names to the current version of an adapter, which a training loop updates.

    The pointer file is read again only when it has changed. Before the first version, the base model is used.
    """

    def __init__(self, root: Path, adapter: str, *, base_model: str, aliases: tuple[str, ...] = ()) -> None:
        self._store = AdapterStore(root)
        self._adapter = check_name(adapter)
        self._pointer = self._store.root / f"{adapter}.current.json"
        self._base_model = base_model
        self._names = frozenset((LATEST, adapter, *aliases))
        self._state: tuple[int, int, int] | None = None
        self._current = base_model

    def knows(self, model: str) -> bool:
        """Whether requests for ``model`` are routed."""
        return model in self._names

    def current(self) -> str:
        """The served name of the weights in use. Raises ``StorageError`` for a damaged pointer."""
        state = self._pointer_state()
        if state != self._state:
            adapter = self._store.current(self._adapter) if state is not None else None
            self._current = adapter.name if adapter is not None else self._base_model
            self._state = state
        return self._current

    def _pointer_state(self) -> tuple[int, int, int] | None:
        """What changes when the file is written or replaced; ``None`` without one."""
        try:
            found = os.stat(self._pointer)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self._pointer} cannot be read: {describe(error)}") from error
        return found.st_mtime_ns, found.st_ino, found.st_size

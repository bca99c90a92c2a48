"""What files are called: by the editor, as they are on this machine; by the agent, whose folder is ``/workspace``."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from openhands_rl_plugin.environments.workspace.sandbox import INSIDE

_FILE = "file"


class FolderNames:
    """The names in one session's ``folder``. Not ``isolated``: the agent calls files what the editor calls them."""

    def __init__(self, folder: Path, *, isolated: bool) -> None:
        self._folder = str(folder)
        self._shown = _path(INSIDE) if isolated else None
        self._heard = _path(self._folder) if isolated else None

    def shown(self, text: str) -> str:
        """The agent's text, with the editor's names."""
        return self._shown.sub(lambda _: self._folder, text) if self._shown else text

    def heard(self, text: str) -> str:
        """The editor's text, with the agent's names."""
        return self._heard.sub(INSIDE, text) if self._heard else text

    def of_uri(self, uri: str) -> str:
        """What the agent calls a file that the editor names by a URI; another URI stays as it is."""
        parts = urlsplit(uri)
        return self.heard(unquote(parts.path)) if parts.scheme == _FILE else uri


def _path(folder: str) -> re.Pattern[str]:
    """The folder as a whole path or the beginning of one, in a text."""
    return re.compile(rf"(?<![\w./-]){re.escape(folder.rstrip('/'))}(?![\w-]|\.\w)")

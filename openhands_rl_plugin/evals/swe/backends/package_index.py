"""How a set-up reaches the user's package index: settings, credentials and folders, which no test and no agent sees."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from openhands_rl_plugin.core.redaction import redact_text

_OF_HOME = (".config/uv/uv.toml", ".config/pip/pip.conf", ".pip/pip.conf", ".netrc")
_OF_SYSTEM = ("/etc/pip.conf", "/etc/uv/uv.toml")
_VARIABLES = re.compile(r"(?:PIP|UV)_\w+", re.IGNORECASE)
_UNWANTED = ("UV_PROJECT", "UV_PYTHON", "UV_CACHE_DIR", "UV_OFFLINE", "UV_NO_CACHE", "PIP_REQUIRE_VIRTUALENV")
_LOGIN = re.compile(r"://[^/\s]*@|\bpassword\s|\w*(?:PASSWORD|TOKEN|USERNAME|KEYRING)\w* ")
_FOLDER = re.compile(r"(?:file://[^\s/]*)?(/[^\s\"',\]]+)")


def files(*, logins: bool = True) -> Iterator[tuple[Path, str]]:
    """The files with settings of the index, and the paths by which root reads them in a sandbox; with ``logins``, those
    that hold one, too.
    """
    paths = [(Path.home() / name, f"/root/{name}") for name in _OF_HOME] + [(Path(name), name) for name in _OF_SYSTEM]
    for path, inside in paths:
        if path.is_file() and (logins or not _LOGIN.search(path.read_text(errors="replace"))):
            yield path, inside


def variables(*, logins: bool = True) -> dict[str, str]:
    """The variables of pip and uv that hold for a sandbox too."""
    named = {name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)}
    wanted = {name: value for name, value in named.items() if not name.startswith(_UNWANTED)}
    return {name: value for name, value in wanted.items() if logins or not _LOGIN.search(f"{name} {value}")}


def folders() -> list[Path]:
    """The folders that are an index or hold packages. The pages of an index refer to files beside it."""
    texts = [*variables().values(), *(file.read_text(errors="replace") for file, _ in files())]
    named = {Path(unquote(match[1])) for text in texts for match in _FOLDER.finditer(text)}
    found = {folder.parent if folder.name == "simple" else folder for folder in named if folder.is_dir()}
    return sorted(folder for folder in found if folder.parts[1:2] not in ((), ("etc",), ("usr",)))


def without_logins(output: bytes) -> bytes:
    """The output of a set-up without what looks like a password."""
    return redact_text(output.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

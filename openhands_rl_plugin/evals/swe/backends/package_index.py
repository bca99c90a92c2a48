"""How a set-up reaches the user's package index: settings, credentials and folders, which no test and no agent sees."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from openhands_rl_plugin.config.workspace import checked_path
from openhands_rl_plugin.core.redaction import REDACTED, redact_text

_OF_HOME = (".config/uv/uv.toml", ".config/pip/pip.conf", ".pip/pip.conf", ".netrc")
_OF_SYSTEM = ("/etc/pip.conf", "/etc/uv")
_VARIABLES = re.compile(r"(?:PIP|UV)_\w+", re.IGNORECASE)
_UNWANTED = ("UV_PROJECT", "UV_PYTHON", "UV_CACHE_DIR", "UV_OFFLINE", "UV_NO_CACHE", "PIP_REQUIRE_VIRTUALENV")
_FOLDER = re.compile(r"(?:file://[^\s/]*)?(/[^\s\"',\]]+)")
_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")
_LOGIN = re.compile(r"\bpassword\s+(\S+)")


def files(home: Path | None = None, *, logins: bool = True) -> Iterator[tuple[Path, str]]:
    """The files with settings of the index, and the paths by which root reads them in a sandbox; with ``logins``, those
    that hold one, too."""
    home = home or Path.home()
    paths = [(home / name, f"/root/{name}") for name in _OF_HOME] + [(Path(name), name) for name in _OF_SYSTEM]
    for path, inside in paths:
        if path.exists() and (logins or not any(map(_holds_login, _contents(path)))):
            yield path, inside


def variables(environ: Mapping[str, str] = os.environ, *, logins: bool = True) -> dict[str, str]:
    """The variables of pip and uv that hold for a sandbox too."""
    asked = {name: value for name, value in environ.items() if _VARIABLES.fullmatch(name)}
    wanted = {name: value for name, value in asked.items() if not name.startswith(_UNWANTED)}
    secret = re.compile("PASSWORD|TOKEN|USERNAME|KEYRING", re.IGNORECASE)
    return {name: value for name, value in wanted.items() if logins or not (secret.search(name) or _holds_login(value))}


def folders(home: Path | None = None, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The folders that are an index or hold packages, by the settings."""
    named = {unquote(match[1]) for text in _texts(home, environ) for match in _FOLDER.finditer(text)}
    found: set[Path] = set()
    for name in named:
        # The pages of an index refer to files beside it.
        folder = Path(name).parent if Path(name).name == "simple" else Path(name)
        try:
            found |= {checked_path(str(folder))} if folder.is_dir() else set()
        except ValueError:
            continue
    return sorted(folder for folder in found if folder.parts[1] not in ("etc", "usr"))


def without_logins(said: bytes, home: Path | None = None, environ: Mapping[str, str] = os.environ) -> bytes:
    """The output of a set-up without the passwords that it was given, and without what looks like one."""
    text = said.decode("utf-8", "surrogateescape")
    for each in _texts(home, environ):
        for password in (*_PASSWORD.findall(each), *_LOGIN.findall(each)):
            for form in {password, unquote(password)}:
                text = text.replace(form, REDACTED)
    return redact_text(text).encode("utf-8", "surrogateescape")


def has_login(address: str) -> bool:
    """Whether an address holds a user or a password."""
    return "@" in urlsplit(address).netloc


def _texts(home: Path | None, environ: Mapping[str, str]) -> Iterator[str]:
    yield from variables(environ).values()
    for path, _ in files(home):
        yield from _contents(path)


def _contents(path: Path) -> Iterator[str]:
    for file in sorted(path.glob("*.toml")) if path.is_dir() else [path]:
        try:
            yield file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue


def _holds_login(text: str) -> bool:
    return bool(re.search(r"://[^/\s]*@", text) or _LOGIN.search(text))

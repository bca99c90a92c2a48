"""Which hosts ``[rl.workspace] network`` names: lists by their names, single hosts, and the user's package index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from openhands_rl_plugin.core.errors import unknown_name
from openhands_rl_plugin.core.redaction import redact_text

LISTS: Mapping[str, tuple[str, ...]] = {
    "pypi": ("pypi.org", "files.pythonhosted.org"),
    "npm": ("registry.npmjs.org",),
    "crates": ("index.crates.io", "static.crates.io", "crates.io"),
    "github": (
        *("github.com", "api.github.com", "codeload.github.com", "raw.githubusercontent.com"),
        *("objects.githubusercontent.com", "release-assets.githubusercontent.com"),
    ),
}
"""What the names stand for. ``pypi`` has the index of this machine's pip and uv besides (``index_addresses``)."""

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = rf"(\*\.)?({_LABEL}\.)+(?=[^:]*[A-Za-z])(?!0[xX]){_LABEL}(:[0-9]{{1,5}})?"
_PIP = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
_UV = ("/etc/uv/uv.toml", "~/.config/uv/uv.toml")


def check_host(text: str) -> str:
    """``text`` as it was. Raises ``ValueError`` in one line unless it is the name of a list, or of a host."""
    if text in LISTS:
        return text
    if re.fullmatch(r"[\w-]*", text):
        raise ValueError(f'{unknown_name("list", text, LISTS)}; hosts have a dot: "example.com", "*.example.com"')
    if re.fullmatch(_HOST, text) is None or not 0 < int(text.partition(":")[2] or 1) < 2**16:
        raise ValueError(
            f'{text!r} is no name of a host: "example.com", "*.example.com" (those below it), '
            '"example.com:8443"; addresses of IP and of the web are none'
        )
    return text


def hosts_of(names: Iterable[str]) -> tuple[str, ...]:
    """The hosts behind ``names``, in lower case, each once."""
    return tuple(dict.fromkeys(host.lower() for name in names for host in LISTS.get(name, (name,))))


class IndexAddresses(NamedTuple):
    """The user's package indexes: ``host:port`` of each, and the variables by which pip and uv find them, without the
    logins. What has a token in its path is left out.
    """

    targets: tuple[str, ...]
    variables: dict[str, str]


def index_addresses(environ: Mapping[str, str]) -> IndexAddresses:
    """What the settings of pip and uv in ``environ`` and in its home name; nothing where they are the default ones."""
    home = environ.get("HOME") or str(Path.home())
    pip, uv = _pip_settings(environ, home), _uv_settings(environ, home)
    main, other = _addresses(pip[0]), _addresses(uv[0])
    variables = {
        "PIP_INDEX_URL": " ".join((main or other)[-1:]),
        "PIP_EXTRA_INDEX_URL": " ".join(_addresses(pip[1])),
        "UV_DEFAULT_INDEX": " ".join((other or main)[-1:]),
        "UV_INDEX": " ".join(_addresses(uv[1])),
    }
    used = dict.fromkeys(address for value in variables.values() for address in value.split())
    targets = dict.fromkeys(map(_target, used))
    plain = [_target(address) for address in used if address.startswith("http:")]
    variables["PIP_TRUSTED_HOST"] = " ".join(plain)
    return IndexAddresses(tuple(targets), {name: value for name, value in variables.items() if value})


def _pip_settings(environ: Mapping[str, str], home: str) -> tuple[list[str], list[str]]:
    """Texts with the address of the index, the last one counts, and with those of further ones."""
    import configparser

    main, extra = [], []
    for name in (*_PIP, environ.get("PIP_CONFIG_FILE", "")):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(name.replace("~", home, 1), encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError):
            continue
        for section in parser.sections():
            found = {key.replace("_", "-"): value for key, value in parser[section].items()}
            main.append(found.get("index-url", ""))
            extra.append(found.get("extra-index-url", ""))
    return [*main, environ.get("PIP_INDEX_URL", "")], [*extra, environ.get("PIP_EXTRA_INDEX_URL", "")]


def _uv_settings(environ: Mapping[str, str], home: str) -> tuple[list[str], list[str]]:
    import tomllib

    main, extra = [], []
    for name in (*_UV, environ.get("UV_CONFIG_FILE", "")):
        try:
            found = tomllib.loads(Path(name.replace("~", home, 1)).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError):
            continue
        for table in (found, found.get("pip", {})):
            main.append(str(table.get("index-url", "")))
            extra += map(str, table.get("extra-index-url", ()))
        for index in found.get("index", ()):
            (main if index.get("default") else extra).append(str(index.get("url", "")))
    main += [environ.get("UV_INDEX_URL", ""), environ.get("UV_DEFAULT_INDEX", "")]
    return main, [*extra, environ.get("UV_INDEX", ""), environ.get("UV_EXTRA_INDEX_URL", "")]


def _addresses(texts: Iterable[str]) -> list[str]:
    return [address for text in texts for word in text.split() for address in _without_login(word)]


def _without_login(word: str) -> Iterator[str]:
    """The address in ``word`` (``https://...``, or uv's ``name=https://...``) without user, password and query."""
    match = re.search(r"https?://\S+", word)
    try:
        parts = urlsplit(match[0] if match else "")
        port = parts.port
    except ValueError:
        return
    if host := parts.hostname:
        host = f"[{host}]" if ":" in host else host
        address = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"
        if redact_text(address) == address:
            yield address


def _target(address: str) -> str:
    parts = urlsplit(address)
    return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"

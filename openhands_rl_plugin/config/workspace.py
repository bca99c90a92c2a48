"""``[rl.workspace]``: where commands of OpenHands run, what they see, and which hosts they reach."""

from __future__ import annotations

import contextlib
import difflib
import os
import pwd
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from openhands_rl_plugin.config.fields import Settings
from openhands_rl_plugin.core.errors import unknown_name
from openhands_rl_plugin.core.redaction import redact_text

# Where the kernel tells of the host, and where its sockets are: a Docker socket in a sandbox is a way out of it.
_NEVER = ("/dev", "/proc", "/run", "/sys", "/var/run")


def checked_path(text: str, *, whole_home: bool = False) -> Path:
    """The absolute path that ``text`` names, ``~`` expanded and links followed.

    Raises ``ValueError`` in words for its author: for a relative path, ``/`` or a folder above a home, a folder of the
    kernel or of sockets, a whole home without ``whole_home``, and what does not exist.
    """
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError(f"{text!r} must be absolute, or begin with ~")
    path = Path(os.path.normpath(path))
    # Links of the kernel cannot be followed by everybody.
    real = path if _forbidden(path) else Path(os.path.realpath(path))
    if (inside := _forbidden(real)) is not None:
        raise ValueError(f"{text!r} lies in {inside}, which sandboxes never show: it leads to the host")
    if real == Path("/") or any(real in home.parents for home in _homes()):
        raise ValueError(f"{text!r} holds whole homes; name the folders below it that are needed")
    if real in _homes() and not whole_home:
        raise ValueError(f"{text!r} is a whole home, with keys in it; name folders in it, or add whole_home = true")
    if not real.exists():
        raise ValueError(f"{text!r} does not exist{_nearest(path)}")
    return real


def _nearest(path: Path) -> str:
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {str(path.parent / found[0])!r}?" if found else ""


def _homes() -> set[Path]:
    """The homes of this user: by ``HOME`` and by the system's list of users."""
    homes = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):  # a container may run as a user that it does not list
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    return {Path(os.path.realpath(home)) for home in homes if home and home != "/"}


def _forbidden(path: Path) -> str | None:
    return next((each for each in _NEVER if path == Path(each) or Path(each) in path.parents), None)


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


PromptName = Literal["standard", "compact"]


class WorkspaceSettings(Settings):
    """``[rl.workspace]``: the sandbox of an agent that works on files. Sizes are in MiB, and of a whole session."""

    isolation: Literal["bubblewrap", "none"] = Field(
        default="bubblewrap",
        description="none: commands run with all rights of this user, where there is no bubblewrap",
    )
    prompt: PromptName = Field(
        default="standard",
        description="compact: RLAgent's own short instructions and tools (under 700 tokens), for small models",
    )
    whole_home: bool = Field(default=False, description="allow a whole home in visible and writable, with its keys")
    visible: tuple[str, ...] = Field(
        default=(), strict=False, description="folders and files of the host that commands may read, by their own paths"
    )
    writable: tuple[str, ...] = Field(
        default=(), strict=False, description="folders and files of the host that commands may change"
    )
    network: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description='what commands may reach: lists ("pypi", "npm", "crates", "github") and hosts ("*.example.com")',
    )
    traffic: int = Field(default=8192, ge=1, description="MiB that a session may exchange with them")
    memory: int = Field(default=8192, ge=64, description="MiB of memory of all processes of a session")
    processes: int = Field(default=4096, ge=16, description="processes of a session at a time")
    temporary: int = Field(default=2048, ge=1, description="MiB of /tmp, and of /dev/shm")
    disk: int = Field(default=32_768, ge=1, description="MiB that a session may add to its workspace")

    @property
    def is_compact(self) -> bool:
        """Whether the agent gets the short instructions."""
        return self.prompt == "compact"

    @property
    def visible_paths(self) -> tuple[Path, ...]:
        """``visible`` as real paths."""
        return tuple(checked_path(text, whole_home=self.whole_home) for text in self.visible)

    @property
    def writable_paths(self) -> tuple[Path, ...]:
        """``writable`` as real paths."""
        return tuple(checked_path(text, whole_home=self.whole_home) for text in self.writable)

    @field_validator("visible", "writable")
    @classmethod
    def _check_paths(cls, texts: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for text in texts:
            checked_path(text, whole_home=info.data.get("whole_home", False))
        return texts

    @field_validator("network")
    @classmethod
    def _check_network(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if names and info.data.get("isolation") == "none":
            raise ValueError('isolation = "none" leaves commands the whole network; remove one of the two')
        return tuple(check_host(name) for name in names)

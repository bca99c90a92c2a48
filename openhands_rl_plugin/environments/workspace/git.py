"""The only place that starts git: in a sandbox, and only with the settings given here.

A repository can make git execute commands (hooks, ``core.fsmonitor``, filters, ``include.path``, ``gpg.program``, ...),
and an agent that worked in it may have added some. So git reads an empty file instead of the repository's settings, no
settings of the user or the system, and sees nothing else of this machine.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.processes import Ended, checked
from openhands_rl_plugin.environments.workspace.sandbox import find_bubblewrap, sandboxed, search_path

REPOSITORY, WORK, OTHER = "/tmp/git", "/tmp/work", "/tmp/other"
"""Paths inside the sandbox: of the git directory, the work tree, and another folder."""

_MEMORY_KIB = 8 * 1024**2
_LARGEST, _LARGEST_HISTORY = 512 * 1024**2, 32 * 1024**3
_SECONDS, _SECONDS_FETCHING = 600, 3600
_NETWORK = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "GIT_SSL_CAINFO")
_SETTINGS = {
    "safe.directory": "*",
    "core.hooksPath": "/dev/null",
    "diff.ignoreSubmodules": "dirty",
    "protocol.allow": "never",
    "protocol.http.allow": "always",
    "protocol.https.allow": "always",
    "gc.auto": "0",
}


class GitCommand(NamedTuple):
    """A command line, all its environment variables, and its time limit in seconds."""

    words: list[str]
    variables: dict[str, str]
    seconds: float


def git_script(
    wrap: Callable[[Sequence[str]], list[str]],
    script: str,
    *arguments: str,
    settings: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    seconds: float = _SECONDS,
    largest: int = _LARGEST,
) -> GitCommand:
    """The command line of a bash script that calls git, behind ``wrap``, which makes that of a sandbox.

    It is killed after ``seconds``, and writes no file with more than ``largest`` bytes. ``settings`` are git's.
    """
    bounds = f"ulimit -f {largest // 1024}; ulimit -v {_MEMORY_KIB}\n"
    words = wrap(["timeout", "--signal=KILL", str(seconds), "bash", "-ec", bounds + script, "bash", *arguments])
    clean = {
        "PATH": search_path(),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        **git_settings({**_SETTINGS, **(settings or {})}),
    }
    return GitCommand(words, {**clean, **(variables or {})}, seconds)


def git_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings of git as environment variables."""
    numbered = list(enumerate(settings.items()))
    keys = {f"GIT_CONFIG_KEY_{at}": name for at, (name, _) in numbered}
    values = {f"GIT_CONFIG_VALUE_{at}": value for at, (_, value) in numbered}
    return {"GIT_CONFIG_COUNT": str(len(settings)), **keys, **values}


def git_command(
    repository: Path | None,
    *arguments: str,
    script: str = 'exec git "$@"',
    work: Path | None = None,
    other: Path | None = None,
    writable: bool = False,
    network: bool = False,
    variables: Mapping[str, str] | None = None,
) -> GitCommand:
    """The command line of git, or of a bash ``script``, for a git directory; ``None``: without one.

    The sandbox shows the directory and the work tree ``work`` (read-only, unless the directory is ``writable``), and
    ``other``, which can be written. It has a network only to fetch over HTTP. Raises ``ConfigError`` without
    bubblewrap.
    """
    find_bubblewrap(otherwise="; git runs in it, because a repository can make git execute commands")
    bound = "--bind" if writable else "--ro-bind"
    shown: list[str] = []
    places: dict[str, str] = {}
    if repository is not None:
        shown += [bound, str(repository), REPOSITORY, "--dev-bind", "/dev/null", f"{REPOSITORY}/config"]
        places |= {"GIT_DIR": REPOSITORY, "GIT_COMMON_DIR": REPOSITORY}
    if work is not None:
        shown += ["--ro-bind", str(work), WORK]
        places["GIT_WORK_TREE"] = WORK
    if other is not None:
        shown += ["--bind", str(other), OTHER]
    if network:
        asked = {name: value for name, value in os.environ.items() if name.upper() in _NETWORK}
        places |= asked
        if certificates := asked.get("GIT_SSL_CAINFO"):
            shown += ["--ro-bind-try", certificates, certificates]

    history = writable or other is not None
    return git_script(
        partial(sandboxed, mounts=shown, network=network, folder=WORK if work is not None else "/tmp"),
        script,
        *arguments,
        variables={**places, **(variables or {})},
        seconds=_SECONDS_FETCHING if history else _SECONDS,
        largest=_LARGEST_HISTORY if history else _LARGEST,
    )


def run_git(command: GitCommand, stdin: bytes = b"") -> bytes:
    """Run a command and return its output. Raises ``OSError`` if it does not start, ``subprocess.SubprocessError``."""
    return subprocess.run(
        command.words, input=stdin, capture_output=True, env=command.variables, timeout=2 * command.seconds, check=True
    ).stdout


async def checked_git(command: GitCommand, what: str, given: bytes | None = None) -> Ended:
    """Run a command. Raises ``InfrastructureError`` if it fails."""
    return await checked(command.words, what, variables=command.variables, given=given, timeout=command.seconds)


def git_folder(path: Path) -> Path:
    """The git directory of the repository at ``path``, bare or with a work tree.

    Raises ``ConfigError`` where there is none, or it lies elsewhere (of a linked work tree, or a submodule).
    """
    inside = path / ".git"
    found = inside if inside.is_dir() else path
    if inside.is_symlink() or inside.is_file() or (found / "commondir").exists():
        raise ConfigError(
            f"{path} is a linked work tree or a submodule, whose repository lies elsewhere: give that one, and a commit"
        )
    if not all((found / name).exists() for name in ("HEAD", "config", "objects", "refs")):
        raise ConfigError(f"{path} is no git repository")
    return found


def make_git_folder(path: Path, branch: str = "main", *, bare: bool = True) -> None:
    """Make an empty git directory at ``path``."""
    for name in ("objects/info", "objects/pack", "refs/heads", "refs/tags"):
        (path / name).mkdir(parents=True, exist_ok=True)
    (path / "HEAD").write_text(f"ref: refs/heads/{branch}\n")
    (path / "config").write_text(f"[core]\n\trepositoryformatversion = 0\n\tbare = {str(bare).lower()}\n")


def clone_command(url: str, into: Path, kind: str) -> GitCommand:
    """The command line that makes the empty folder ``into`` a clone of an HTTP address; ``kind``: an option of
    ``clone``."""
    words = ("clone", "--quiet", kind, "--template=", "--", url, OTHER)
    return git_command(None, *words, other=into, network=True)

"""A git repository for an agent to work in: one commit without a parent, whose hash depends on the files alone."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.evals.tasks.sources.trees import SourceTree

_WHEN = "2000-01-01T00:00:00 +0000"


def make_repository(tree: SourceTree, directory: Path) -> str:
    """Write the files to ``directory``, which is made, and commit them; the commit's hash.

    Raises ``ConfigError`` without git, ``InfrastructureError`` when it fails.
    """
    tree.write(directory)
    _git(directory, "init", "--quiet", "--initial-branch=main")
    _git(directory, "add", "--all", "--force")
    _git(directory, "commit", "--quiet", "--no-verify", "--message=start")
    return _git(directory, "rev-parse", "HEAD").strip()


def commit_of(files: Mapping[str, str]) -> str:
    """The hash that ``make_repository`` would return."""
    with tempfile.TemporaryDirectory(prefix="openhands-rl-") as folder:
        return make_repository(SourceTree({}).changed(files), Path(folder) / "repository")


def apply_patch(tree: SourceTree, patch: str, folder: Path) -> str:
    """Write the files to ``repository`` below ``folder`` and apply a patch; why it could not be applied, else nothing.

    Raises ``InfrastructureError``.
    """
    tree.write(folder / "repository")
    (folder / "patch.diff").write_text(patch, encoding="utf-8")
    command = ["git", "apply", "--whitespace=nowarn", "../patch.diff"]
    variables = {**_plain_variables(), "GIT_CEILING_DIRECTORIES": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder / "repository", capture_output=True, errors="replace", timeout=60, env=variables
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureError(f"{shlex.join(command)}: {error}") from error
    return (done.stderr.strip().splitlines() or ["git apply failed"])[-1][:300] if done.returncode else ""


def _plain_variables() -> dict[str, str]:
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C", "HOME": os.devnull}
    return {"PATH": os.environ.get("PATH", os.defpath), **settings}


def _git(directory: Path, *words: str) -> str:
    identity = {
        f"GIT_{role}_{part}": value
        for role in ("AUTHOR", "COMMITTER")
        for part, value in (("NAME", "repair"), ("EMAIL", "repair@localhost"), ("DATE", _WHEN))
    }
    variables = {**_plain_variables(), **identity}
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.autocrlf=false", "-C", str(directory), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    except FileNotFoundError as error:
        raise ConfigError("git is not installed; tasks are git repositories") from error
    except subprocess.TimeoutExpired as error:
        raise InfrastructureError(f"git {words[0]} took more than 60 s in {directory}") from error
    if done.returncode:
        raise InfrastructureError(f"git {words[0]} failed in {directory}: {done.stderr.strip()[:200]}")
    return done.stdout

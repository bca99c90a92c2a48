"""The changes of a session's workspace since its start, as a patch: evidence for rewards.

A git repository on the host records the workspace at the start; the session cannot see it. Git runs in a sandbox like
the session's, because it reads files that the session wrote, and ignores all attributes and settings that the session
may have left there. Files that ``.gitignore`` names are excluded, as in SWE-bench's patches.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.environments.workspace.git import git_script, run_git
from openhands_rl_plugin.environments.workspace.sandbox import Sandbox

MAX_PATCH_BYTES = 1_000_000
MAX_NAMES_BYTES = 100_000
MAX_START_BYTES = 512 * 1024 * 1024
MAX_START_FILES = 50_000

_PATIENCE = 30
_KINDS = {"A": "added", "D": "deleted", "M": "modified", "T": "modified"}
_ATTRIBUTES = "* !diff !filter !text !eol !ident !working-tree-encoding\n"
_SETTINGS = {"core.quotePath": "false", "core.compression": "0", "advice.addEmbeddedRepo": "false"}
# The inodes and change times of copied files differ from those in the index.
_OF_A_COPY = {"core.checkStat": "minimal", "core.trustctime": "false"}
# An existing repository has read its files already: with its index and its objects, only changed files are read again.
# The threshold puts all files into one pack, which is several times as fast as one object file each. Copies of an index
# keep its time: by it, git finds files that were changed in the second in which the index was written.
_REMEMBER = """
env --unset=GIT_WORK_TREE git init --quiet --bare
printf '%s' "$1" > "$GIT_DIR/info/attributes"
cd "$GIT_WORK_TREE"
if [ -f .git/index ] && [ -d .git/objects ]; then
  printf '%s\n' "$GIT_WORK_TREE/.git/objects" > "$GIT_DIR/objects/info/alternates"
  cp --preserve=timestamps .git/index "$GIT_INDEX_FILE"
fi
add() { git -c core.bigFileThreshold=1 add --all; }
add 2>/dev/null || { rm -f "$GIT_INDEX_FILE"; add; }
git write-tree
"""
_NAMES = """
cd "$GIT_WORK_TREE"
git add --all
git diff --cached --no-renames --name-status -z "$1" | head --bytes="$2"
"""
_PATCH = """
cd "$GIT_WORK_TREE"
git diff --cached --no-renames --no-color --no-ext-diff --no-textconv "$1" | head --bytes="$2"
"""


class Baseline:
    """The workspace at ``root`` at the start of its session, recorded below ``private``. All methods block.

    ``within`` is the directory of the workspace that is compared, and to which paths are relative; empty: all of it.
    """

    def __init__(self, root: Path, private: Path, within: str = "") -> None:
        self._root = root / within
        self._within = within
        self._directory = private / "start.git"
        self._tree: str | None = None
        self._missing = "the session did not begin"

    def remember(self, sandbox: Sandbox) -> None:
        """Record the current workspace as the start."""
        if shutil.which("git") is None:
            self._missing = "git is not installed"
            return
        if not (self._root / ".git" / "index").is_file() and _is_large(self._root):
            self._missing = "the workspace is too large to be recorded, and no git repository"
            return
        self._directory.mkdir(mode=0o700)
        try:
            said = self._run(sandbox, self._directory / "index", _REMEMBER, _ATTRIBUTES)
        except (OSError, subprocess.SubprocessError) as error:
            self._missing = f"the start could not be recorded: {_reason(error)}"
        else:
            self._tree = said.decode("ascii", "replace").split()[-1]

    def changes(self, sandbox: Sandbox, *, copied: bool = False) -> JsonObject:
        """``git_patch`` of text files (``None``, with the reason in ``git_patch_missing``, when there is none) and
        ``changed_files`` with their status. Both are bounded, and marked when they were truncated.

        ``copied``: ``sandbox`` holds a copy of the workspace, whose files need not be read again if they look the same.
        """
        if self._tree is None:
            return {"git_patch": None, "git_patch_missing": self._missing}
        index = self._directory / f"index-{os.urandom(8).hex()}"
        try:
            shutil.copy2(self._directory / "index", index)
            names = self._run(sandbox, index, _NAMES, self._tree, str(MAX_NAMES_BYTES + 1), copied=copied)
            patch = self._run(sandbox, index, _PATCH, self._tree, str(MAX_PATCH_BYTES + 1), copied=copied)
        except (OSError, subprocess.SubprocessError) as error:
            return {"git_patch": None, "git_patch_missing": f"the end could not be compared: {_reason(error)}"}
        finally:
            index.unlink(missing_ok=True)
        return {**_patch(patch), **_changed_files(names)}

    def _run(self, sandbox: Sandbox, index: Path, script: str, *arguments: str, copied: bool = False) -> bytes:
        # Git writes and holds no more than this, whatever the session left for it to read.
        command = git_script(
            lambda words: sandbox.wrap(words, [self._directory]),
            script,
            *arguments,
            settings={**_SETTINGS, **(_OF_A_COPY if copied else {})},
            variables={
                "GIT_DIR": str(self._directory),
                "GIT_WORK_TREE": os.path.join(sandbox.workspace, self._within) if self._within else sandbox.workspace,
                "GIT_INDEX_FILE": str(index),
            },
            seconds=_PATIENCE,
            largest=2 * MAX_START_BYTES,
        )
        return run_git(command)


def _is_large(root: Path) -> bool:
    files = size = 0
    for directory, _, names in os.walk(root):
        files += len(names)
        size += sum(os.lstat(os.path.join(directory, name)).st_size for name in names)
        if files > MAX_START_FILES or size > MAX_START_BYTES:
            return True
    return False


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    said = error.stderr.decode("utf-8", "replace") if isinstance(error, subprocess.CalledProcessError) else ""
    return next((line for line in reversed(said.splitlines()) if line.strip()), describe(error))[:300]


def _patch(said: bytes) -> JsonObject:
    cut = len(said) > MAX_PATCH_BYTES
    text = said[:MAX_PATCH_BYTES].decode("utf-8", "ignore" if cut else "replace")
    # Lines of content begin with a space, + or -, so these two patterns match git's own lines only.
    files = re.split(r"(?m)^(?=diff --git )", text)
    patch = "".join(file for file in files if not re.search(r"(?m)^Binary files ", file))
    return {"git_patch": patch, **({"git_patch_cut": True} if cut else {})}


def _changed_files(said: bytes) -> JsonObject:
    cut = len(said) > MAX_NAMES_BYTES
    parts = said.decode("utf-8", "replace").split("\0")[: -2 if cut else -1]
    files: JsonObject = {path: _KINDS.get(kind, kind) for kind, path in zip(parts[::2], parts[1::2], strict=False)}
    return {"changed_files": files, **({"changed_files_cut": True} if cut else {})}

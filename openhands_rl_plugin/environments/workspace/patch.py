"""The changes of a session's workspace since its start, as a patch: evidence for rewards.

A git repository on the host records the workspace at the start; the session cannot see it. ``recorder.py`` runs git in
a sandbox like the session's, because it reads files that the session wrote, and ignores all attributes, settings,
indexes and repositories that the session may have left there. Files that ``.gitignore`` names are excluded, as in
SWE-bench's patches. What cannot be compared in a sandbox that works is the session's doing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError, describe
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.environments.workspace.git import git_script
from openhands_rl_plugin.environments.workspace.sandbox import Sandbox, program_for

MAX_PATCH_BYTES = 1_000_000
MAX_NAMES_BYTES = 100_000
MAX_START_BYTES = 512 * 1024 * 1024
MAX_FILES = 1_000_000

_PATIENCE = 60
_FULL = "No space left on device"
_KINDS = {"A": "added", "D": "deleted", "M": "modified", "T": "modified"}
# Names that other systems do not take are no reason to take no patch.
_SETTINGS = {name: "false" for name in ("core.quotePath", "core.protectNTFS", "core.protectHFS")}
_SETTINGS |= {"core.compression": "0"}
# The inodes and change times of copied files differ from those in the index.
_OF_A_COPY = {"core.checkStat": "minimal", "core.trustctime": "false"}


class Baseline:
    """The workspace at the start of its session, recorded below ``private``. All methods block.

    ``within`` is the directory of the workspace that is compared, and to which paths are relative; empty: all of it.
    ``protected``: patterns of files for ``restore``, which are recorded also where git would ignore them.
    """

    def __init__(self, private: Path, within: str = "", protected: Sequence[str] = ()) -> None:
        self._within = within
        self._directory = private / "start.git"
        self._protected = protected
        self._tree: str | None = None
        self._missing = "the session did not begin"

    def remember(self, sandbox: Sandbox) -> None:
        """Record the current workspace as the start."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        try:
            self._tree = self._run(sandbox, "remember", self._protected)["tree"]
        except (BadEnvironmentError, InfrastructureError) as error:
            self._missing = f"the start could not be recorded: {error}"

    def changes(self, sandbox: Sandbox, *, copied: bool = False) -> JsonObject:
        """``git_patch`` of text files and ``changed_files`` with their status, both bounded and marked when they were
        cut. Without a patch ``git_patch`` is ``None``: ``git_patch_refused`` says how the session prevented it, or
        ``git_patch_missing`` what else did.

        ``copied``: ``sandbox`` holds a copy of the workspace, whose files need not be read again if they look the same.
        """
        if self._tree is None:
            return {"git_patch": None, "git_patch_missing": self._missing}
        try:
            found = self._run(sandbox, "changes", copied=copied)
        except (BadEnvironmentError, InfrastructureError) as error:
            who = "refused" if isinstance(error, BadEnvironmentError) else "missing"
            return {"git_patch": None, f"git_patch_{who}": f"the end could not be compared: {error}"}
        names, patch = (str(found[name]).encode("latin-1") for name in ("names", "patch"))
        files = _changed_files(names)
        files["changed_files"] |= dict.fromkeys(found["large"], "too large")
        return {**_patch(patch), **files}

    def restore(self, sandbox: Sandbox, protected: Sequence[str]) -> None:
        """Put files back in ``sandbox`` that match a pattern, and remove those that were not there at the start.

        Raises ``BadEnvironmentError`` where the session prevented that, ``InfrastructureError`` for other causes.
        """
        if self._tree is None:
            raise InfrastructureError(self._missing)
        if not self._run(sandbox, "restore", protected, copied=True)["restored"]:
            raise InfrastructureError(f"no file at the start matched {', '.join(protected)}")

    def _run(
        self, sandbox: Sandbox, what: str, protected: Sequence[str] = (), *, copied: bool = False
    ) -> dict[str, Any]:
        """Raises ``BadEnvironmentError`` when the recorder began and did not end well, and ``InfrastructureError``."""
        start = index = self._directory / "index"
        if what != "remember":
            # A copy, so that what is done once changes nothing for the next time. With its time: by it, git finds files
            # that were changed in the second in which it was written.
            index = self._directory / f"index-{os.urandom(8).hex()}"
            shutil.copy2(start, index)
        asked = {
            "do": what,
            "root": os.path.join(sandbox.workspace, self._within) if self._within else sandbox.workspace,
            "protected": [*protected],
            "tree": self._tree,
            **{"files": MAX_FILES, "bytes": MAX_START_BYTES, "names": MAX_NAMES_BYTES, "patch": MAX_PATCH_BYTES},
        }
        python, program = program_for("recorder", asked)
        # Git writes and holds no more than this, whatever the session left for it to read.
        bounds: dict[str, Any] = {"seconds": _PATIENCE, "largest": 2 * MAX_START_BYTES}
        settings = {**_SETTINGS, **(_OF_A_COPY if copied else {})}
        places = {"GIT_DIR": str(self._directory), "GIT_INDEX_FILE": str(index)}
        within = partial(sandbox.wrap, shared=[self._directory])
        command = git_script(within, 'exec "$@"', *python, settings=settings, variables=places, **bounds)
        options: dict[str, Any] = {"input": program, "env": command.variables, "timeout": 2 * _PATIENCE}
        try:
            done = subprocess.run(command.words, check=False, capture_output=True, **options)
        except (OSError, subprocess.SubprocessError) as error:
            raise InfrastructureError(describe(error)) from error
        if index != start:
            index.unlink(missing_ok=True)
        began, _, answer = done.stdout.partition(b"\n")
        if not done.returncode:
            return json.loads(answer)
        late = f"it took more than {_PATIENCE} s" if done.returncode == 128 + signal.SIGKILL else ""
        errors = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        # The words alone may be names of the session's files.
        full = any(_FULL in line for line in errors) and shutil.disk_usage(self._directory).free < MAX_START_BYTES
        kind = BadEnvironmentError if began and not full else InfrastructureError
        raise kind(late or (errors[-1][:300] if errors else f"exit status {done.returncode}"))


def _patch(printed: bytes) -> JsonObject:
    cut = len(printed) > MAX_PATCH_BYTES
    text = printed[:MAX_PATCH_BYTES].decode("utf-8", "ignore" if cut else "replace")
    # Lines of content begin with a space, + or -, so these two patterns match git's own lines only.
    files = re.split(r"(?m)^(?=diff --git )", text)
    patch = "".join(file for file in files if not re.search(r"(?m)^Binary files ", file))
    return {"git_patch": patch, **({"git_patch_cut": True} if cut else {})}


def _changed_files(printed: bytes) -> dict[str, Any]:
    cut = len(printed) > MAX_NAMES_BYTES
    parts = printed.decode("utf-8", "replace").split("\0")[: -2 if cut else -1]
    files: JsonObject = {path: _KINDS.get(kind, kind) for kind, path in zip(parts[::2], parts[1::2], strict=False)}
    return {"changed_files": files, **({"changed_files_cut": True} if cut else {})}

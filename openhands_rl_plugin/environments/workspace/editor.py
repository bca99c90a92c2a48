"""OpenHands' ``str_replace_editor`` on a workspace.

``OHEditor`` opens paths as it is given them and lists directories through a host shell with the path unquoted, which
commands of a session could use to get out. So it is given copies in a private directory, one call at a time; the
workspace is read and written by ``Workspace`` only, and directories are listed here.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from openhands_aci.editor.editor import OHEditor
from openhands_aci.editor.exceptions import ToolError
from openhands_aci.editor.history import FileHistoryManager
from openhands_aci.editor.prompts import DIRECTORY_CONTENT_TRUNCATED_NOTICE
from openhands_aci.editor.results import CLIResult, maybe_truncate

from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.environments.workspace.edit_history import KEPT, NamedInside
from openhands_rl_plugin.environments.workspace.files import MAX_LISTED, Workspace
from openhands_rl_plugin.environments.workspace.sandbox import INSIDE


@dataclass(frozen=True)
class EditRequest:
    """The arguments of ``str_replace_editor`` as the model gave them."""

    command: str
    path: str
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: int | None = None
    view_range: list[int] | None = None


@dataclass(frozen=True)
class EditResult:
    """The text for the model, and the file before and after when there was a change."""

    text: str
    old_content: str | None = None
    new_content: str | None = None

    @property
    def contents(self) -> tuple[str, str]:
        """The file before and after, empty where there was none."""
        return self.old_content or "", self.new_content or ""


class _History(NamedInside, FileHistoryManager):
    def __init__(self, directory: Path, copies: Path) -> None:
        super().__init__(max_history_per_file=KEPT, history_dir=directory)
        self.copies = copies


class _CopyEditor(OHEditor):
    # Converting documents and recognising speech would run, and reach the network, on the host.
    SUPPORTED_BINARY_EXTENSIONS: ClassVar[list[str]] = []

    def __init__(self, history: Path, copies: Path) -> None:
        super().__init__()
        # The constructor creates a directory for the history and never removes it.
        shutil.rmtree(self._history_manager.cache.directory)
        self._history_manager = _History(history, copies)


class WorkspaceEditor:
    """One session's editor, with the undo history of its files. ``scratch`` is a private directory of the session."""

    def __init__(self, workspace: Workspace, scratch: Path) -> None:
        self._workspace = workspace
        self._scratch = scratch
        self._copies = scratch / "copies"
        self._editor = _CopyEditor(scratch / "history", self._copies)

    def copied_to(self, workspace: Workspace, scratch: Path) -> WorkspaceEditor:
        """An editor of another workspace with this one's undo history."""
        shutil.copytree(self._scratch / "history", scratch / "history")
        return WorkspaceEditor(workspace, scratch)

    def edit(self, request: EditRequest) -> EditResult:
        """Execute one command. Raises ``PermissionError`` for a path outside of the workspace and other ``OSError``
        when the file cannot be read or written; a wrong request is answered in the text."""
        request = _whole(request)
        if not request.path.startswith("/"):
            hint = f"{INSIDE}/{request.path}"
            return EditResult(
                f"ERROR:\nThe path should be an absolute path, starting with `/`. Maybe you meant {hint}?"
            )
        path = self._workspace.name_inside(request.path)
        if ".." in path.split("/"):
            # Behind a link it leads elsewhere than in the folder of the copies, and out of that one.
            raise PermissionError(f"{path}: write the path without ..")
        kind = self._workspace.kind(path)
        if kind == "directory" and request.command == "view" and not request.view_range:
            return EditResult(self._listing(path))
        copy = self._copy_of(path, kind)
        before = copy.read_bytes() if copy.is_file() else None
        result = self._call(request, copy)
        after = copy.read_bytes() if copy.is_file() else None
        if after is not None and after != before:
            self._workspace.write(path, after, make_parents=False)
        if result.error:
            return EditResult(self._show(f"ERROR:\n{result.error}"))
        return EditResult(self._show(result.output or ""), result.old_content, result.new_content)

    def _call(self, request: EditRequest, copy: Path) -> CLIResult:
        try:
            return self._editor(
                command=request.command,  # type: ignore[arg-type]  # an unknown one is answered by the editor
                path=str(copy),
                file_text=request.file_text,
                view_range=request.view_range,
                old_str=request.old_str,
                new_str=request.new_str,
                insert_line=request.insert_line,
            )
        except ToolError as error:
            return CLIResult(error=error.message)

    def _copy_of(self, path: str, kind: str | None) -> Path:
        shutil.rmtree(self._copies, ignore_errors=True)
        copy = Path(f"{self._copies}{path}")
        if self._workspace.kind(str(Path(path).parent)) == "directory":
            copy.parent.mkdir(parents=True)
        if kind == "directory":
            copy.mkdir(exist_ok=True)
        elif kind is not None:
            copy.write_bytes(self._workspace.read(path))
        return copy

    def _show(self, text: str) -> str:
        return text.replace(f"{self._copies}{INSIDE}", INSIDE)

    def _listing(self, path: str) -> str:
        shown, hidden = [f"{path}/"], 0
        for name, kind in self._workspace.entries(path):
            if name.startswith("."):
                hidden += 1
                continue
            entry = f"{path}/{name}"
            shown.append(entry + "/" * (kind == "directory"))
            # What is below a folder that nobody may read is not shown.
            with suppress(OSError):
                below = self._workspace.entries(entry) if kind == "directory" and len(shown) < MAX_LISTED else ()
                shown += [f"{entry}/{n}" + "/" * (k == "directory") for n, k in below if not n.startswith(".")]
        text = f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n"
        text += "\n".join(sorted(shown))
        if hidden:
            text += (
                f"\n\n{hidden} hidden files/directories in this directory are excluded."
                f" You can use 'ls -la {path}' to see them."
            )
        return maybe_truncate(whole_text(text), truncate_notice=DIRECTORY_CONTENT_TRUNCATED_NOTICE)


def _whole(request: EditRequest) -> EditRequest:
    """The request without halves of surrogate pairs, which neither a file nor a name can hold."""
    texts = {field.name: getattr(request, field.name) for field in fields(request)}
    return replace(request, **{name: whole_text(text) for name, text in texts.items() if isinstance(text, str)})

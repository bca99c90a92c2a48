"""The SDK's file editor on a sandboxed workspace, or on the files of a container.

The SDK's own opens any path of the host. It is given copies in a private folder, one call at a time; what it writes to
a copy is written to the workspace by ``Workspace``, which follows no link out of it, or by the container's programs.
"""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from pathlib import Path

from openhands.sdk.llm import TextContent
from openhands.tools.file_editor.definition import FileEditorAction, FileEditorObservation
from openhands.tools.file_editor.editor import FileEditor
from openhands.tools.file_editor.exceptions import ToolError
from openhands.tools.file_editor.utils.history import FileHistoryManager

from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.environments.container import ContainerFiles
from openhands_rl_plugin.environments.workspace.changes import is_rewritten
from openhands_rl_plugin.environments.workspace.edit_history import KEPT, NamedInside
from openhands_rl_plugin.environments.workspace.files import MAX_LISTED, Workspace
from openhands_rl_plugin.environments.workspace.sandbox import INSIDE
from openhands_rl_plugin.environments.workspace.session_fork import TEMPORARY
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace
from openhands_rl_plugin.hosts.v1.sandboxed.container import ContainerWorkspace


class _History(NamedInside, FileHistoryManager):
    def __init__(self, directory: Path, copies: Path) -> None:
        super().__init__(max_history_per_file=KEPT, history_dir=directory)
        self.copies = copies


class ConversationEditor:
    """One session's editor, with the undo history of its files. Calls run one at a time."""

    def __init__(self, workspace: SandboxedWorkspace | ContainerWorkspace) -> None:
        self._workspace = workspace
        self._scratch = workspace.private / "editor"
        self._copies = self._scratch / "copies"
        self._editor: FileEditor | None = None
        self._calls = threading.Lock()

    def forked(self, workspace: SandboxedWorkspace) -> ConversationEditor:
        """An editor of a fork, with this one's undo history."""
        twin = ConversationEditor(workspace)
        if self._editor is not None:
            shutil.copytree(self._scratch / "history", twin._scratch / "history")
        return twin

    def edit(self, action: FileEditorAction) -> FileEditorObservation:
        """Execute one command; what is wrong with it is said in the observation."""
        with self._calls:
            try:
                return self._edit(action)
            except OSError as error:
                said = str(error) if isinstance(error, PermissionError) else f"{action.path}: {error.strerror}"
            return FileEditorObservation.from_text(text=said, command=action.command, path=action.path, is_error=True)

    def _edit(self, action: FileEditorAction) -> FileEditorObservation:
        absolute = action.path if action.path.startswith("/") else f"{self._workspace.inside}/{action.path}"
        files, name, shown = self._place(absolute)
        copied = self._copy(files, name, shown)
        before = copied.read_bytes() if copied.is_file() else None
        result = self._call(action, str(copied) if action.path.startswith("/") else action.path)
        after = copied.read_bytes() if copied.is_file() else None
        if after is not None and after != before:
            files.write(name, after)
        return self._renamed(result)

    def _place(self, path: str) -> tuple[Workspace | ContainerFiles, str, str]:
        """The files that hold an absolute path, its name there, and the path itself without ``..`` in front."""
        if isinstance(self._workspace, ContainerWorkspace):
            if "\0" in path or whole_text(path) != path:
                raise PermissionError("a path cannot hold a null character, or half a character")
            name = f"/{path.strip('/')}"
            return self._workspace.files(), name, name
        if path == TEMPORARY or path.startswith(f"{TEMPORARY}/"):
            files = self._workspace.files(TEMPORARY)
            name = files.name_inside(f"{INSIDE}{path.removeprefix(TEMPORARY)}")
            return files, name, TEMPORARY + name.removeprefix(INSIDE)
        files = self._workspace.files(INSIDE)
        name = files.name_inside(path)
        return files, name, name

    def _copy(self, files: Workspace | ContainerFiles, name: str, shown: str) -> Path:
        """A copy of a file; of a folder, the names in it and in the folders below."""
        shutil.rmtree(self._copies, ignore_errors=True)
        if ".." in Path(shown).parts:
            raise PermissionError(f"{shown}: write the path without ..")
        copied = Path(f"{self._copies}{shown}")
        kind = files.kind(name)
        if kind is not None or files.kind(str(Path(name).parent)) == "directory":
            copied.parent.mkdir(parents=True)
        if kind == "directory":
            _skeleton(files, name, copied, levels=2)
        elif kind is not None:
            copied.write_bytes(files.read(name))
        return copied

    def _call(self, action: FileEditorAction, path: str) -> FileEditorObservation:
        if self._editor is None:
            self._editor = FileEditor(workspace_root=f"{self._copies}{self._workspace.inside}")
            # The SDK makes a folder for the history and never removes it.
            shutil.rmtree(self._editor._history_manager.cache.directory, ignore_errors=True)
            self._editor._history_manager = _History(self._scratch / "history", self._copies)
        try:
            return self._editor(
                command=action.command,
                path=path,
                file_text=action.file_text,
                view_range=action.view_range,
                old_str=action.old_str,
                new_str=action.new_str,
                insert_line=action.insert_line,
            )
        except ToolError as error:
            return FileEditorObservation.from_text(text=error.message, command=action.command, is_error=True)

    def _renamed(self, result: FileEditorObservation) -> FileEditorObservation:
        copies = str(self._copies)
        content = [
            part.model_copy(update={"text": part.text.replace(copies, "")}) if isinstance(part, TextContent) else part
            for part in result.content
        ]
        path = result.path.removeprefix(copies) if result.path else result.path
        update: dict[str, object] = {"content": content, "path": path}
        if is_rewritten(result.old_content, result.new_content):
            # The SDK would compare the lines in this process to show them.
            update |= {"old_content": None, "new_content": None}
        return result.model_copy(update=update)


def _skeleton(files: Workspace | ContainerFiles, name: str, into: Path, levels: int, room: int = MAX_LISTED) -> int:
    """Empty files and folders with the names, at most ``room``; returns how many are left of that."""
    into.mkdir()
    # What is below a folder that nobody may read is not shown.
    with suppress(OSError):
        for entry, kind in files.entries(name) if levels else ():
            if room <= 0:
                break
            room -= 1
            if kind == "directory":
                room = _skeleton(files, f"{name}/{entry}", into / entry, levels - 1, room)
            else:
                (into / entry).touch()
    return room

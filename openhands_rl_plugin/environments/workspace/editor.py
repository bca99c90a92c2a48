"""OpenHands' ``str_replace_editor`` on a workspace.

``OHEditor`` lists directories through a host shell with the path unquoted, which commands of a session could use to get
out. So directories are listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

from openhands_aci.editor.editor import OHEditor
from openhands_aci.editor.exceptions import ToolError
from openhands_aci.editor.prompts import DIRECTORY_CONTENT_TRUNCATED_NOTICE
from openhands_aci.editor.results import CLIResult, maybe_truncate

from openhands_rl_plugin.core.messages import whole_json, whole_text
from openhands_rl_plugin.environments.workspace.edited_copies import CopyEditor
from openhands_rl_plugin.environments.workspace.shell import Shell


class _Editor(OHEditor):
    # Converting documents and recognising speech would run, and reach the network, on the host.
    SUPPORTED_BINARY_EXTENSIONS: ClassVar[list[str]] = []  # pyrefly: ignore[bad-override]


class WorkspaceEditor(CopyEditor[OHEditor]):
    """One session's editor, with the undo history of its files. ``files`` and ``private`` are as of ``CopyEditor``."""

    def __init__(self, files: Callable[[], Shell], private: Path, make: Any = lambda copies: _Editor()) -> None:
        super().__init__(files, private, make)

    def edit(self, command: str, path: str, **arguments: Any) -> CLIResult:
        """Execute one command; ``output`` is the text for the model, also where the command is wrong.

        Raises ``OSError`` when the file cannot be read or written.
        """
        # Halves of surrogate pairs are in no file and no name.
        path, given = whole_text(path), cast("dict[str, Any]", whole_json(arguments))
        if not path.startswith("/"):
            return CLIResult(output="ERROR:\nThe path should be an absolute path, starting with `/`.")

        copies = str(self.copies)

        def call(editor: OHEditor, copied: Path) -> CLIResult:
            if command == "view" and not given.get("view_range") and copied.is_dir():
                return CLIResult(output=_listing(copied, str(copied).removeprefix(copies)))
            try:
                return editor(command=command, path=str(copied), **given)  # type: ignore[arg-type]
            except ToolError as error:
                return CLIResult(error=error.message)

        result = self.on_copy(path, call)
        text = f"ERROR:\n{result.error}" if result.error else result.output or ""
        result.output = text.replace(copies, "")
        return result


def _listing(folder: Path, shown: str) -> str:
    below = [each.relative_to(folder) for each in folder.rglob("*")]
    hidden = sum(len(each.parts) == 1 and each.name.startswith(".") for each in below)
    seen = [each for each in below if not any(part.startswith(".") for part in each.parts)]
    lines = sorted([f"{shown}/", *(f"{shown}/{each}" + "/" * (folder / each).is_dir() for each in seen)])
    text = f"Here's the files and directories up to 2 levels deep in {shown}, excluding hidden items:\n"
    text += "\n".join(lines)
    if hidden:
        text += (
            f"\n\n{hidden} hidden files/directories in this directory are excluded."
            f" You can use 'ls -la {shown}' to see them."
        )
    return maybe_truncate(whole_text(text), truncate_notice=DIRECTORY_CONTENT_TRUNCATED_NOTICE)

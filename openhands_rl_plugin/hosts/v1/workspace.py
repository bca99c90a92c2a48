"""The workspace of one conversation: the tools ``terminal`` and ``file_editor``, its evidence, and forks for search.

It is a folder in bubblewrap. Importing this module registers the tools: for an ``RLAgent`` they work in the sandbox,
for all others they are the stock ones. Their descriptions are the SDK's own.

Commands run without a terminal, with an empty standard input. One that reaches its time limit goes on; until it has
ended, an empty command waits for it and ``C-c`` interrupts it, as with the SDK's own. Its output comes when it ends.
"""

from __future__ import annotations

import logging
import shlex
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationState
from openhands.sdk.llm import TextContent
from openhands.sdk.tool import ToolExecutor, register_tool
from openhands.sdk.utils import maybe_truncate
from openhands.tools.file_editor.definition import FileEditorAction, FileEditorObservation, FileEditorTool
from openhands.tools.file_editor.editor import FileEditor
from openhands.tools.file_editor.exceptions import ToolError
from openhands.tools.terminal.constants import MAX_CMD_OUTPUT_SIZE, TIMEOUT_MESSAGE_TEMPLATE
from openhands.tools.terminal.definition import TerminalAction, TerminalObservation, TerminalTool
from openhands.tools.terminal.metadata import CmdOutputMetadata

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.environments.workspace.edited_copies import CopyEditor, is_long
from openhands_rl_plugin.environments.workspace.shell import CommandResult, SandboxEndedError
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import ENDED, NO_NULL, SandboxedWorkspace, earlier_output
from openhands_rl_plugin.hosts.shared.sessions import protected_by, register_runtime, runtime_of


class ConversationWorkspace:
    """What the tools ``terminal`` and ``file_editor`` of one conversation work on. All methods block."""

    def __init__(self, sandboxed: SandboxedWorkspace) -> None:
        self.sandboxed, self.closed = sandboxed, False
        self.terminal, self.editor = Terminal(self), ConversationEditor(self)
        self.conclude, self.check = sandboxed.conclude, sandboxed.check

    def fork(self) -> ConversationWorkspace:
        """As ``SandboxedWorkspace.fork``, with the editor's history."""
        if self.terminal.running is not None:
            raise BadEnvironmentError("the workspace cannot be forked while a command runs in its terminal")
        twin = ConversationWorkspace(self.sandboxed.fork())
        sandboxed = twin.sandboxed
        twin.editor.copies = self.editor.copies.forked(lambda: sandboxed.files, sandboxed.private)
        return twin

    def close(self) -> None:
        """End all processes and remove what is not the folder itself. Idempotent."""
        self.closed = True
        self.sandboxed.close()


_RESET = "Terminal session has been reset. All previous environment variables and session state have been cleared."
_NO_INPUT = (
    "was not sent: the running command has no terminal and an empty standard input. Send C-c to interrupt it, or an "
    "empty command to wait for it"
)
_NOT_EXECUTED = (
    '[Your command "{command}" is NOT executed. The previous command is still running - You CANNOT send '
    "new commands until the previous command is completed. By setting `is_input` to `true`, you can "
    f"interact with the current process: {TIMEOUT_MESSAGE_TEMPLATE}]"
)
_INTERRUPT = "C-c"
# Seconds for an interrupted command to end.
_INTERRUPTED = 5.0


class _Executor(ToolExecutor[Any, Any]):
    """Executes the calls of a tool of the SDK. It holds the workspace, which is registered by a weak reference."""

    def __init__(self, whole: ConversationWorkspace) -> None:
        self._whole, self._workspace = whole, whole.sandboxed

    def close(self) -> None:
        """End the session's sandbox."""
        self._whole.close()


class Terminal(_Executor):
    """One session's terminal: a shell, and the command that runs in it, if one does (``running``)."""

    running: tuple[str, Future[CommandResult]] | None = None

    def __call__(self, action: TerminalAction, conversation: LocalConversation | None = None) -> TerminalObservation:
        """Run a command, or attend to the one that is running, with secrets treated as by the SDK's own."""
        assert conversation is not None
        command, secrets, why = action.command.strip(), conversation.state.secret_registry, ""
        if action.reset and action.is_input:
            raise ValueError("Cannot use reset=True with is_input=True")
        if action.reset:
            self._workspace.restart()
            self.running = None
            if not command:
                return TerminalObservation.from_text(text=_RESET, command="[RESET]", exit_code=0)
            ran = self(TerminalAction(command=command, timeout=action.timeout), conversation)
            again = ran.model_copy(update={"command": f"[RESET] {command}"})
            return _with_text(again, f"{_RESET}\n\n{ran.text}")
        seconds = self._workspace.seconds if action.timeout is None else action.timeout
        if "\0" in command:
            why = NO_NULL
        elif self.running is None and (action.is_input or not command):
            why = f"No previous running command to {'interact with' if action.is_input else 'retrieve logs from'}."
        elif self.running is None:
            variables = secrets.get_secrets_as_env_vars(action.command)
            exports = [f"export {name}={shlex.quote(text)}" for name, text in variables.items() if name.isidentifier()]
            if exports:
                self._workspace.run("\n".join(exports), timeout=SandboxedWorkspace.seconds)
            self.running = command, self._started(command)
        elif action.is_input and command == _INTERRUPT:
            self._workspace.interrupt()
            seconds = _INTERRUPTED if action.timeout is None else seconds
        elif command:
            why = f"{command!r} {_NO_INPUT}." if action.is_input else _NOT_EXECUTED.replace("{command}", command)
        if why:
            return TerminalObservation.from_text(text=why, command=command, is_error=True)
        made = self._wait(command, seconds)
        return _with_text(made, secrets.mask_secrets_in_output(made.text))

    def interrupt(self) -> None:
        """Send Ctrl-C to a command that is running, until it has ended, for seconds; from any thread, at once."""
        if (running := self.running) is not None:
            threading.Thread(target=self._interrupt, args=(running[1],), name="rl-interrupt", daemon=True).start()

    def _interrupt(self, ended: Future[CommandResult]) -> None:
        # One that comes between two programs of a command ends neither.
        until = time.monotonic() + _INTERRUPTED
        while not ended.done() and time.monotonic() < until:
            with suppress(InfrastructureError):
                self._workspace.interrupt()
            wait((ended,), 1.0)

    def _started(self, command: str) -> Future[CommandResult]:
        ended: Future[CommandResult] = Future()

        def run() -> None:
            try:
                ended.set_result(self._workspace.run(command, timeout=None))
            except InfrastructureError as error:
                ended.set_exception(error)

        threading.Thread(target=run, name="rl-terminal", daemon=True).start()
        return ended

    def _wait(self, shown: str, seconds: float) -> TerminalObservation:
        assert self.running is not None
        command, ended = self.running
        try:
            result = ended.result(seconds)
        except TimeoutError:
            suffix = f"\n[The command timed out after {seconds} seconds. {TIMEOUT_MESSAGE_TEMPLATE}]"
            return _observation(shown, "", suffix=suffix)
        except BaseException as error:
            self.running = None
            if isinstance(error, SandboxEndedError):
                return _observation(shown, "", suffix=ENDED, working_dir=self._workspace.start)
            raise
        self.running = None
        code = -1 if result.exit_code is None else result.exit_code
        sent = " CTRL+C was sent." if shown == _INTERRUPT else ""
        return _observation(
            shown,
            result.output,
            exit_code=code,
            working_dir=result.cwd,
            py_interpreter_path=result.python,
            prefix=earlier_output(result) if shown == command else "[Below is the output of the previous command.]\n",
            suffix=f"\n[The command completed with exit code {code}.{sent}]",
        )


def _observation(command: str, output: str, **about: Any) -> TerminalObservation:
    text, metadata = maybe_truncate(output.rstrip(), truncate_after=MAX_CMD_OUTPUT_SIZE), CmdOutputMetadata(**about)
    return TerminalObservation.from_text(
        text=text, command=command, metadata=metadata, exit_code=metadata.exit_code, timeout=False
    )


def _with_text(made: TerminalObservation, text: str) -> TerminalObservation:
    return made.model_copy(update={"content": [TextContent(text=text)]})


_ARGUMENTS = {"command", "file_text", "view_range", "old_str", "new_str", "insert_line"}


class ConversationEditor(_Executor):
    """One session's editor. ``copies`` has the undo history of its files. Calls run one at a time."""

    def __init__(self, whole: ConversationWorkspace) -> None:
        super().__init__(whole)
        sandboxed, self._inside = whole.sandboxed, whole.sandboxed.inside
        self.copies = CopyEditor(
            lambda: sandboxed.files,
            sandboxed.private,
            lambda copies: FileEditor(workspace_root=f"{copies}{self._inside}"),
        )

    def __call__(
        self, action: FileEditorAction, conversation: LocalConversation | None = None
    ) -> FileEditorObservation:
        """Execute one command; the observation has what is wrong with it."""
        absolute, about = action.path.startswith("/"), {"command": action.command, "is_error": True}
        given = action.model_dump(include=_ARGUMENTS)

        def call(editor: FileEditor, copied: Path) -> FileEditorObservation:
            try:
                return editor(**given, path=str(copied) if absolute else action.path)
            except ToolError as error:
                return FileEditorObservation.from_text(text=error.message, **about)

        try:
            path = action.path if absolute else f"{self._inside}/{action.path}"
            return self._renamed(self.copies.on_copy(path, call))
        except OSError as error:
            reason = str(error) if isinstance(error, PermissionError) else f"{action.path}: {error.strerror}"
            return FileEditorObservation.from_text(text=reason, path=action.path, **about)

    def _renamed(self, result: FileEditorObservation) -> FileEditorObservation:
        copies = str(self.copies.copies)
        content = [
            part.model_copy(update={"text": part.text.replace(copies, "")}) if isinstance(part, TextContent) else part
            for part in result.content
        ]
        update: dict[str, object] = {"content": content, "path": result.path and result.path.removeprefix(copies)}
        if is_long(result.old_content, result.new_content):
            # The SDK would compare the lines in this process to show them.
            update |= {"old_content": None, "new_content": None}
        return result.model_copy(update=update)


TERMINAL, EDITOR = TerminalTool.name, FileEditorTool.name
_OUTPUT = 2 * 1024**2

_opening = threading.Lock()


def workspace_of(state: ConversationState) -> ConversationWorkspace | None:
    """The conversation's sandboxed workspace; ``None`` where its tools are the stock ones.

    One that was registered under the conversation's id, weakly, or else, of an ``RLAgent``, one over its folder, which
    is used as it is, or over its task's. Raises ``ConfigError``.
    """
    id, agent = str(state.id), cast(Any, state.agent)
    with _opening:
        found = runtime_of(id)
        if isinstance(found, ConversationWorkspace) and not found.closed:
            return found
        if not hasattr(agent, "made_for"):
            return None
        task = agent.made_for.workspace if agent.made_for is not None else None
        settings, folder = agent.settings(), Path(str(state.workspace.working_dir))
        if settings.workspace.isolation == "none":
            return None
        protected = protected_by(settings.reward)
        place = SandboxedWorkspace(folder, settings.workspace, task=task, protected=protected, output=_OUTPUT)
        opened = ConversationWorkspace(place)
        register_runtime(id, opened)
        return opened


class RLTerminalTool(TerminalTool):
    """Makes the tool ``terminal`` of a conversation."""

    @classmethod
    def create(cls, conv_state: ConversationState, *args: Any, **params: Any) -> Sequence[TerminalTool]:
        """The SDK's tool, with our executor in a sandboxed workspace."""
        workspace = workspace_of(conv_state)
        if workspace is None:
            return TerminalTool.create(conv_state, *args, **params)
        if (seconds := params.get("no_change_timeout_seconds")) is not None:
            workspace.sandboxed.seconds = float(seconds)
        return TerminalTool.create(conv_state, executor=workspace.terminal)


class RLFileEditorTool(FileEditorTool):
    """Makes the tool ``file_editor`` of a conversation."""

    @classmethod
    def create(cls, conv_state: ConversationState, **params: Any) -> Sequence[FileEditorTool]:
        """The SDK's tool, with our executor in a sandboxed workspace."""
        made = FileEditorTool.create(conv_state, **params)
        workspace = workspace_of(conv_state)
        if workspace is None:
            return made
        host, inside = str(conv_state.workspace.working_dir), workspace.sandboxed.start
        own = {"description": made[0].description.replace(f": {host}\n", f": {inside}\n")}
        return [made[0].model_copy(update=own).set_executor(workspace.editor)]


_registry = logging.getLogger("openhands.sdk.tool.registry")
for _kind, _stock in ((RLTerminalTool, TerminalTool), (RLFileEditorTool, FileEditorTool)):
    # Where a conversation is made by a client, the server imports the module of its tools: one that it has.
    _kind.__module__ = _stock.__module__
    _registry.disabled = True
    register_tool(_stock.name, _kind)
    _registry.disabled = False

"""The workspace runtime: an OpenHands ``Runtime`` that loses no output, for many separate sessions in one process.

Chosen by class path, ``runtime = "openhands_rl_plugin.hosts.v0.runtime.WorkspaceRuntime"``. ``workspace_base`` is used
as it is, without a copy; without one, a session has a temporary directory that is removed with it. A session has
network only with ``[rl.workspace] network = true``.

In bubblewrap a session can be forked for search: a fork has copies of the workspace, of ``/tmp``, of the shell's state
and of the editor's history, at the same paths. Processes and network connections cannot be copied, so a workspace with
running background processes is not forked. Times, process ids and the order of unsorted listings may differ in a fork.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import tempfile
import threading
import zipfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from openhands.core.config import OpenHandsConfig
from openhands.events.action import CmdRunAction, FileEditAction, FileReadAction, FileWriteAction
from openhands.events.action.mcp import MCPAction
from openhands.events.event import FileEditSource, FileReadSource
from openhands.events.observation import (
    CmdOutputObservation,
    ErrorObservation,
    FileEditObservation,
    FileReadObservation,
    FileWriteObservation,
    Observation,
)
from openhands.runtime.runtime_status import RuntimeStatus
from openhands_aci.utils.diff import get_diff

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, JsonObject
from openhands_rl_plugin.environments.workspace.changes import is_rewritten
from openhands_rl_plugin.environments.workspace.editor import WorkspaceEditor
from openhands_rl_plugin.environments.workspace.files import Workspace
from openhands_rl_plugin.environments.workspace.sandbox import INSIDE
from openhands_rl_plugin.environments.workspace.shell import CommandResult, SandboxEndedError
from openhands_rl_plugin.hosts.shared.options import RL_AGENT
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import ENDED, NO_NULL, SandboxedWorkspace, earlier_output
from openhands_rl_plugin.hosts.shared.sessions import protected_by
from openhands_rl_plugin.hosts.v0.session_state import SessionRuntime, SessionTaskList
from openhands_rl_plugin.hosts.v0.settings import host_settings
from openhands_rl_plugin.session.session import current_episode

# Seconds to start a sandbox, which takes a fraction of one: a machine under load is given time.
_START_TIMEOUT = 14.0


def _reported(what: str) -> Callable[[Any], Any]:
    """An ``OSError`` becomes an observation; OpenHands makes one of a ``PermissionError`` itself."""

    def made(execute: Any) -> Any:
        @wraps(execute)
        def reporting(runtime: WorkspaceRuntime, action: Any) -> Observation:
            try:
                return execute(runtime, action)
            except PermissionError:
                raise
            except OSError as error:
                return ErrorObservation(f"{action.path} cannot be {what}: {error.strerror}")

        return reporting

    return made


class WorkspaceRuntime(SessionRuntime):
    """Runs a session's commands and file actions: in bubblewrap, or as ``[rl.workspace] isolation`` says.

    The constructor raises ``ConfigError`` where bubblewrap does not work.
    """

    def __init__(self, config: OpenHandsConfig, *args, **kwargs) -> None:
        bound = current_episode()
        task = bound.workspace if bound else None
        settings = bound.settings if bound else host_settings(config.get_agent_config(RL_AGENT), config)
        isolated = settings.workspace.isolation != "none"
        if isolated and config.sandbox.use_host_network:
            raise ConfigError("[sandbox] use_host_network: write [rl.workspace] network = true in its place")
        # Before OpenHands' constructor, which leaves threads and an exit handler behind if a later line fails.
        self.workspace = SandboxedWorkspace(
            Path(config.workspace_base) if config.workspace_base else None,
            settings.workspace,
            task=task,
            protected=protected_by(settings.reward),
            isolated=isolated,
            began=False,
        )
        super().__init__(config, *args, **kwargs)
        who = (("NAME", config.git_user_name), ("EMAIL", config.git_user_email))
        git = {f"GIT_{by}_{what}": value for by in ("AUTHOR", "COMMITTER") for what, value in who}
        given = {**self.initial_env_vars, **config.sandbox.runtime_startup_env_vars}
        self.workspace.variables |= {**git, **given, **self.workspace.variables}
        self.editor = WorkspaceEditor(self.workspace.place, self.workspace.private)

    async def connect(self) -> None:
        """Start the sandbox. Raises ``InfrastructureError`` when it does not start."""
        self.set_runtime_status(RuntimeStatus.STARTING_RUNTIME)
        await asyncio.gather(
            asyncio.to_thread(self.workspace.run, ":", timeout=_START_TIMEOUT),
            asyncio.to_thread(self.workspace.begin),
        )
        self._runtime_initialized = True
        self.set_runtime_status(RuntimeStatus.RUNTIME_STARTED)

    def close(self) -> None:
        """End the sandbox and all processes in it, and remove this runtime's own files."""
        atexit.unregister(self.close)
        self._runtime_initialized = False
        self.workspace.close()
        super().close()

    def conclude(self) -> tuple[JsonObject | None, Failure | None]:
        """As ``SandboxedWorkspace.conclude``."""
        return self.workspace.conclude()

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """As ``SandboxedWorkspace.check``."""
        return self.workspace.check(asked)

    @property
    def files(self) -> Workspace:
        """Access to the files below ``/workspace``."""
        return self.workspace.files

    @property
    def forkable(self) -> bool:
        """Whether ``fork`` is possible: without isolation, forks would see each other's files and the original's."""
        return self.workspace.forks

    def fork(self, stop: threading.Event) -> WorkspaceRuntime:
        """A runtime over ``SandboxedWorkspace.fork``, without a subscription to its event stream."""
        fork = copy.copy(self)
        fork.status_callback = None
        fork.event_stream = SessionTaskList.of(self.event_stream, self.sid)
        fork.workspace = self.workspace.fork(stop)
        fork.editor = self.editor.forked(fork.workspace.place, fork.workspace.private)
        return fork

    @property
    def workspace_root(self) -> Path:
        """The workspace's path inside the sandbox."""
        return Path(INSIDE)

    def run(self, action: CmdRunAction) -> Observation:
        """Run a command for at most the action's time limit; its background processes keep running."""
        if action.is_input:
            return ErrorObservation(
                f"No command is waiting for input, so {action.command!r} was not sent: commands run without a terminal,"
                " with an empty standard input, and are ended at their time limit."
            )
        if "\0" in action.command:
            return ErrorObservation(NO_NULL)
        timeout = self.config.sandbox.timeout if action.timeout is None else action.timeout
        aside = action.cwd is not None or action.is_static
        try:
            result = self.workspace.run(action.command, timeout=timeout, cwd=action.cwd, keep=not aside)
        except SandboxEndedError:
            return _observation(action, CommandResult(output="", exit_code=None, cwd=INSIDE), ENDED)
        suffix = f"[The command timed out after {timeout:.1f} seconds and was ended.]" if result.timed_out else ""
        return _observation(action, result, suffix)

    @_reported("read")
    def read(self, action: FileReadAction) -> Observation:
        """Read a text file; for the editor's tool, view it with line numbers."""
        if action.impl_source == FileReadSource.OH_ACI:
            text = self.editor.edit("view", action.path, view_range=action.view_range).output or ""
            return FileReadObservation(content=text, path=action.path, impl_source=FileReadSource.OH_ACI)
        data = self.files.read(action.path)
        if b"\0" in data:
            return ErrorObservation("ERROR_BINARY_FILE")
        lines = data.decode("utf-8", "replace").splitlines(keepends=True)
        end = None if action.end == -1 else action.end
        return FileReadObservation(content="".join(lines[action.start : end]), path=action.path)

    @_reported("written")
    def write(self, action: FileWriteAction) -> Observation:
        """Replace the whole file; create it and its parent directories when needed."""
        self.files.write(action.path, whole_text(action.content).encode())
        return FileWriteObservation(content="", path=action.path)

    @_reported("edited")
    def edit(self, action: FileEditAction) -> Observation:
        """Execute a command of ``str_replace_editor``."""
        if action.impl_source != FileEditSource.OH_ACI:
            return ErrorObservation("This runtime edits files by str_replace_editor only; disable enable_llm_editor.")
        given = {name: getattr(action, name) for name in ("file_text", "old_str", "new_str", "insert_line")}
        result = self.editor.edit(action.command, action.path, **given)
        before, after = result.old_content or "", result.new_content or ""
        return FileEditObservation(
            content=result.output or "",
            path=action.path,
            old_content=action.old_str,
            new_content=action.new_str,
            impl_source=FileEditSource.OH_ACI,
            diff="" if is_rewritten(before, after) else get_diff(before, after, action.path),
        )

    async def call_tool_mcp(self, action: MCPAction) -> Observation:
        """Not supported."""
        return self.unsupported(f"MCP servers, so the tool {action.name!r} cannot be called")

    def copy_to(self, host_src: str, sandbox_dest: str, recursive: bool = False) -> None:
        """Copy a file, or with ``recursive`` a directory, into the directory ``sandbox_dest`` (or to that file name
        when the destination does not end with ``/`` and is no directory)."""
        source = Path(host_src)
        if source.is_dir():
            if not recursive:
                raise IsADirectoryError(f"{host_src} is a directory: copy it with recursive=True")
            for path in sorted(source.rglob("*")):
                target = f"{sandbox_dest}/{source.name}/{path.relative_to(source)}"
                if path.is_dir() and not path.is_symlink():
                    self.files.make_directory(target)
                elif path.is_file():
                    self.files.write(target, path.read_bytes(), mode=path.stat().st_mode & 0o777)
            return
        into = sandbox_dest.endswith("/") or self.files.kind(sandbox_dest) == "directory"
        target = f"{sandbox_dest}/{source.name}" if into else sandbox_dest
        self.files.write(target, source.read_bytes(), mode=source.stat().st_mode & 0o777)

    def copy_from(self, path: str) -> Path:
        """A zip of a file or directory, in a temporary file that belongs to the caller."""
        with tempfile.NamedTemporaryFile(suffix=".zip", delete=False) as file, zipfile.ZipFile(file, "w") as archive:
            if self.files.kind(path) == "directory":
                for name in self.files.files(path):
                    archive.writestr(name, self.files.read(f"{path}/{name}"))
            else:
                archive.writestr(Path(path).name, self.files.read(path))
        return Path(file.name)

    def list_files(self, path: str | None = None) -> list[str]:
        """The paths of a directory's entries; empty when there is no such directory."""
        directory = path or INSIDE
        if self.files.kind(directory) != "directory":
            return []
        return [f"{directory.rstrip('/')}/{name}" for name, _ in self.files.entries(directory)]


def _observation(action: CmdRunAction, result: CommandResult, suffix: str) -> CmdOutputObservation:
    return CmdOutputObservation(
        content=result.output.rstrip("\n"),
        command=action.command,
        hidden=action.hidden,
        metadata={
            "exit_code": -1 if result.exit_code is None else result.exit_code,
            "working_dir": result.cwd,
            "prefix": earlier_output(result),
            "suffix": f"\n{suffix}" if suffix and result.output else suffix,
        },
    )

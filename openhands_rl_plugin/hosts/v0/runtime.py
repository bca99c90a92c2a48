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
import shutil
import tempfile
import threading
import zipfile
from pathlib import Path

from openhands.core.config import OpenHandsConfig
from openhands.events.action import CmdRunAction, FileEditAction, FileReadAction, FileWriteAction, IPythonRunCellAction
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
from openhands_rl_plugin.core.files import remove_tree, temporary_folder
from openhands_rl_plugin.core.messages import whole_text
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import Failure, JsonObject
from openhands_rl_plugin.environments.workspace.changes import is_rewritten
from openhands_rl_plugin.environments.workspace.copies import METHODS, ForkLimits, Tree
from openhands_rl_plugin.environments.workspace.editor import EditRequest, WorkspaceEditor
from openhands_rl_plugin.environments.workspace.files import Workspace
from openhands_rl_plugin.environments.workspace.patch import Baseline
from openhands_rl_plugin.environments.workspace.sandbox import (
    INSIDE,
    BubblewrapSandbox,
    Sandbox,
    SandboxLimits,
    SubprocessSandbox,
    check_bubblewrap,
)
from openhands_rl_plugin.environments.workspace.session_fork import SessionFork, changes_in, check_in, fork_session
from openhands_rl_plugin.environments.workspace.shell import CommandResult, SandboxEndedError, Shell
from openhands_rl_plugin.hosts.shared.options import RL_AGENT
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import limits_of, paths_of
from openhands_rl_plugin.hosts.shared.sessions import protected_by
from openhands_rl_plugin.hosts.v0.session_state import SessionRuntime, SessionTaskList
from openhands_rl_plugin.hosts.v0.settings import host_settings
from openhands_rl_plugin.session.session import current_episode

# Seconds to start a sandbox, which takes a fraction of one: a machine under load is given time.
_START_TIMEOUT = 14.0
_ENDED = "[The sandbox ended and a new one is started: background processes and the shell's state are lost.]"


class WorkspaceRuntime(SessionRuntime):
    """Runs a session's commands and file actions: in bubblewrap, or as ``[rl.workspace] isolation`` says.

    The constructor raises ``ConfigError`` where bubblewrap does not work.
    """

    limits: SandboxLimits
    fork_limits = ForkLimits()
    fork_methods = METHODS

    def __init__(self, config: OpenHandsConfig, *args, **kwargs) -> None:
        # Before OpenHands' constructor, which leaves threads and an exit handler behind if a later line fails.
        self._private = temporary_folder("runtime")
        bound = current_episode()
        task = self._task_workspace = bound.workspace if bound else None
        base = task.root if task else config.workspace_base
        root = Path(base).expanduser().resolve() if base else self._private / "workspace"
        try:
            settings = bound.settings if bound else host_settings(config.get_agent_config(RL_AGENT), config)
            self._settings, protected = settings.workspace, protected_by(settings.reward)
            self.limits = limits_of(self._settings)
            root.mkdir(parents=True, exist_ok=True)
            self._sandbox = self.make_sandbox(config, root)
        except (ConfigError, OSError):
            shutil.rmtree(self._private)
            raise
        super().__init__(config, *args, **kwargs)
        self._tree = Tree(root)
        self._baseline = Baseline(self._private, task.repository if task else "", protected)
        self._evidence: JsonObject | None = None
        self.files = Workspace(root)
        self._editor: WorkspaceEditor | None = None
        self._start = f"{self._sandbox.workspace}/{task.repository}" if task and task.repository else None
        self._shell = Shell(self._sandbox, self._variables(), self.limits, start=self._start)

    def make_sandbox(self, config: OpenHandsConfig, root: Path) -> Sandbox:
        """The sandbox for the commands of the workspace at ``root``."""
        if self._settings.isolation == "none" and self._task_workspace is None:
            return SubprocessSandbox(root, self._private)
        return self._bubblewrap(config, root)

    def _bubblewrap(self, config: OpenHandsConfig, root: Path) -> Sandbox:
        if config.sandbox.use_host_network:
            raise ConfigError("[sandbox] use_host_network: write [rl.workspace] network = true in its place")
        check_bubblewrap()
        return BubblewrapSandbox(
            root,
            network=self._settings.network,
            temporary=self.limits.temporary,
            task_workspace=self._task_workspace,
            paths=paths_of(self._settings),
        )

    async def connect(self) -> None:
        """Start the sandbox. Raises ``InfrastructureError`` when it does not start."""
        self.set_runtime_status(RuntimeStatus.STARTING_RUNTIME)
        await asyncio.gather(
            asyncio.to_thread(self._shell.run, ":", timeout=_START_TIMEOUT),
            asyncio.to_thread(self._baseline.remember, self._sandbox),
        )
        self._runtime_initialized = True
        self.set_runtime_status(RuntimeStatus.RUNTIME_STARTED)

    def close(self) -> None:
        """End the sandbox and all processes in it, and remove this runtime's own files."""
        atexit.unregister(self.close)
        self._runtime_initialized = False
        self._shell.close()
        remove_tree(self._private)
        super().close()

    def conclude(self) -> tuple[JsonObject | None, Failure | None]:
        """The session's changes to its workspace, and no failure. Blocks; a second call returns the same."""
        if self._evidence is None:
            self._evidence = self.changes()
        return self._evidence, None

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """As ``check_in``."""
        session = (self._baseline, self._tree, self._sandbox, self._shell, self._variables(), self.limits)
        return check_in(asked, *session, self._start)

    def changes(self) -> JsonObject:
        """The changes since the session began: a patch and the names of the files. Blocks."""
        return changes_in(self._baseline, self._tree, self._sandbox, self._shell)

    @property
    def forkable(self) -> bool:
        """Whether ``fork`` is possible: without isolation, forks would see each other's files and the original's."""
        return isinstance(self._sandbox, BubblewrapSandbox)

    def fork(self, stop: threading.Event) -> WorkspaceRuntime:
        """A runtime with copies of the session's files and state, without a subscription to its event stream. Blocks.

        The caller closes it; until then the original's workspace must not change. Raises as ``fork_session`` does.
        """
        assert isinstance(self._sandbox, BubblewrapSandbox), "only a forkable runtime can be forked"
        forked = fork_session(
            self._tree,
            self._sandbox,
            self._shell,
            variables=self._variables(),
            bounds=self.limits,
            limits=self.fork_limits,
            methods=self.fork_methods,
            stop=stop,
        )
        try:
            return self._copy(forked)
        except BaseException:
            forked.close()
            raise

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
            return ErrorObservation("A command cannot hold a null character.")
        timeout = self.config.sandbox.timeout if action.timeout is None else action.timeout
        aside = action.cwd is not None or action.is_static
        try:
            result = self._shell.run(action.command, timeout=timeout, cwd=action.cwd, keep=not aside)
        except SandboxEndedError:
            return _observation(action, CommandResult(output="", exit_code=None, cwd=INSIDE), _ENDED)
        suffix = f"[The command timed out after {timeout:.1f} seconds and was ended.]" if result.timed_out else ""
        return _observation(action, result, suffix)

    def read(self, action: FileReadAction) -> Observation:
        """Read a text file; for the editor's tool, view it with line numbers."""
        if action.impl_source == FileReadSource.OH_ACI:
            return self._view(action)
        try:
            data = self.files.read(action.path)
        except PermissionError:
            raise
        except OSError as error:
            return ErrorObservation(f"{action.path} cannot be read: {error.strerror}")
        if b"\0" in data:
            return ErrorObservation("ERROR_BINARY_FILE")
        lines = data.decode("utf-8", "replace").splitlines(keepends=True)
        end = None if action.end == -1 else action.end
        return FileReadObservation(content="".join(lines[action.start : end]), path=action.path)

    def write(self, action: FileWriteAction) -> Observation:
        """Replace the whole file; create it and its parent directories when needed."""
        try:
            self.files.write(action.path, whole_text(action.content).encode())
        except PermissionError:
            raise
        except OSError as error:
            return ErrorObservation(f"{action.path} cannot be written: {error.strerror}")
        return FileWriteObservation(content="", path=action.path)

    def edit(self, action: FileEditAction) -> Observation:
        """Execute a command of ``str_replace_editor``."""
        if action.impl_source != FileEditSource.OH_ACI:
            return ErrorObservation("This runtime edits files by str_replace_editor only; disable enable_llm_editor.")
        request = EditRequest(
            command=action.command,
            path=action.path,
            file_text=action.file_text,
            old_str=action.old_str,
            new_str=action.new_str,
            insert_line=action.insert_line,
        )
        try:
            result = self.editor.edit(request)
        except PermissionError:
            raise
        except OSError as error:
            return ErrorObservation(f"{action.path} cannot be edited: {error.strerror}")
        return FileEditObservation(
            content=result.text,
            path=action.path,
            old_content=action.old_str,
            new_content=action.new_str,
            impl_source=FileEditSource.OH_ACI,
            diff="" if is_rewritten(*result.contents) else get_diff(*result.contents, action.path),
        )

    @property
    def editor(self) -> WorkspaceEditor:
        """The session's editor with its undo history, created when first used."""
        if self._editor is None:
            self._editor = WorkspaceEditor(self.files, self._private / "scratch")
        return self._editor

    def run_ipython(self, action: IPythonRunCellAction) -> Observation:
        """Not supported; the observation tells the model what to do instead."""
        return self.unsupported("Jupyter: run Python with a shell command (enable_jupyter = false)")

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

    def _copy(self, forked: SessionFork) -> WorkspaceRuntime:
        fork = copy.copy(self)
        fork._private, fork._tree = forked.private, forked.tree
        fork._sandbox, fork._shell = forked.sandbox, forked.shell
        fork.files = Workspace(forked.shell.path_from_host(INSIDE))
        fork.status_callback = None
        fork.event_stream = SessionTaskList.of(self.event_stream, self.sid)
        fork._editor = self._editor and self._editor.copied_to(fork.files, forked.private / "scratch")
        return fork

    def _view(self, action: FileReadAction) -> Observation:
        request = EditRequest(command="view", path=action.path, view_range=action.view_range)
        try:
            text = self.editor.edit(request).text
        except PermissionError:
            raise
        except OSError as error:
            return ErrorObservation(f"{action.path} cannot be read: {error.strerror}")
        return FileReadObservation(content=text, path=action.path, impl_source=FileReadSource.OH_ACI)

    def _variables(self) -> dict[str, str]:
        name, email = self.config.git_user_name, self.config.git_user_email
        git = {
            f"GIT_{who}_{what}": value
            for who in ("AUTHOR", "COMMITTER")
            for what, value in (("NAME", name), ("EMAIL", email))
        }
        own = self._task_workspace.variables if self._task_workspace else {}
        return {**git, **self.initial_env_vars, **self.config.sandbox.runtime_startup_env_vars, **own}


class BubblewrapRuntime(WorkspaceRuntime):
    """The workspace runtime in bubblewrap, whatever the settings say."""

    def make_sandbox(self, config: OpenHandsConfig, root: Path) -> Sandbox:
        """A bubblewrap sandbox; raises ``ConfigError`` where that is impossible."""
        return self._bubblewrap(config, root)


class SubprocessRuntime(WorkspaceRuntime):
    """The workspace runtime without isolation, even where bubblewrap is installed."""

    def make_sandbox(self, config: OpenHandsConfig, root: Path) -> Sandbox:
        """Plain subprocesses."""
        return SubprocessSandbox(root, self._private)


def _observation(action: CmdRunAction, result: CommandResult, suffix: str) -> CmdOutputObservation:
    prefix = ""
    if result.earlier:
        prefix = (
            f"[Output of background processes since the last command.]\n{result.earlier}\n[Output of this command.]\n"
        )
    return CmdOutputObservation(
        content=result.output.rstrip("\n"),
        command=action.command,
        hidden=action.hidden,
        metadata={
            "exit_code": -1 if result.exit_code is None else result.exit_code,
            "working_dir": result.cwd,
            "prefix": prefix,
            "suffix": f"\n{suffix}" if suffix and result.output else suffix,
        },
    )

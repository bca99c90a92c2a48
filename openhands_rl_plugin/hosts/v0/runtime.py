"""OpenHands runtimes: a sandboxed workspace that loses no output, and an environment.

``runtime = "openhands_rl_plugin.hosts.v0.runtime.WorkspaceRuntime"`` uses ``workspace_base`` as it is, without a copy;
without one, a session has a temporary directory that is removed with it. A session has network only with
``[rl.workspace] network = true``. In bubblewrap a session can be forked for search: a fork has copies of the workspace,
of ``/tmp``, of the shell's state and of the editor's history, at the same paths. Processes and network connections
cannot be copied, so a workspace with running background processes is not forked. Times, process ids and the order of
unsorted listings may differ in a fork.

``runtime = "openhands_rl_plugin.hosts.v0.runtime.EnvironmentRuntime"`` puts the environment of ``[rl] env_name`` in the
place of a workspace.

The settings of an OpenHands process that no runner drives are read here. OpenHands drops a top-level ``[rl]`` with a
warning, so the file is read once more; the warning is suppressed. The plugin is imported before OpenHands checks the
sections, with autoload as well as with a ``classpath`` line.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openhands.core.config import AgentConfig, OpenHandsConfig
from openhands.core.config.arg_utils import get_headless_parser
from openhands.core.config.mcp_config import MCPConfig, MCPStdioServerConfig
from openhands.core.exceptions import AgentRuntimeError
from openhands.core.logger import openhands_logger
from openhands.core.schema import AgentState
from openhands.events.action import ChangeAgentStateAction, CmdRunAction, FileEditAction, FileReadAction
from openhands.events.action.mcp import MCPAction
from openhands.events.event import Event, FileEditSource, FileReadSource
from openhands.events.observation import (
    CmdOutputObservation,
    ErrorObservation,
    FileEditObservation,
    FileReadObservation,
    Observation,
)
from openhands.runtime.base import Runtime
from openhands.runtime.runtime_status import RuntimeStatus
from openhands.storage.locations import get_conversation_dir
from openhands.storage.memory import InMemoryFileStore

from openhands_rl_plugin.config.build import make_environment
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import has_settings, load_settings, settings_from_sections
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.core.types import Failure, JsonObject
from openhands_rl_plugin.environments.workspace.editor import WorkspaceEditor
from openhands_rl_plugin.environments.workspace.shell import CommandResult, SandboxEndedError
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import ENDED, NO_NULL, SandboxedWorkspace, earlier_output
from openhands_rl_plugin.hosts.shared.sessions import RL_AGENT, protected_by, register_runtime
from openhands_rl_plugin.rollout.episode import LiveEnvironment
from openhands_rl_plugin.session.session import Session, session_here

_MAIN_SPEC = getattr(sys.modules["__main__"], "__spec__", None)
_IN_HEADLESS_MAIN = _MAIN_SPEC is not None and _MAIN_SPEC.name == "openhands.core.main"

# The file that OpenHands reads. Absolute at once: some runtimes change the working directory of the process.
_FILE = Path(get_headless_parser().parse_known_args(None if _IN_HEADLESS_MAIN else [])[0].config_file).absolute()

openhands_logger.addFilter(lambda record: "Unknown section [rl]" not in record.getMessage())


def host_settings(agent_config: AgentConfig, config: OpenHandsConfig) -> RLSettings:
    """The settings of this process: ``[rl]``, overridden by ``[extended.rl]``, overridden by ``[agent.RLAgent.rl]``.

    All three are read from the file if it has any, else the latter two from OpenHands' configuration objects.
    Raises ``ConfigError``.
    """
    if _FILE.is_file() and has_settings(_FILE):
        return load_settings(_FILE)
    own = getattr(agent_config, "rl", {})
    return settings_from_sections({"extended": config.extended.model_dump(), "agent": {"RLAgent": {"rl": own}}})


@contextmanager
def refusing() -> Iterator[None]:
    """End ``openhands.core.main``, which would print a traceback, with one line; other hosts get the error itself."""
    try:
        yield
    except RLError as error:
        if _IN_HEADLESS_MAIN:
            raise SystemExit("\n".join(f"error: {line}" for line in str(error).splitlines())) from error
        raise


# Seconds to start a sandbox, which takes a fraction of one: a machine under load is given time.
_START_TIMEOUT = 14.0


class SessionRuntime(Runtime):
    """An OpenHands ``Runtime`` that the session's agent can find, and that ends a search when the user stops it.

    It executes no action. ``session``: whose searches those are.
    """

    def __init__(self, config: OpenHandsConfig, *args, **kwargs) -> None:
        super().__init__(config, *args, **kwargs)
        register_runtime(self.sid, self)
        self.session: Session | None = None

    def on_event(self, event: Event) -> None:
        """Also cancels a running or upcoming search when the user stops the agent."""
        stops = isinstance(event, ChangeAgentStateAction) and event.agent_state == AgentState.STOPPED
        if stops and self.session is not None:
            self.session.cancel(event.id)
        super().on_event(event)

    async def connect(self) -> None:
        """Report that the runtime has started."""
        self._runtime_initialized = True
        self.set_runtime_status(RuntimeStatus.RUNTIME_STARTED)

    def close(self) -> None:
        """Release what the runtime holds. Idempotent."""
        atexit.unregister(self.close)
        super().close()

    def run(self, action: Any) -> Observation:
        """The observation that the action is not supported; the model reads it."""
        return ErrorObservation(f"This runtime does not execute {type(action).__name__}.")

    read = write = edit = run_ipython = browse = browse_interactive = run

    async def call_tool_mcp(self, action: MCPAction) -> Observation:
        """Not supported: there are no MCP servers."""
        return self.run(action)

    def get_mcp_config(self, extra_stdio_servers: list[MCPStdioServerConfig] | None = None) -> MCPConfig:
        """No servers: a session has no tools but its agent's."""
        return MCPConfig()

    def copy_to(self, host_src: str, sandbox_dest: str, recursive: bool = False) -> None:
        """Raises ``AgentRuntimeError``: files come with ``workspace_base``."""
        raise AgentRuntimeError(f"{host_src}: no file is copied into a session; put it into workspace_base")

    def copy_from(self, path: str) -> Path:
        """Raises ``AgentRuntimeError``."""
        raise AgentRuntimeError(f"{path}: there are no files")

    def list_files(self, path: str | None = None) -> list[str]:
        """Return no names: there are no files."""
        return []


class WorkspaceRuntime(SessionRuntime):
    """Runs a session's commands and file actions: in bubblewrap, or as ``[rl.workspace] isolation`` says.

    The constructor raises ``ConfigError`` where bubblewrap does not work.
    """

    def __init__(self, config: OpenHandsConfig, *args, **kwargs) -> None:
        bound = session_here.get()
        task = bound.workspace if bound else None
        settings = bound.settings if bound else host_settings(config.get_agent_config(RL_AGENT), config)
        if settings.workspace.isolation != "none" and config.sandbox.use_host_network:
            raise ConfigError("[sandbox] use_host_network: write [rl.workspace] network = true in its place")
        # Before OpenHands' constructor, which leaves threads and an exit handler behind if a later line fails.
        self.workspace = SandboxedWorkspace(
            Path(config.workspace_base) if config.workspace_base else None,
            settings.workspace,
            task=task,
            protected=protected_by(settings.reward),
        )
        super().__init__(config, *args, **kwargs)
        who = (("NAME", config.git_user_name), ("EMAIL", config.git_user_email))
        git = {f"GIT_{by}_{what}": value for by in ("AUTHOR", "COMMITTER") for what, value in who}
        given = {**self.initial_env_vars, **config.sandbox.runtime_startup_env_vars}
        self.workspace.seconds = config.sandbox.timeout
        self.workspace.variables |= {**git, **given, **self.workspace.variables}
        self.editor = WorkspaceEditor(lambda: self.workspace.files, self.workspace.private)

    @property
    def workspace_root(self) -> Path:
        """The workspace's path as commands see it."""
        return Path(self.workspace.inside)

    async def connect(self) -> None:
        """Start the sandbox. Raises ``InfrastructureError`` when it does not start."""
        self.set_runtime_status(RuntimeStatus.STARTING_RUNTIME)
        await asyncio.to_thread(self.workspace.run, ":", timeout=_START_TIMEOUT)
        await super().connect()

    def close(self) -> None:
        """End the sandbox and all processes in it, and remove this runtime's own files."""
        self.workspace.close()
        super().close()

    def fork(self) -> WorkspaceRuntime:
        """A runtime over ``SandboxedWorkspace.fork``, without a subscription to its event stream."""
        fork: Any = copy.copy(self)
        fork.status_callback = None
        # All that is needed of a stream for an action is the task list, and to hide secrets.
        live, tasks = self.event_stream, InMemoryFileStore()
        with suppress(FileNotFoundError):
            name = f"{get_conversation_dir(self.sid, live.user_id)}TASKS.md"
            tasks.write(name, live.file_store.read(name))
        kept = {"user_id": live.user_id, "file_store": tasks, "_replace_secrets": live._replace_secrets}
        fork.event_stream = SimpleNamespace(**kept)
        fork.workspace = self.workspace.fork()
        fork.editor = self.editor.forked(lambda: fork.workspace.files, fork.workspace.private)
        return fork

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
            note = f"[The command timed out after {timeout:.1f} seconds and was ended.]" if result.timed_out else ""
        except SandboxEndedError:
            result, note = CommandResult(output="", exit_code=None, cwd=self.workspace.inside), ENDED
        return CmdOutputObservation(
            content=result.output.rstrip("\n"),
            command=action.command,
            hidden=action.hidden,
            metadata={
                "exit_code": -1 if result.exit_code is None else result.exit_code,
                "working_dir": result.cwd,
                "prefix": earlier_output(result),
                "suffix": f"\n{note}" if note and result.output else note,
            },
        )

    def run_action(self, action: Any) -> Observation:
        """As in OpenHands; a file that cannot be read or written is answered as such."""
        try:
            return super().run_action(action)
        except OSError as error:
            own = isinstance(error, PermissionError)
            return ErrorObservation(str(error) if own else f"{action.path}: {error.strerror}")

    def read(self, action: FileReadAction) -> Observation:
        """Read a text file; for the editor's tool, view it with line numbers."""
        try:
            if action.impl_source == FileReadSource.OH_ACI:
                text = self.editor.edit("view", action.path, view_range=action.view_range).output or ""
            else:
                text = self.workspace.files.read(action.path).decode("utf-8", "replace")
        except FileNotFoundError as error:
            # OpenHands reads files that may not be there by this method alone.
            return ErrorObservation(f"{action.path}: {error.strerror}")
        return FileReadObservation(content=text, path=action.path, impl_source=action.impl_source)

    def edit(self, action: FileEditAction) -> Observation:
        """Execute a command of ``str_replace_editor``."""
        given = {name: getattr(action, name) for name in ("file_text", "old_str", "new_str", "insert_line")}
        return FileEditObservation(
            content=self.editor.edit(action.command, action.path, **given).output or "",
            path=action.path,
            old_content=action.old_str,
            new_content=action.new_str,
            impl_source=FileEditSource.OH_ACI,
        )

    def copy_from(self, path: str) -> Path:
        """A zip of a directory's files, in a temporary file that belongs to the caller: OpenHands reads microagents."""
        with tempfile.NamedTemporaryFile(suffix=".zip", delete=False) as file, zipfile.ZipFile(file, "w") as archive:
            for name, kind in self.workspace.files.entries(path, levels=100):
                if kind == "file":
                    archive.writestr(name, self.workspace.files.read(f"{path}/{name}"))
        return Path(file.name)

    def list_files(self, path: str | None = None) -> list[str]:
        """The paths of a directory's entries; empty when there is no such directory."""
        files, directory = self.workspace.files, path or self.workspace.inside
        if files.kind(directory) != "directory":
            return []
        return [f"{directory.rstrip('/')}/{name}" for name, _ in files.entries(directory)]


class EnvironmentRuntime(SessionRuntime):
    """One episode of the environment of ``[rl]``, which the session's agent resets and steps, as ``live``.

    Raises ``ConfigError`` from the constructor.
    """

    def __init__(self, config: OpenHandsConfig, *args, **kwargs) -> None:
        settings = host_settings(config.get_agent_config(RL_AGENT), config)
        # Before OpenHands' constructor, which leaves threads and an exit handler behind if a later line fails.
        self.live = LiveEnvironment(make_environment(settings))
        super().__init__(config, *args, **kwargs)

    def conclude(self) -> tuple[JsonObject | None, Failure | None]:
        """Evidence (``None`` when the episode never began) and failure, if any; closes the environment. Blocks."""
        background().wait_for(self.live.conclude())
        return self.live.evidence, self.live.failure

    def close(self) -> None:
        """Close the environment, once. Blocks."""
        self.conclude()
        super().close()

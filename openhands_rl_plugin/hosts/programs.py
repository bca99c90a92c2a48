"""RLAgent at work on a folder, in the OpenHands that is installed. Importing it does not import OpenHands.

With ``hosts.local`` the only module that names hosts.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from openhands_rl_plugin.config.host import host_of, version_of
from openhands_rl_plugin.config.starting import starting_config
from openhands_rl_plugin.config.toml import read_document, toml_of
from openhands_rl_plugin.config.work import EpisodeOptions, OwnWork, WorkOptions, episodes_of, work_of
from openhands_rl_plugin.core.errors import ConfigError

Permissions = Literal["ask", "auto"]
"""Whether commands and changes of files wait for the user's yes."""

# The newest OpenHands CLI; it is not developed any more.
CLI_PACKAGE, CLI_VERSION = "openhands", "1.16"

_WORKSPACE_RUNTIME = "openhands_rl_plugin.hosts.v0.runtime.WorkspaceRuntime"
_INTERRUPTED = 130


_QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}
"""No price list from the network, no banner; read when OpenHands is imported."""


def run_task(task: str, workspace: Path, options: WorkOptions, show: Callable[[str], None]) -> int:
    """Play one task in a folder and say what was recorded; the exit code. ``show`` prints a line.

    Raises ``ConfigError`` for settings that cannot be used and a folder that cannot be made.
    """
    work = work_of(options)
    host = host_of(work.settings)
    try:
        workspace.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workspace: {workspace} cannot be made: {error.strerror}") from error
    if host == "v0":
        return _run_main(task, workspace.resolve(), work)
    _be_quiet()
    from openhands_rl_plugin.hosts.v1.programs.task import run_task as run_in_sdk

    return run_in_sdk(task, workspace.resolve(), work, show)


def serve_acp(options: WorkOptions, *, conversations: Path, permissions: Permissions) -> int:
    """An agent for the Agent Client Protocol, until standard input ends; the exit code.

    Whatever else this process prints goes to standard error. ``conversations``: the folder that they are kept in.
    Raises ``ConfigError``, also without the packages.
    """
    if version_of("agent-client-protocol") is None:
        raise ConfigError("agent-client-protocol is not installed: pip install 'openhands_rl_plugin[sdk,acp]'")
    work = work_of(options)
    _need_sdk(work)
    _be_quiet()
    if not sys.warnoptions:
        # Editors show standard error to their users; packages warn there of each other's old names, and some put a
        # filter of their own before any that is set here.
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").propagate = False
    output = os.dup(1)
    os.dup2(2, 1)
    from openhands_rl_plugin.hosts.v1.programs.acp.server import serve

    return serve(work, output=output, conversations=conversations, permissions=permissions)


def run_openhands_cli(words: Sequence[str], options: EpisodeOptions) -> int:
    """OpenHands' own CLI with RLAgent as its agent; ``words`` are its arguments. Raises ``ConfigError``."""
    if (found := version_of(CLI_PACKAGE)) is None or not found.startswith(f"{CLI_VERSION}."):
        raise ConfigError(
            f"OpenHands' CLI {CLI_VERSION} is needed ({found or 'not'} installed); in an environment of its own: "
            f"pip install openhands_rl_plugin '{CLI_PACKAGE}=={CLI_VERSION}.*'"
        )
    work = episodes_of(options)
    _be_quiet()
    from openhands_rl_plugin.hosts.v1.programs.openhands_cli import run_cli

    return run_cli(words, work.rl)


def _be_quiet() -> None:
    for name, value in {**_QUIET, "LOG_LEVEL": "WARNING"}.items():
        os.environ.setdefault(name, value)


def _need_sdk(work: OwnWork) -> None:
    if host_of(work.settings) != "v1" and version_of("openhands-sdk") is None:
        raise ConfigError("OpenHands' SDK is needed: pip install 'openhands_rl_plugin[sdk,acp]'")


def _run_main(task: str, workspace: Path, work: OwnWork) -> int:
    """``python -m openhands.core.main``, in a process of its own."""
    environ = {**_QUIET, **os.environ, "LLM_MODEL": str(work.llm["model"])}
    for name, variable in (("base_url", "LLM_BASE_URL"), ("api_key", "LLM_API_KEY")):
        if work.llm.get(name):
            environ[variable] = str(work.llm[name])
    with tempfile.TemporaryDirectory(prefix="openhands-rl-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(toml_of(_main_document(work, workspace)), encoding="utf-8")
        command = [sys.executable, "-m", "openhands.core.main", "--config-file", str(file), "-c", "RLAgent", "-t", task]
        process = subprocess.Popen(command, env=environ)
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal sent it to both, and that one stores what it has.
            process.wait()
            return _INTERRUPTED


def _main_document(work: OwnWork, workspace: Path) -> dict[str, object]:
    """The file of ``work``, or a new one, with its ``[rl]`` in one place, and no key."""
    if work.file is not None:
        document = dict(read_document(work.file))
    else:
        document = tomllib.loads(starting_config(model="", base_url="", workspace=str(workspace)))
    core, llm = _table(document, "core"), _table(document, "llm")
    agents, extended = _table(document, "agent"), _table(document, "extended")
    extended.pop("rl", None)
    if own := _table(agents, "RLAgent"):
        own.pop("rl", None)
        agents["RLAgent"] = own
    llm.pop("api_key", None)
    core.setdefault("runtime", _WORKSPACE_RUNTIME)
    core["workspace_base"] = str(workspace)
    return {**document, "core": core, "llm": llm, "agent": agents, "extended": extended, "rl": work.rl}


def _table(document: Mapping[str, object], name: str) -> dict[str, object]:
    found = document.get(name)
    return dict(found) if isinstance(found, Mapping) else {}

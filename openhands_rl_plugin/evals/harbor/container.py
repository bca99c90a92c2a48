"""The place of one task: a folder that is ``/`` of a sandbox, with this machine's programs, and its shell."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, describe
from openhands_rl_plugin.environments.workspace.bubblewrap import isolate, root_mounts
from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits, interpreter_mounts, is_system, search_path
from openhands_rl_plugin.environments.workspace.shell import Shell
from openhands_rl_plugin.evals.harbor.recipe import BuildStep
from openhands_rl_plugin.evals.harbor.tasks import HarborTask, resolved
from openhands_rl_plugin.evals.harbor.test_script import SHIMS
from openhands_rl_plugin.evals.swe.backends.caching import default_cache
from openhands_rl_plugin.evals.swe.backends.interpreters import find_python
from openhands_rl_plugin.evals.tasks.sources.virtualenv import make_environment

GIVEN = "/run/given"
"""Where the tests and the oracle's solution appear, read-only, once they are given."""

_FOLDERS = (
    "app",
    "home",
    "logs/agent",
    "logs/artifacts",
    "logs/verifier",
    "mnt",
    "opt",
    "root",
    "srv",
    "tmp",
    "var/tmp",
)
_BUILD_SECONDS = 600.0


class HarborSandbox:
    """``core`` of a container: a folder as a writable ``/``, the system's programs and settings read-only over it."""

    def __init__(self, root: Path, given: Path, workdir: str, shown: Sequence[Path], *, network: bool = False) -> None:
        self.workspace = workdir
        self.home = "/root"
        self.state = "/tmp/.shell/state"
        self._root, self._given, self._shown, self._network = root, given, shown, network

    def wrap(self, command: Sequence[str], shared: Sequence[Path] = ()) -> list[str]:
        """``command`` behind ``bwrap`` and its mounts. Raises ``ConfigError`` where there is no bubblewrap."""
        system = root_mounts(lambda name: is_system(name) and not os.path.islink(f"/{name}"))
        return [
            *isolate(("--bind", str(self._root), "/", *system[2:]), network=self._network, options=("--as-pid-1",)),
            *interpreter_mounts(),
            *(part for path in self._shown for part in ("--ro-bind", str(path), str(path))),
            *("--ro-bind", str(self._given), GIVEN, "--chdir", "/", "--"),
            *command,
        ]

    def to_inside(self, text: str) -> str:
        """``text`` unchanged: inside, nothing has another name."""
        return text

    def from_inside(self, text: str) -> str:
        """``text`` unchanged."""
        return text


class HarborContainer:
    """A task's files and its shell. Blocks; raises ``EpisodeError``.

    ``place`` is an empty folder of the caller, who removes it after ``close``.
    """

    def __init__(self, task: HarborTask, place: Path, *, network: bool = False, cache: Path | None = None) -> None:
        self.task = task
        self.place = place
        self.root = place / "root"
        self._network = network
        self._cache = cache or default_cache()
        self._given = place / "given"
        self._python: Path | None = None
        self._prefix: Path | None = None
        self._shell: Shell | None = None

    @property
    def shell(self) -> Shell:
        """The agent's shell."""
        if self._shell is None:
            raise RuntimeError("the container is not built")
        return self._shell

    def build(self) -> None:
        """Execute the recipe. Raises ``BadEnvironmentError`` for a step that fails."""
        self._make_python()
        for name in _FOLDERS:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for entry in os.scandir("/"):
            if is_system(entry.name) and entry.is_symlink():
                (self.root / entry.name).symlink_to(os.readlink(entry.path))
        (self._given / "bin").mkdir(parents=True)
        for name, text in SHIMS.items():
            shim = self._given / "bin" / name
            shim.write_text(text)
            shim.chmod(0o755)
        self._inside("/", self.task.workdir).mkdir(parents=True, exist_ok=True)
        self._shell = self._new_shell()
        for step in self.task.recipe.steps:
            self._inside("/", step.workdir).mkdir(parents=True, exist_ok=True)
            if step.kind == "copy":
                self._copy(step)
            else:
                self._run(step)

    def give(self, name: str) -> None:
        """Show the task's folder ``name`` (``tests``, ``solution``) below ``GIVEN``; the agent cannot change it."""
        shutil.copytree(self.task.folder / name, self._given / name, symlinks=True)

    def forget_shell(self) -> None:
        """The next command begins with the first environment: no variable, function or alias of the agent is left."""
        state = self.root / "tmp" / ".shell" / "state"
        if not os.path.islink(state.parent) and not os.path.islink(state.parent.parent):
            state.unlink(missing_ok=True)

    def twin(self, place: Path) -> HarborContainer:
        """A container over the copied files in ``place``, whose shell goes on from the same state."""
        other = HarborContainer(self.task, place, network=self._network, cache=self._cache)
        other._python, other._prefix = self._python, self._prefix
        other._shell = other._new_shell(start=self.shell.snapshot().cwd)
        return other

    def close(self) -> None:
        """End all processes."""
        if self._shell is not None:
            self._shell.close()

    def _new_shell(self, start: str | None = None) -> Shell:
        shown = [path for path in (self._python, self._prefix) if path is not None]
        sandbox = HarborSandbox(self.root, self._given, self.task.workdir, shown, network=self._network)
        first = f"{self._python}/bin:" if self._python is not None else ""
        path = {"PATH": f"{first}/root/.local/bin:{search_path()}"}
        variables = {**path, **self.task.recipe.variables, **resolved(self.task.variables)}
        # What an image's Dockerfile puts before the PATH of its image stays before this one.
        variables["PATH"] = variables["PATH"].replace("$PATH", path["PATH"]).replace("${PATH}", path["PATH"])
        return Shell(sandbox, variables, SandboxLimits(), start=start)

    def _make_python(self) -> None:
        task = self.task
        wanted = (*task.recipe.requirements, *task.tests.requirements)
        if not wanted and not task.recipe.python:
            return
        import sys

        running = f"{sys.version_info.major}.{sys.version_info.minor}"
        version = task.recipe.python or task.tests.python or running
        try:
            self._prefix = find_python(version).prefix
        except ConfigError:
            if task.recipe.python:
                raise
            version = running  # only the tests asked for it
            self._prefix = find_python(version).prefix
        self._python = make_environment(version, wanted, self._cache).resolve()

    def _inside(self, workdir: str, path: str) -> Path:
        """The place of a path of the recipe on the host. Raises ``BadEnvironmentError`` where it leaves the root."""
        whole = path if path.startswith("/") else f"{workdir}/{path}"
        place = (self.root / whole.lstrip("/")).resolve()
        top = place.relative_to(self.root.resolve()).parts[:1] if place.is_relative_to(self.root.resolve()) else ("..",)
        if top and (top[0] == ".." or is_system(top[0])):
            raise BadEnvironmentError(f"{self.task.name}: {whole} is part of the system here, and cannot be written")
        return place

    def _copy(self, step: BuildStep) -> None:
        *sources, target = step.words
        context = self.task.folder / "environment"
        place = self._inside(step.workdir, target)
        for pattern in sources:
            found = (
                [context] if pattern in (".", "./") else sorted(context.glob(pattern.removeprefix("./").rstrip("/")))
            )
            if not found:
                raise BadEnvironmentError(f"{self.task.name}: COPY {pattern}: there is no such file in environment/")
            for source in found:
                _copy_one(
                    source, place, into=target.endswith("/") or len(sources) > 1 or len(found) > 1, mode=step.mode
                )

    def _run(self, step: BuildStep) -> None:
        done = self.shell.run(f"set -e\n{step.words[0]}", timeout=_BUILD_SECONDS, cwd=step.workdir, keep=False)
        if done.exit_code != 0:
            said = " ".join(done.output.split())[-200:]
            raise BadEnvironmentError(f"{self.task.name}: RUN {step.words[0]:.80} failed: {said or done.exit_code}")


def _copy_one(source: Path, place: Path, *, into: bool, mode: str) -> None:
    try:
        if source.is_dir():
            shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
            return
        place = place / source.name if into or place.is_dir() else place
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place)
        if mode:
            place.chmod(stat.S_IMODE(int(mode, 8)) if mode.isdigit() else place.stat().st_mode | 0o111)
    except (OSError, shutil.Error, ValueError) as error:
        raise BadEnvironmentError(f"COPY {source.name}: {describe(error)}") from error

"""The place of one task: a folder that is ``/`` of a sandbox, with this machine's programs, and its shells."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, InfrastructureError
from openhands_rl_plugin.environments.workspace.copies import remove_tree
from openhands_rl_plugin.environments.workspace.places import remove
from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits, search_path
from openhands_rl_plugin.environments.workspace.shell import SandboxEndedError, Shell
from openhands_rl_plugin.environments.workspace.visible import is_system
from openhands_rl_plugin.evals.harbor.recipe import BuildStep
from openhands_rl_plugin.evals.harbor.sandbox import HarborSandbox, clear_way, read_only_path
from openhands_rl_plugin.evals.harbor.shims import SHIMS
from openhands_rl_plugin.evals.harbor.tasks import HarborTask, resolved
from openhands_rl_plugin.evals.swe.backends.caching import default_cache
from openhands_rl_plugin.evals.swe.backends.interpreters import find_python
from openhands_rl_plugin.evals.tasks.sources.virtualenv import make_environment

GIVEN = "/run/given"
"""Where the shims and the oracle's solution appear, read-only, once they are given."""
CONTEXT = "/run/context"
"""The task's ``environment/`` while the recipe is executed."""
LOGS = "logs/verifier"

_FOLDERS = ("app", "home", "logs/agent", "logs/artifacts", LOGS, "mnt", "opt", "root", "srv", "tmp", "var/tmp")
_BUILD_SECONDS = 600.0
_STATE = "/tmp/.shell/state"
# pytest takes its settings, and with them code, from these above its tests.
_PYTEST_FILES = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg", "setup.py", "conftest.py")


class HarborContainer:
    """A task's files and its shells. Blocks; raises ``EpisodeError``.

    ``place`` is an empty folder of the caller, who removes it after ``close``. ``pass_env``: the variables of this
    process's environment that the task may have.
    """

    def __init__(
        self,
        task: HarborTask,
        place: Path,
        *,
        network: bool = False,
        cache: Path | None = None,
        pass_env: Collection[str] = (),
    ) -> None:
        self.task = task
        self.place = place
        self.root = place / "root"
        self.judging = threading.Lock()
        self.pass_env = frozenset(pass_env)
        self._network = network
        self._cache = cache or default_cache()
        self._given = place / "given"
        self._python: Path | None = None
        self._prefix: Path | None = None
        self._shell: Shell | None = None
        self._shells: list[Shell] = []
        self._untouched: HarborContainer | None = None
        self._at_first: frozenset[str] = frozenset()
        self._closed = False

    @property
    def shell(self) -> Shell:
        """The agent's shell."""
        if self._shell is None:
            raise InfrastructureError(f"{self.task.name}: the container was not ready before the episode ended")
        return self._shell

    def build(self) -> None:
        """Execute the recipe. Raises ``BadEnvironmentError`` for a step that fails."""
        for variables in (self.task.variables, self.task.test_variables):
            self.resolved(variables)
        self._make_python()
        for name in _FOLDERS:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self._given / "bin").mkdir(parents=True)
        packages = "\n".join((*self.task.recipe.packages, *self.task.tests.packages, ""))
        for name, text in {**SHIMS, "packages": packages}.items():
            shim = self._given / "bin" / name
            shim.write_text(text)
            shim.chmod(0o755)
        context = self.task.folder / "environment"
        mounts = [*self._mounts(), *([("--ro-bind", str(context.resolve()), CONTEXT)] if context.is_dir() else [])]
        builder = self._started(self._sandbox("/", mounts))
        try:
            self._execute(builder, f"mkdir -p {shlex.quote(self.task.workdir)}", "WORKDIR")
            for step in self.task.recipe.steps:
                self._execute(builder, f"mkdir -p {shlex.quote(step.workdir)}", "WORKDIR")
                if step.kind == "copy":
                    self._copy(builder, step)
                else:
                    self._run(builder, step)
        finally:
            builder.close()
        self._at_first = frozenset(os.listdir(self.root))
        self._shell = self._agent_shell()

    def give(self, name: str) -> None:
        """Show the task's folder ``name`` (``solution``) below ``GIVEN``; nothing inside can change it."""
        shutil.rmtree(self._given / name, ignore_errors=True)
        shutil.copytree(self.task.folder / name, self._given / name, symlinks=True)

    def end_agent(self) -> list[str]:
        """End the agent's sandbox and all that runs in it; the names of what was left running."""
        shell, left = self.shell, list[str]()
        with suppress(InfrastructureError):
            left = [name for name in shell.snapshot().processes if name]
        shell.close()
        return left

    @contextmanager
    def judged(self) -> Iterator[tuple[Shell, Path]]:
        """A new sandbox over the files as they are, after ``end_agent``, and a folder with its ``/logs/verifier``.

        ``/tests``, ``/logs/verifier`` and the shell's state are fresh mounts; programs come from folders that the agent
        could not write.
        """
        place = Path(tempfile.mkdtemp(prefix="judged-", dir=self.place))
        shutil.copytree(self.task.folder / "tests", place / "tests", symlinks=True)
        mounts = [*self._mounts(), ("--bind", str(place / "tests"), "/tests")]
        for inside in (LOGS, "run/shell"):
            (place / inside).mkdir(parents=True)
            mounts.append(("--bind", str(place / inside), f"/{inside}"))
        clear_way(self.root, "/root/.local/bin")
        for name in {*_PYTEST_FILES} - self._at_first:
            remove(os.path.join(self.root, name))
        sandbox = self._sandbox("/", mounts, "/run/shell/state")
        shell = self._started(sandbox, {**self._variables(), "PATH": self._tests_path(), "PYTHONNOUSERSITE": "1"})
        try:
            yield shell, place
        finally:
            shell.close()

    @contextmanager
    def untouched(self) -> Iterator[HarborContainer]:
        """Another container of the task, as the agent found it."""
        place = Path(tempfile.mkdtemp(prefix="untouched-", dir=self.place))
        other = self._untouched = self._like(place)
        try:
            other.build()
            yield other
        finally:
            other.close()
            remove_tree(place)

    def twin(self, place: Path) -> HarborContainer:
        """A container over the copied files in ``place``, whose shell goes on from the same state."""
        other = self._like(place)
        other._python, other._prefix, other._at_first = self._python, self._prefix, self._at_first
        other._shell = other._agent_shell(start=self.shell.snapshot().cwd)
        return other

    def resolved(self, variables: Mapping[str, str]) -> dict[str, str]:
        """``variables`` of the task with what it may know of the user's. Raises ``BadEnvironmentError``."""
        return resolved(variables, self.pass_env)

    def _like(self, place: Path) -> HarborContainer:
        return HarborContainer(self.task, place, network=self._network, cache=self._cache, pass_env=self.pass_env)

    def interrupt(self) -> None:
        """End all processes; the files can still be judged."""
        for shell in (*self._shells,):
            shell.close()
        if self._untouched is not None:
            self._untouched.close()

    def close(self) -> None:
        """End all processes, for ever."""
        self._closed = True
        self.interrupt()

    def _started(
        self, sandbox: HarborSandbox, variables: dict[str, str] | None = None, start: str | None = None
    ) -> Shell:
        if self._closed:
            raise SandboxEndedError("the container is closed")
        shell = Shell(sandbox, variables or {"PATH": self._path()}, SandboxLimits(), start=start)
        self._shells.append(shell)
        return shell

    def _agent_shell(self, start: str | None = None) -> Shell:
        return self._started(self._sandbox(self.task.workdir, self._mounts()), self._variables(), start)

    def _mounts(self) -> list[tuple[str, str, str]]:
        shown = [] if self._python is None else [("--ro-bind", str(self._python), str(self._python))]
        return [*shown, ("--ro-bind", str(self._given), GIVEN)]

    def _sandbox(self, workdir: str, mounts: Sequence[tuple[str, str, str]], state: str = _STATE) -> HarborSandbox:
        return HarborSandbox(self.root, workdir, mounts, state=state, network=self._network, python=self._prefix)

    def _path(self) -> str:
        first = f"{self._python}/bin:" if self._python is not None else ""
        return f"{first}/root/.local/bin:{search_path()}"

    def _variables(self) -> dict[str, str]:
        return self._with_path({**self.task.recipe.variables, **self.resolved(self.task.variables)})

    def _with_path(self, own: dict[str, str]) -> dict[str, str]:
        path = self._path()
        variables = {"PATH": path, **own}
        # What an image's Dockerfile puts before the PATH of its image stays before this one.
        variables["PATH"] = variables["PATH"].replace("$PATH", path).replace("${PATH}", path)
        return variables

    def _tests_path(self) -> str:
        """Shims, packages and the system first; what only the Dockerfile names, which the agent may write, last."""
        own = self._variables()["PATH"].split(":")
        known = self._path().split(":")
        first = [f"{self._python}/bin"] if self._python is not None else []
        fixed = read_only_path([str(path) for path in (self._python, self._prefix) if path is not None])
        return ":".join((f"{GIVEN}/bin", *first, fixed, *(part for part in own if part not in known)))

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

    def _copy(self, builder: Shell, step: BuildStep) -> None:
        *sources, target = step.words
        whole = os.path.normpath(target if target.startswith("/") else f"{step.workdir}/{target}")
        if is_system(whole.lstrip("/").partition("/")[0]):
            raise BadEnvironmentError(f"{self.task.name}: {whole} is part of the system here, and cannot be written")
        found = [name for pattern in sources for name in self._in_context(pattern)]
        into = target.endswith("/") or len(found) > 1
        place = shlex.quote(f"{whole}/" if into else whole)
        for name in found:
            source = shlex.quote(f"{CONTEXT}/{name}")
            # Inside, a link leads nowhere but inside; those in a folder stay links, as in a build.
            made = f"mkdir -p {place if into else f'$(dirname {place})'}"
            command = f"{made} && cp -aH --no-preserve=ownership {source} {place}"
            changed = f"{place}{shlex.quote(os.path.basename(name))}" if into else place
            if (self.task.folder / "environment" / name).is_dir():
                command = f"mkdir -p {place} && cp -a --no-preserve=ownership {source}/. {place}"
                changed = f"-R {place}"
            if step.mode:
                command += f" && chmod {shlex.quote(step.mode)} {changed}"
            self._execute(builder, command, f"COPY {name}")

    def _in_context(self, pattern: str) -> list[str]:
        """The names below ``environment/`` that a source means. Raises ``BadEnvironmentError`` where one leaves it."""
        context = (self.task.folder / "environment").resolve()
        # As in a build, neither ``/`` nor ``..`` leads above the context.
        name = os.path.normpath(f"/{pattern}").lstrip("/")
        found = sorted(context.glob(name)) if name else [context]
        if not found:
            raise BadEnvironmentError(f"{self.task.name}: COPY {pattern}: there is no such file in environment/")
        for each in found:
            if not each.resolve().is_relative_to(context):
                raise BadEnvironmentError(f"{self.task.name}: COPY {pattern}: {each.name} leads out of environment/")
        return [str(each.relative_to(context)) for each in found]

    def _run(self, builder: Shell, step: BuildStep) -> None:
        variables = self._with_path(step.variables)
        variables["PATH"] = f"{GIVEN}/bin:{variables['PATH']}"
        own = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        try:
            what = f"RUN {' '.join(step.words[-1].split()):.80}"
            self._execute(builder, f"export {own}; {shlex.join(step.words)}", what, step.workdir)
        except BadEnvironmentError:
            if not step.incomplete:
                raise

    def _execute(self, builder: Shell, command: str, what: str, workdir: str = "/") -> None:
        done = builder.run(command, timeout=_BUILD_SECONDS, cwd=workdir, keep=False)
        if done.exit_code != 0:
            said = " ".join(done.output.split())[-200:]
            raise BadEnvironmentError(f"{self.task.name}: {what} failed: {said or done.exit_code}")

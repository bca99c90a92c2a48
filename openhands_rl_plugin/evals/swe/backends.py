"""Where instances are set up and patches are tested: in a sandbox here, or in the image of a container engine.

Without an engine environments are made by uv, sandboxes by bubblewrap. A sandbox is the place of the official scripts:
a root of its own with the repository at ``/testbed``, conda's place taken by the shim, and of the host what programs
need and nothing more. A set-up also has the user's settings of the package index, which no test and no agent sees.

A layer is a folder with ``PARTS``: an environment that all rows with its Python and requirements share, and on top of a
copy of it an instance with its repository installed. Graded patches write to an overlay, never there.

With a container engine: the official images of SWE-bench and SWE-Gym, through the ``docker`` or the ``podman`` program.
Scripts, markers and verdicts are the same; only the ``Box`` differs.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.files import draft_folder, locked_folder, remove_tree
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.environments.workspace.git import (
    OTHER,
    REPOSITORY,
    checked_git,
    git_command,
    git_settings,
    make_git_folder,
)
from openhands_rl_plugin.environments.workspace.processes import Ended, checked, run
from openhands_rl_plugin.environments.workspace.sandbox import (
    OF_A_PREFIX,
    Overlay,
    SandboxLimits,
    can_overlay,
    empty_root,
    find_bubblewrap,
    installed_parts,
    limited,
    prefix_mounts,
    program_mounts,
    sandboxed,
    settings_mounts,
)
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace, WorkspaceMount
from openhands_rl_plugin.evals.swe import shim
from openhands_rl_plugin.evals.swe.grading import BoxBackend
from openhands_rl_plugin.evals.swe.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.instances import Instance
from openhands_rl_plugin.evals.swe.recipes import Recipe, recipe_of
from openhands_rl_plugin.evals.tasks.source import Source, find_source, task_repository

CONDA = "/opt/miniconda3"
PARTS = {"conda": "/conda", "root": "/root", "testbed": "/testbed"}
"""The parts of a layer, and where the sandbox mounts them. Environments and uv's cache lie in one, as uv links files
within one mount only.
"""
PROGRAMS = (
    *("python", "python3", "pip", "pip3", "tox", "pipx", "sudo"),
    *("apt", "apt-get", "locale-gen", "add-apt-repository"),
)
"""Programs that the scripts call and that need conda or root: ``shim/programs.sh`` is all of them."""

_ROOT_SIZE = 256 * 1024**2
_SHIM = Path(shim.__file__).parent
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")
"""Capabilities of root in a container: none that reaches mounts, devices or other processes' memory."""
AS_ROOT = ("--unshare-user", "--uid", "0", "--gid", "0")
# ``localhost`` is a name that resolves without a network.
_OF_ROOT = (
    *(*AS_ROOT, "--hostname", "localhost", "--die-with-parent"),
    *(word for name in _CAPABILITIES for word in ("--cap-add", f"CAP_{name}")),
)
LIMITS = SandboxLimits(memory=16 * 1024**3, processes=8192, file=8 * 1024**3)
"""Limits of an instance's sandbox."""

_OF_NETWORK = "(?:HTTPS?|ALL|NO|FTP)_PROXY|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
_OF_INDEX = r"(?:PIP|UV)_\w*(?:INDEX|FIND_LINKS|CERT|PROXY|HOST|TLS|TIMEOUT)\w*"
_INDEX_FILES = {
    **{f"~/{name}": f"/root/{name}" for name in (".config/uv/uv.toml", ".config/pip/pip.conf", ".netrc")},
    **{name: name for name in ("/etc/pip.conf", "/etc/uv/uv.toml")},
}


@functools.cache
def find_python(version: str) -> Path:
    """The program of a Python ``version`` ("3.9"), below ``bin`` of the folder that holds all of it; no virtual
    environment. Raises ``ConfigError`` that says how to get one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\.\d+)?", version)
    short = match[1] if match else "?"
    pyenv = Path("~/.pyenv/versions").expanduser().glob(f"{short}.*/bin")
    path = os.pathsep.join([f"{sys.base_prefix}/bin", *map(str, pyenv), os.environ.get("PATH", os.defpath)])
    find = [find_uv(), "python", "find", "--no-project", "--no-config", "--no-python-downloads", "--system", short]
    found = subprocess.run(find, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ConfigError(f"Python {version:.20} is not installed; get it with: uv python install {short}")
    return Path(found.stdout.strip()).resolve()


@functools.cache
def find_uv() -> Path:
    """The program ``uv``, that of this environment before others. Raises ``ConfigError``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (found := shutil.which("uv", path=path)) is None:
        raise ConfigError("uv is not installed, which environments are made with; get it with: pip install uv")
    return Path(found).resolve()


class InstanceSandbox(NamedTuple):
    """Runs programs as root in a container would; a ``Box``. ``interpreter``: the program of its Python.

    ``layer`` holds ``PARTS``; with an overlay, which is mounted in a namespace that ends with the sandbox, it is empty
    until then. ``tmp`` is ``/tmp``. ``network``: for the tests.
    """

    interpreter: Path
    exclude_newer: str
    layer: Path
    tmp: Path
    overlay: Overlay | None = None
    network: bool = False
    limits: SandboxLimits = LIMITS

    async def run(
        self, command: Sequence[str], *, timeout: float, given: bytes | None = None, tests: bool = False
    ) -> Ended:
        """Run in a sandbox that ends with the command and kills all of its processes."""
        wrapped = self.wrap(command, network=tests and self.network)
        return await run(wrapped, timeout=timeout, given=given, limits=self.limits)

    def wrap(
        self,
        program: Sequence[str],
        *,
        network: bool,
        setup: bool = False,
        shown: Mapping[str, Path] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> list[str]:
        """The command line that runs ``program``, in ``/testbed`` if that exists.

        ``setup``: with the user's settings of the package index. ``shown``: what is seen of the host, by the names
        inside.
        """
        parts = {inside: self.layer / name for name, inside in PARTS.items()}
        parts = {inside: host for inside, host in parts.items() if self.overlay or host.exists()}
        prefixes = {os.path.realpath(prefix): OF_A_PREFIX for prefix in (self.interpreter.parents[1], sys.base_prefix)}
        host = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        targets = {f"{CONDA}/shims/{name}": "../shim/programs.sh" for name in PROGRAMS}
        targets |= {f"{CONDA}/host-python": host, f"{CONDA}/envs": "/conda/envs"}
        tools = {f"{CONDA}/bin/activate": _SHIM / "activate.sh", f"{CONDA}/shim": _SHIM, f"{CONDA}/bin/uv": find_uv()}
        settings = {**self._variables(network, setup), **(variables or {})}
        if setup:
            links = f"{settings.get('PIP_FIND_LINKS', '')} {settings.get('UV_FIND_LINKS', '')}".split()
            tools |= {inside: Path(name).expanduser() for name, inside in _INDEX_FILES.items()}
            tools |= {name: Path(name) for name in links if name[0] == "/"}
        tools |= shown or {}
        mounts = ["--bind", str(self.tmp), "/tmp"]
        mounts += [word for inside, host in parts.items() for word in ("--bind", str(host), inside)]
        mounts += prefix_mounts(prefixes)
        mounts += [word for inside, host in tools.items() for word in ("--ro-bind-try", str(host), inside)]
        mounts += [word for inside, target in targets.items() for word in ("--symlink", target, inside)]
        return [
            *(self.overlay.mounting() if self.overlay else ()),
            *sandboxed(
                limited(self.limits, program),
                mounts,
                root=[*empty_root(_ROOT_SIZE), *program_mounts(), *settings_mounts()],
                network=network,
                options=_OF_ROOT,
                variables=settings,
                folder="/testbed" if "/testbed" in parts else "/",
            ),
        ]

    def _variables(self, network: bool, setup: bool) -> dict[str, str]:
        wanted = re.compile("|".join([_OF_NETWORK] * network + [_OF_INDEX] * setup) or "-", re.IGNORECASE)
        named = {name: value for name, value in os.environ.items() if wanted.fullmatch(name)}
        return {
            # Tests have no login, also not that of a proxy.
            **{name: value for name, value in named.items() if setup or "@" not in value},
            "HOME": "/root",
            "PATH": f"{CONDA}/bin:{_SYSTEM_PATH}",
            "TZ": "Etc/UTC",
            "DEBIAN_FRONTEND": "noninteractive",
            "SHIM_UV": f"{CONDA}/bin/uv",
            "SHIM_PYTHON": str(self.interpreter),
            "UV_LINK_MODE": "hardlink" if network else "copy",
            "UV_INDEX_STRATEGY": "unsafe-best-match",
            "UV_SYSTEM_CERTS": "1",
            "UV_NO_PROGRESS": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_CACHE_DIR": "/conda/uv",
            **({"UV_EXCLUDE_NEWER": self.exclude_newer} if self.exclude_newer else {}),
            **({} if network else {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1"}),
            **git_settings({"safe.directory": "*", "protocol.file.allow": "always", "gc.auto": "0"}),
        }


def shim_digest() -> str:
    """Changes when an environment might be made in another way."""
    files = [path for path in sorted(_SHIM.iterdir()) if path.suffix in (".py", ".sh")]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:12]


async def remove(folder: Path) -> None:
    """Delete a folder recursively, whatever its modes."""
    await asyncio.shield(asyncio.to_thread(remove_tree, folder))


async def copy_tree(source: Path, target: Path, how: str = "--reflink=auto") -> None:
    """Copy a folder with modes, times and links: by reference where the file system can, or by hard links
    (``--link``)."""
    await checked(["cp", "-a", how, "--", str(source), str(target)], f"copy {source.name}")


SETUP_TIME = 3600.0
"""Seconds that an environment, or a repository's installation, may take."""

BRANCH = "main"
ORIGIN_INSIDE = "/var/lib/repository/origin.git"
_LAYOUT = "4"
"""Increased when older layers become unusable."""

_CLONE = re.compile(r"\bgit clone\b(?:.*--branch (\S+))?.*?(https://\S+)")
# The clone is one pack already; to pack it again takes minutes.
_PACKING = re.compile(r"^git gc\b.*$", re.MULTILINE)


class LocalBackend(BoxBackend):
    """Sets instances up once, keeps them in ``cache``, and grades on what is thrown away afterwards.

    ``mirror``: a folder of git directories, named ``owner/name.git``; left out, repositories are cloned from GitHub.
    Those of made tasks are made from what their rows name. ``network`` is for the tests; set-up always has it.
    """

    def __init__(
        self,
        *,
        cache: Path | None = None,
        mirror: Path | None = None,
        guard: RewardHackGuard | None = None,
        network: bool = False,
    ) -> None:
        self._cache = (cache or default_cache()).expanduser().absolute()
        self._mirror = mirror
        super().__init__(guard, network=network)

    async def check(self) -> None:
        """Raise ``ConfigError`` without bubblewrap or uv. Removes leftovers of killed processes."""
        await asyncio.to_thread(find_bubblewrap, *AS_ROOT, otherwise=", or use --backend docker")
        find_uv()
        for left in self._runs().iterdir():
            if not Path("/proc", left.name.partition("-")[0]).exists():
                await remove(left)

    async def recipe(self, instance: Instance) -> Recipe:
        """As in ``BoxBackend``; requirement files are read from the repository."""

        def read_file(repo: str, commit: str, path: str) -> str | None:
            source = self._source(repo, commit)
            try:
                return source.read("cat-file", "blob", f"{commit}:{path}").decode()
            except ConfigError:
                return None

        return await asyncio.to_thread(recipe_of, instance, read_file)

    def _source(self, repo: str, commit: str) -> Source:
        mirrored = self._mirror and str(self._mirror / f"{repo}.git")
        return find_source(mirrored or f"https://github.com/{repo}.git", commit, self._cache)

    def repository(self, instance: Instance) -> Path:
        """A git directory that holds the instance's base commit. Raises ``InfrastructureError``, ``ConfigError``."""
        return task_repository(instance, self._cache) or self._source(instance.repo, instance.base_commit).place

    async def prepare(self, instance: Instance) -> Path:
        """The layer of the instance, made if missing. Raises ``InfrastructureError`` and ``ConfigError``."""
        layer, _ = await self._layer(instance, await self.recipe(instance))
        return layer

    async def checkout(self, instance: Instance, directory: Path) -> TaskWorkspace:
        """A copy of the installed repository, whose last commit holds what set-up changed, if anything; what an agent
        does is the difference to that. The environment is shown read-only.

        Raises ``InfrastructureError``; ``ConfigError`` for a row without a known recipe.
        """
        layer, python = await self._layer(instance, await self.recipe(instance))
        await copy_tree(layer / "testbed", directory)
        environment = "/conda/envs/testbed"
        # At the last of the mounts the environment looks for the installed project.
        shown = {"/conda/envs": layer / "conda" / "envs", PARTS["testbed"]: directory}
        shown |= {str(part): part for part in installed_parts(python.parents[1])}
        return TaskWorkspace(
            root=directory.parent,
            repository=directory.name,
            mounts=tuple(WorkspaceMount(host=host, inside=inside) for inside, host in shown.items()),
            variables={
                "PATH": f"{environment}/bin:/usr/local/bin:/usr/bin:/bin",
                **dict.fromkeys(("VIRTUAL_ENV", "CONDA_PREFIX"), environment),
                "CONDA_DEFAULT_ENV": "testbed",
            },
        )

    @asynccontextmanager
    async def box(self, instance: Instance, recipe: Recipe) -> AsyncIterator[InstanceSandbox]:
        """The installed repository with changes of its own on top, which are thrown away: an overlay where the kernel
        allows one, else a copy."""
        layer, python = await self._layer(instance, recipe)
        scratch, overlay = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self._runs())), None
        upper, work, merged, tmp = (scratch / name for name in ("upper", "work", "layer", "tmp"))
        try:
            tmp.mkdir(mode=0o700)
            if await asyncio.to_thread(can_overlay, self._runs(), layer, scratch):
                for folder in (upper, work, merged):
                    folder.mkdir()
                overlay = Overlay(layer, upper, work, merged)
            else:
                await copy_tree(layer, merged)
            yield InstanceSandbox(python, recipe.exclude_newer, merged, tmp, overlay, self._network)
        finally:
            await remove(scratch)

    async def _layer(self, instance: Instance, recipe: Recipe) -> tuple[Path, Path]:
        """The layer, made if it is missing, and the path of its Python."""
        if not recipe.environment_script:
            raise ConfigError(
                f"{instance.instance_id}: its row names an image, but not how to install {instance.repo}; "
                "use --backend docker"
            )
        python = await asyncio.to_thread(find_python, recipe.python)
        parts = (_LAYOUT, recipe.environment_script, str(python), recipe.exclude_newer, shim_digest())
        environment = self._cache / "environments" / _digest(*parts)
        key = _digest(environment.name, recipe.install_script, instance.base_commit)
        layer = self._cache / "instances" / f"{instance.instance_id}.{key}"

        async def make_environment(into: Path) -> None:
            for name in ("conda/envs", "root"):
                (into / name).mkdir(parents=True)
            sandbox = InstanceSandbox(python, recipe.exclude_newer, into, into / "tmp")
            await _set_up(sandbox, environment, recipe.environment_script)
            if not (into / "conda/envs/testbed/bin/python").exists():
                raise InfrastructureError(f"the environment's script made no environment; see {_log(environment)}")

        async def make_layer(into: Path) -> None:
            git, origin = await asyncio.to_thread(self.repository, instance), into / "origin.git"
            found = _CLONE.search(recipe.install_script)
            branch, address = (found[1] or BRANCH, found[2]) if found else (BRANCH, "https://github.com/")
            await make_origin(git, instance, origin, branch)
            for name in ("conda", "root"):
                await copy_tree(environment / name, into / name, "--link")
            (into / "testbed").mkdir()
            script = _PACKING.sub(r": \g<0>", recipe.install_script)
            sandbox = InstanceSandbox(python, recipe.exclude_newer, into, into / "tmp")
            await _set_up(sandbox, layer, script, {ORIGIN_INSIDE: origin}, _cloned_instead_of(address))
            await remove(origin)

        if not layer.exists():
            await made(environment, make_environment)
            await made(layer, make_layer)
        return layer, python

    def _runs(self) -> Path:
        (self._cache / "runs").mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._cache / "runs"


async def _set_up(
    sandbox: InstanceSandbox,
    place: Path,
    text: str,
    shown: Mapping[str, Path] | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a set-up script with the network on; its output is stored next to ``place``, which the layer becomes.

    Raises ``InfrastructureError`` with the script's last line.
    """
    file = sandbox.layer / "setup.sh"
    file.write_text(text)
    sandbox.tmp.mkdir()
    files, command = {**(shown or {}), "/setup.sh": file}, ["/bin/bash", "/setup.sh"]
    wrapped = sandbox.wrap(command, network=True, setup=True, shown=files, variables=variables)
    ended = await run(wrapped, timeout=SETUP_TIME, limits=sandbox.limits)
    printed = redact_text(ended.text)
    _log(place).write_text(printed)
    if ended.timed_out or ended.code:
        last = ended._replace(output=printed.encode()).last_line
        reason = f"not done after {ended.seconds:.0f} s" if ended.timed_out else last
        raise InfrastructureError(f"set-up of {place.name}: {reason}; see {_log(place)}")
    await remove(sandbox.tmp)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:22]


def _log(place: Path) -> Path:
    return place.with_name(f"{place.name}.log")


def _cloned_instead_of(address: str) -> dict[str, str]:
    """Variables that make git clone from the origin instead of the script's URL."""
    settings = {"safe.directory": "*", "protocol.file.allow": "always", "advice.detachedHead": "false"}
    # Each setting has one value here, and git prefers the longer URL.
    names = {f"url.{ORIGIN_INSIDE}.insteadOf": address, f"url.{ORIGIN_INSIDE}/.insteadOf": f"{address}.git"}
    return git_settings({**settings, **names})


async def make_origin(git: Path, instance: Instance, origin: Path, branch: str) -> None:
    """Write a git directory with the base commit as ``branch``, its ancestors, and the tags on these.

    Raises ``InfrastructureError``.
    """
    what, commit = f"{instance.repo} at {instance.base_commit[:12]}", instance.base_commit
    make_git_folder(origin, branch)
    listed = git_command(git, "for-each-ref", f"--merged={commit}", "--format=%(objectname) %(refname)", "refs/tags")
    tags = (await checked_git(listed, what)).text.splitlines()
    wanted = "".join(f"{name}\n" for name in (commit, *(line.split()[0] for line in tags)))
    words = ("pack-objects", "--quiet", "--revs", "--delta-base-offset", "--threads=2", f"{OTHER}/objects/pack/pack")
    places = {"GIT_OBJECT_DIRECTORY": f"{OTHER}/objects", "GIT_ALTERNATE_OBJECT_DIRECTORIES": f"{REPOSITORY}/objects"}
    pack = git_command(git, *words, other=origin, variables=places)
    await checked_git(pack, what, wanted.encode())
    refs = sorted([f"{commit} refs/heads/{branch}", *tags], key=lambda line: line.split()[1])
    (origin / "packed-refs").write_text("# pack-refs with: sorted \n" + "".join(f"{line}\n" for line in refs))


_LOOK_AGAIN = 0.1


def default_cache() -> Path:
    """``openhands_rl_plugin/swe`` in the user's folder of caches."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "openhands_rl_plugin" / "swe"


async def made(place: Path, make: Callable[[Path], Awaitable[None]]) -> None:
    """Have ``make`` fill a folder that becomes ``place``, unless that exists.

    Concurrent callers wait. A failed or killed maker leaves only its own folder, which the next one removes.
    """
    if place.exists():
        return
    lock = place.with_name(f"{place.name}.lock")
    lock.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        while True:
            with suppress(BlockingIOError):
                held.enter_context(locked_folder(lock, wait=False))
                break
            await asyncio.sleep(_LOOK_AGAIN)
        if place.exists():
            return
        for left in place.parent.glob(f"{place.name}.making-*"):
            await remove(left)
        with draft_folder(place.parent, f"{place.name}.making-") as making:
            await make(making)
            making.rename(place)


ENVIRONMENT = "/opt/miniconda3/envs/testbed"

_LABEL, _LONGEST_LIFE, _MEMORY = "openhands-rl", "86400", "16g"
_PULL_TIME, _START_TIME, _COPY_TIME = 3600.0, 120.0, 600.0
_LOST = "the container engine was lost during the run"


class DockerBackend(BoxBackend):
    """Grades each patch in a new container, which is always removed.

    ``program``: one with docker's arguments; left out, ``docker``, or ``podman`` where only that is installed.
    """

    def __init__(self, *, program: str = "", guard: RewardHackGuard | None = None, network: bool = False) -> None:
        super().__init__(guard, network=network)
        self._program = program or ("podman" if shutil.which("podman") and not shutil.which("docker") else "docker")

    async def check(self) -> None:
        """Raise ``ConfigError`` without a docker program or a running daemon. Removes what killed processes left."""
        if shutil.which(self._program) is None:
            raise ConfigError(f"{self._program} is not installed; install Docker or podman, or use --backend local")
        asked = await run([self._program, "version", "--format", "{{.Server.Version}}"], timeout=_START_TIME)
        if asked.code or asked.timed_out:
            reason = "it does not answer" if asked.timed_out else asked.last_line
            raise ConfigError(f"no Docker daemon ({reason}); start it, or use --backend local")
        await run([self._program, "container", "prune", "--force", "--filter", f"label={_LABEL}"], timeout=_START_TIME)

    async def recipe(self, instance: Instance) -> Recipe:
        """As in ``BoxBackend``. The image has what requirement files would say."""
        return await asyncio.to_thread(recipe_of, instance, lambda repo, commit, path: "")

    async def checkout(self, instance: Instance, directory: Path) -> TaskWorkspace:
        """Copy repository and environment out of the image. Raises ``InfrastructureError`` and ``ConfigError``."""
        copies = {ENVIRONMENT: directory.with_name(f"{directory.name}.environment"), "/testbed": directory}
        async with self.box(instance, await self.recipe(instance)) as box:
            for inside, host in copies.items():
                copy = [self._program, "cp", "--archive", f"{box.container}:{inside}", str(host)]
                await checked(copy, f"copy {inside} out of the image", timeout=_COPY_TIME)
        return TaskWorkspace(
            root=directory.parent,
            repository=directory.name,
            mounts=tuple(WorkspaceMount(host=host, inside=inside) for inside, host in copies.items()),
            variables={"PATH": f"{ENVIRONMENT}/bin:/usr/local/bin:/usr/bin:/bin", "CONDA_DEFAULT_ENV": "testbed"},
        )

    @asynccontextmanager
    async def box(self, instance: Instance, recipe: Recipe) -> AsyncIterator[DockerBox]:
        """A container of the instance's image, which is pulled if missing. It ends by itself after a day."""
        if (image := recipe.image) is None:
            raise ConfigError(f"{instance.instance_id}: its row names no image; use --backend local")
        name = f"{_LABEL}-{uuid.uuid4().hex}"
        platform = ["--platform", "linux/amd64"] if ".x86_64." in image else []
        if (await run([self._program, "image", "inspect", image], timeout=_START_TIME)).code:
            await checked([self._program, "pull", "--quiet", *platform, image], f"pull {image}", timeout=_PULL_TIME)
        named = ["--detach", "--init", "--name", name, "--label", _LABEL, "--entrypoint", "sleep", *platform]
        bounds = ["--memory", _MEMORY, "--pids-limit", "8192", "--security-opt", "no-new-privileges"]
        net = [] if self._network else ["--network", "none"]
        start = [self._program, "run", *named, *bounds, *net, image, _LONGEST_LIFE]
        try:
            await checked(start, f"start a container of {image}", timeout=_START_TIME)
            yield DockerBox(self._program, name)
        finally:
            await asyncio.shield(run([self._program, "rm", "--force", "--volumes", name], timeout=_START_TIME))


class DockerBox:
    """A started container."""

    def __init__(self, program: str, container: str) -> None:
        self.container = container
        self._program = program

    async def run(
        self, command: Sequence[str], *, timeout: float, given: bytes | None = None, tests: bool = False
    ) -> Ended:
        """``docker exec``. At the time limit the container is stopped: ending the client would not do that.

        Raises ``InfrastructureError`` when the engine or the container is gone. A container that has ended was ended by
        what ran in it.
        """
        # The engine keeps two streams apart, and what is read then is not in the order in which it was written.
        together = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *command)
        words = ("--interactive", "--user", "root", "--workdir", "/testbed", self.container, *together)
        ended = await run([self._program, "exec", *words], timeout=timeout, given=given)
        if ended.timed_out:
            await run([self._program, "kill", self.container], timeout=_START_TIME)
        elif tests or ended.code:
            look = [self._program, "inspect", "--format", "{{.State.Running}}", self.container]
            # An engine that shuts down ends its containers first.
            await checked(look, _LOST, timeout=_START_TIME)
        return ended

"""Instances on this machine without a container engine: environments by uv, sandboxes by bubblewrap.

A layer is a folder with ``PARTS``: an environment that all rows with its Python and requirements share, and on top of a
copy of it an instance with its repository installed. Graded patches write to an overlay, never there.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.files import draft_folder, locked_folder
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.environments.workspace.git import (
    OTHER,
    REPOSITORY,
    checked_git,
    clone_command,
    git_command,
    git_folder,
    git_settings,
    make_git_folder,
)
from openhands_rl_plugin.environments.workspace.processes import run
from openhands_rl_plugin.environments.workspace.sandbox import find_bubblewrap, installed_parts
from openhands_rl_plugin.environments.workspace.task_workspace import WorkspaceMount
from openhands_rl_plugin.evals.swe.backends.sandbox import (
    AS_ROOT,
    PARTS,
    InstanceSandbox,
    Room,
    SandboxBox,
    copy_tree,
    find_python,
    find_uv,
    fresh_room,
    remove,
    shim_digest,
)
from openhands_rl_plugin.evals.swe.grading import BoxBackend
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.recipes import Recipe, recipe_of
from openhands_rl_plugin.evals.swe.types import Checkout, Instance
from openhands_rl_plugin.evals.tasks.source import task_repository

SETUP_TIME = 3600.0
"""Seconds that an environment, or a repository's installation, may take."""

BRANCH = "main"
ORIGIN_INSIDE = "/var/lib/repository/origin.git"
_LAYOUT = "4"
"""Increased when older layers become unusable."""

_COMMIT = """
git() { command git -c core.fileMode=false -c user.name=SWE-bench -c user.email=setup@swebench.config "$@"; }
git diff --quiet HEAD || git commit --quiet --no-verify --all --message=SWE-bench
"""
_CLONE = re.compile(r"\bgit clone\b(?:.*--branch (\S+))?.*?(https://\S+)")
# The clone is one pack already; to pack it again takes minutes.
_PACKING = re.compile(r"^git gc\b.*$", re.MULTILINE)


class LocalBackend(BoxBackend):
    """Sets instances up once, keeps them in ``cache``, and grades on what is thrown away afterwards.

    ``mirror``: a folder of git directories, named ``owner/name.git`` or ``owner__name.git``; left out, repositories are
    cloned from GitHub. Those of made tasks are made from what their rows name. ``network`` is for the tests; set-up
    always has it.
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
        """Raise ``ConfigError`` without bubblewrap, git, patch or uv. Removes leftovers of killed processes."""
        await asyncio.to_thread(find_bubblewrap, *AS_ROOT, otherwise=", or use --backend docker")
        find_uv()
        for program in ("patch", "git"):
            if shutil.which(program) is None:
                raise ConfigError(f"the local back end needs the program {program}")
        for left in self._runs().iterdir():
            if not Path("/proc", left.name.partition("-")[0]).exists():
                await remove(left)

    async def recipe(self, instance: Instance) -> Recipe:
        """As in ``BoxBackend``; requirement files are read from the repository."""

        def read_file(repo: str, commit: str, path: str) -> str | None:
            wanted = instance.model_copy(update={"repo": repo, "base_commit": commit})

            async def read() -> str | None:
                return await file_at(await self.repository(wanted), commit, path)

            return asyncio.run(read())

        return await asyncio.to_thread(recipe_of, instance, read_file)

    async def repository(self, instance: Instance) -> Path:
        """A git directory that holds the instance's base commit. Raises ``InfrastructureError``."""
        if (own := await asyncio.to_thread(task_repository, instance, self._cache)) is not None:
            return own
        folder = (self._mirror or self._cache / "clones").expanduser().resolve()
        url, place = f"https://github.com/{instance.repo}.git", folder / f"{instance.repo.replace('/', '__')}.git"

        async def make(into: Path) -> None:
            await checked_git(clone_command(url, into, "--mirror"), f"clone {url}")

        if self._mirror is None:
            await made(place, make)
        for git in (folder / f"{instance.repo}.git", place):
            if (git / "HEAD").exists() and await has_commit(git, instance.base_commit):
                return git
        raise InfrastructureError(
            f"{instance.instance_id}: no repository {instance.repo} with commit {instance.base_commit[:12]} "
            f"in {folder}; name a --mirror that has it, or delete a clone that is too old"
        )

    async def prepare(self, instance: Instance) -> Path:
        """The layer of the instance, made if missing. Raises ``InfrastructureError`` and ``ConfigError``."""
        layer, _ = await self._layer(instance, await self.recipe(instance))
        return layer

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """A copy of the installed repository, whose last commit holds what set-up changed, if anything; what an agent
        does is the difference to that. The environment is shown read-only.

        Raises ``InfrastructureError``; ``ConfigError`` for a row without a known recipe.
        """
        layer, sandbox = await self._layer(instance, await self.recipe(instance))
        await copy_tree(layer / "testbed", directory)
        await _commit_changes(directory)
        environment = "/conda/envs/testbed"
        # At the last of the mounts the environment looks for the installed project.
        shown = {"/conda/envs": layer / "conda" / "envs", PARTS["testbed"]: directory}
        shown |= {str(part): part for part in installed_parts(sandbox.interpreter.parents[1])}
        return Checkout(
            directory=directory,
            mounts=tuple(WorkspaceMount(host=host, inside=inside) for inside, host in shown.items()),
            variables={
                "PATH": f"{environment}/bin:/usr/local/bin:/usr/bin:/bin",
                **dict.fromkeys(("VIRTUAL_ENV", "CONDA_PREFIX"), environment),
                "CONDA_DEFAULT_ENV": "testbed",
            },
        )

    @asynccontextmanager
    async def box(self, instance: Instance, recipe: Recipe) -> AsyncIterator[SandboxBox]:
        """A layer above the installed repository."""
        layer, sandbox = await self._layer(instance, recipe)
        async with fresh_room(self._runs(), layer) as room:
            yield SandboxBox(sandbox, room, network=self._network)

    async def _layer(self, instance: Instance, recipe: Recipe) -> tuple[Path, InstanceSandbox]:
        if not recipe.environment_script:
            raise ConfigError(
                f"{instance.instance_id}: its row names an image, but not how to install {instance.repo}; "
                "use --backend docker"
            )
        python = await asyncio.to_thread(find_python, recipe.python)
        sandbox = InstanceSandbox(python, recipe.exclude_newer)
        parts = (_LAYOUT, recipe.environment_script, str(python), recipe.exclude_newer, shim_digest())
        environment = self._cache / "environments" / _digest(*parts)
        key = _digest(environment.name, recipe.install_script, instance.base_commit)
        layer = self._cache / "instances" / f"{instance.instance_id}.{key}"

        async def make_environment(into: Path) -> None:
            for name in ("conda/envs", "root"):
                (into / name).mkdir(parents=True)
            await _set_up(sandbox, into, environment, recipe.environment_script)
            if not (into / "conda/envs/testbed/bin/python").exists():
                raise InfrastructureError(f"the environment's script made no environment; see {_log(environment)}")

        async def make_layer(into: Path) -> None:
            git, origin = await self.repository(instance), into / "origin.git"
            found = _CLONE.search(recipe.install_script)
            branch, address = (found[1] or BRANCH, found[2]) if found else (BRANCH, "https://github.com/")
            await make_origin(git, instance, origin, branch)
            for name in ("conda", "root"):
                await copy_tree(environment / name, into / name, "--link")
            (into / "testbed").mkdir()
            script = _PACKING.sub(r": \g<0>", recipe.install_script)
            await _set_up(sandbox, into, layer, script, {ORIGIN_INSIDE: origin}, _cloned_instead_of(address))
            await remove(origin)

        if not layer.exists():
            await made(environment, make_environment)
            await made(layer, make_layer)
        return layer, sandbox

    def _runs(self) -> Path:
        (self._cache / "runs").mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._cache / "runs"


async def _set_up(
    sandbox: InstanceSandbox,
    layer: Path,
    place: Path,
    text: str,
    shown: Mapping[str, Path] | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a set-up script with the network on; its output is stored next to ``place``, which ``layer`` becomes.

    Raises ``InfrastructureError`` with the script's last line.
    """
    file, tmp = layer / "setup.sh", layer / "tmp"
    file.write_text(text)
    tmp.mkdir()
    files = {**(shown or {}), "/setup.sh": file}
    command = ["/bin/bash", "/setup.sh"]
    wrapped = sandbox.wrap(Room(layer, tmp), command, network=True, setup=True, shown=files, variables=variables)
    ended = await run(wrapped, timeout=SETUP_TIME, limits=sandbox.limits)
    printed = redact_text(ended.text)
    _log(place).write_text(printed)
    if ended.timed_out or ended.code:
        last = ended._replace(output=printed.encode()).last_line
        reason = f"not done after {ended.seconds:.0f} s" if ended.timed_out else last
        raise InfrastructureError(f"set-up of {place.name}: {reason}; see {_log(place)}")
    await remove(tmp)


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


async def _commit_changes(directory: Path) -> None:
    """Keep what set-up changed in tracked files as a commit, so that it does not count as the agent's change."""
    git = await asyncio.to_thread(git_folder, directory)
    command = git_command(git, script=_COMMIT, work=directory, writable=True)
    await checked_git(command, f"commit what set-up changed in {directory.name}")


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


async def has_commit(git: Path, commit: str) -> bool:
    """Whether the git directory holds that commit."""
    command = git_command(git, "cat-file", "-e", f"{commit}^{{commit}}")
    return (await run(command.words, variables=command.variables)).code == 0


async def file_at(git: Path, commit: str, path: str) -> str | None:
    """A file's text at a commit, or ``None``."""
    command = git_command(git, "cat-file", "blob", f"{commit}:{path}")
    shown = await run(command.words, variables=command.variables)
    return None if shown.code else shown.text


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

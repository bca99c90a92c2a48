"""Instances on this machine without a container engine: environments by uv, sandboxes by bubblewrap.

A layer is a folder with ``PARTS``: an environment that all rows with its Python and requirements share, and on top of a
copy of it an instance with its repository installed. Graded patches write to an overlay, never there.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.environments.workspace.git import checked_git, git_command, git_folder, git_settings
from openhands_rl_plugin.environments.workspace.processes import run
from openhands_rl_plugin.environments.workspace.sandbox import SandboxLimits, find_bubblewrap, installed_parts
from openhands_rl_plugin.environments.workspace.task_workspace import WorkspaceMount
from openhands_rl_plugin.evals.swe.backends.caching import (
    Cache,
    copy_tree,
    default_cache,
    link_tree,
    remove,
    remove_left,
)
from openhands_rl_plugin.evals.swe.backends.interpreters import Interpreter, find_python, find_uv
from openhands_rl_plugin.evals.swe.backends.package_index import without_logins
from openhands_rl_plugin.evals.swe.backends.repositories import (
    BRANCH,
    ORIGIN_INSIDE,
    CloneSource,
    RepositorySource,
    file_at,
    find_repository,
    make_origin,
)
from openhands_rl_plugin.evals.swe.backends.sandbox import (
    AS_ROOT,
    ENVIRONMENTS,
    PARTS,
    InstanceSandbox,
    Room,
    SandboxBox,
    fresh_room,
    shim_digest,
)
from openhands_rl_plugin.evals.swe.grading import BoxBackend, Guard
from openhands_rl_plugin.evals.swe.recipes.recipe_of import recipe_of
from openhands_rl_plugin.evals.swe.recipes.scripts import Recipe
from openhands_rl_plugin.evals.swe.types import Checkout, Instance

SETUP_TIME = 3600.0
"""Seconds that an environment, or a repository's installation, may take."""

_LAYOUT = "4"
"""Increased when older layers become unusable."""

_COMMIT = """
git() { command git -c core.fileMode=false -c user.name=SWE-bench -c user.email=setup@swebench.config "$@"; }
git diff --quiet HEAD || git commit --quiet --no-verify --all --message=SWE-bench
"""
_CLONED = re.compile(r"\bgit clone\b.*?(https://\S+)")
# The clone is one pack already; to pack it again takes minutes.
_PACKING = re.compile(r"^git gc\b.*$", re.MULTILINE)
_BRANCH = re.compile(r"\bgit clone\b.*--branch (\S+)")


class LocalBackend(BoxBackend):
    """Sets instances up once, keeps them in ``cache``, and grades on what is thrown away afterwards.

    ``sources``: where repositories come from, the first that has the commit; left out, clones from GitHub. ``network``
    is for the tests; set-up always has it.
    """

    name = "local"

    def __init__(
        self,
        *,
        cache: Path | None = None,
        sources: Sequence[RepositorySource] | None = None,
        guard: Guard | None = None,
        limits: SandboxLimits | None = None,
        network: bool = False,
    ) -> None:
        self._cache = Cache(cache or default_cache())
        self._sources = tuple([CloneSource(self._cache)] if sources is None else sources)
        super().__init__(guard, network=network)
        self._limits = limits

    async def check(self) -> None:
        """Raise ``ConfigError`` without bubblewrap, git, patch or uv. Removes leftovers of killed processes."""
        await asyncio.to_thread(find_bubblewrap, *AS_ROOT, otherwise=", or use --backend docker")
        find_uv()
        for program in ("patch", "git"):
            if shutil.which(program) is None:
                raise ConfigError(f"the local back end needs the program {program}")
        await remove_left(self._runs())

    async def recipe(self, instance: Instance) -> Recipe:
        """As in ``BoxBackend``; requirement files are read from the repository."""

        def read_file(repo: str, commit: str, path: str) -> str | None:
            wanted = instance.model_copy(update={"repo": repo, "base_commit": commit})

            async def read() -> str | None:
                return await file_at(await find_repository(wanted, self._sources), commit, path)

            return asyncio.run(read())

        return await asyncio.to_thread(recipe_of, instance, read_file)

    async def prepare(self, instance: Instance) -> Path:
        """The layer of the instance, made if missing. Raises ``InfrastructureError`` and ``ConfigError``."""
        recipe = await self.recipe(instance)
        layer, _, _ = await self._layer(instance, recipe)
        return layer

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """A copy of the installed repository, whose last commit holds what set-up changed, if anything; what an agent
        does is the difference to that. The environment is shown read-only.

        Raises ``InfrastructureError``; ``ConfigError`` for a row without a known recipe.
        """
        recipe = await self.recipe(instance)
        layer, interpreter, _ = await self._layer(instance, recipe)
        await copy_tree(layer / "testbed", directory)
        await _commit_changes(directory)
        environment = f"{ENVIRONMENTS}/testbed"
        return Checkout(
            directory=directory,
            mounts=(
                WorkspaceMount(host=layer / "conda" / "envs", inside=ENVIRONMENTS),
                *(WorkspaceMount(host=part, inside=str(part)) for part in installed_parts(interpreter.prefix)),
                # Where the environment looks for the installed project.
                WorkspaceMount(host=directory, inside=PARTS["testbed"]),
            ),
            variables={
                "PATH": f"{environment}/bin:/usr/local/bin:/usr/bin:/bin",
                "VIRTUAL_ENV": environment,
                "CONDA_PREFIX": environment,
                "CONDA_DEFAULT_ENV": "testbed",
            },
        )

    @asynccontextmanager
    async def box(self, instance: Instance, recipe: Recipe) -> AsyncIterator[SandboxBox]:
        """A layer above the installed repository."""
        layer, _, sandbox = await self._layer(instance, recipe)
        async with fresh_room(self._runs(), layer) as room:
            yield SandboxBox(sandbox, room, network=self._network)

    async def _layer(self, instance: Instance, recipe: Recipe) -> tuple[Path, Interpreter, InstanceSandbox]:
        if not recipe.environment_script:
            raise ConfigError(
                f"{instance.instance_id}: its row names an image, but not how to install {instance.repo}; "
                "use --backend docker"
            )
        interpreter = await asyncio.to_thread(find_python, recipe.python)
        sandbox = InstanceSandbox(interpreter, recipe.exclude_newer, self._limits)
        parts = (_LAYOUT, recipe.environment_script, str(interpreter.program), recipe.exclude_newer, shim_digest())
        environment = self._cache.path("environments", _digest(*parts))
        key = _digest(environment.name, recipe.install_script, instance.base_commit)
        layer = self._cache.path("instances", f"{instance.instance_id}.{key}")

        async def make_environment(into: Path) -> None:
            for name in ("conda/envs", "root"):
                (into / name).mkdir(parents=True)
            await _set_up(sandbox, into, environment, recipe.environment_script)
            if not (into / "conda/envs/testbed/bin/python").exists():
                raise InfrastructureError(f"the environment's script made no environment; see {_log(environment)}")

        async def make_layer(into: Path) -> None:
            git, origin = await find_repository(instance, self._sources), into / "origin.git"
            branch = _BRANCH.search(recipe.install_script)
            await make_origin(git, instance, origin, branch[1] if branch else BRANCH)
            for name in ("conda", "root"):
                await link_tree(environment / name, into / name)
            (into / "testbed").mkdir()
            script = _PACKING.sub(r": \g<0>", recipe.install_script)
            await _set_up(sandbox, into, layer, script, {ORIGIN_INSIDE: origin}, _cloned_from_origin(recipe))
            await remove(origin)

        if not layer.exists():
            await self._cache.made(environment, make_environment)
            await self._cache.made(layer, make_layer)
        return layer, interpreter, sandbox

    def _runs(self) -> Path:
        return self._cache.path("runs", "any").parent


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
    command = sandbox.wrap(
        Room(layer, tmp),
        ["/bin/bash", "/setup.sh"],
        network=True,
        setup=True,
        shown={**(shown or {}), "/setup.sh": file},
        variables=variables,
    )
    ended = await run(command, timeout=SETUP_TIME)
    ended = ended._replace(output=without_logins(ended.output))
    _log(place).write_bytes(ended.output)
    if ended.timed_out or ended.code:
        reason = f"not done after {ended.seconds:.0f} s" if ended.timed_out else ended.last_line
        raise InfrastructureError(f"set-up of {place.name}: {reason}; see {_log(place)}")
    await remove(tmp)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:22]


def _log(place: Path) -> Path:
    return place.with_name(f"{place.name}.log")


def _cloned_from_origin(recipe: Recipe) -> dict[str, str]:
    """Variables that make git clone from the origin instead of the script's URL."""
    match = _CLONED.search(recipe.install_script)
    address = match[1] if match else "https://github.com/"
    settings = {"safe.directory": "*", "protocol.file.allow": "always", "advice.detachedHead": "false"}
    # Each setting has one value here, and git prefers the longer URL.
    names = [(f"url.{ORIGIN_INSIDE}.insteadOf", address), (f"url.{ORIGIN_INSIDE}/.insteadOf", f"{address}.git")]
    return git_settings({**settings, **dict(names)})


async def _commit_changes(directory: Path) -> None:
    """Keep what set-up changed in tracked files as a commit, so that it does not count as the agent's change."""
    git = await asyncio.to_thread(git_folder, directory)
    command = git_command(git, script=_COMMIT, work=directory, writable=True)
    await checked_git(command, f"commit what set-up changed in {directory.name}")

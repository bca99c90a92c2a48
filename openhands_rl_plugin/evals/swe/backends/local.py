"""Instances on this machine without a container engine: environments by uv, sandboxes by bubblewrap.

A layer is a folder with ``PARTS``: an environment that all rows with its Python and requirements share, and on top of a
copy of it an instance with its repository installed. Graded patches write to an overlay, never there.

Golds of ``requests`` (SWE-bench) need httpbin and addresses that never answer: ``services_of`` makes both.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.environments.workspace.bubblewrap import Overlay, can_overlay
from openhands_rl_plugin.environments.workspace.processes import Ended, Prelude, checked, run
from openhands_rl_plugin.environments.workspace.visible import installed_parts
from openhands_rl_plugin.evals.swe.backends.caching import Cache, copy_tree, default_cache, link_tree, remove
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
    CONDA,
    ENVIRONMENTS,
    GUARD,
    GUARD_OUT,
    PARTS,
    InstanceLimits,
    InstanceSandbox,
    Room,
    Shown,
    check_bubblewrap,
    git_settings,
    make_guard_folders,
    read_left,
    shim_digest,
)
from openhands_rl_plugin.evals.swe.grading import (
    PATCH_INSIDE,
    SCRIPT_INSIDE,
    Guard,
    GuardEquipment,
    NoGuard,
    evaluate,
    grade_and_log,
)
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.recipes.recipe_of import recipe_of
from openhands_rl_plugin.evals.swe.types import Checkout, Instance, Mount, PatchVerdict

NEEDED_CAPABILITIES = ("NET_ADMIN",)
"""Over the sandbox's own network, until the tests begin."""

_HTTPBIN = ("httpbin==0.10.2", "flask<3.1", "werkzeug<3.1")
_INSIDE = "/opt/httpbin"
_HOSTS = "127.0.0.1 localhost httpbin.org\n::1 localhost\n"


class TestServices:
    """The services of one recipe; without any, commands are left as they are."""

    __test__ = False  # no test class for pytest

    def __init__(self, recipe: Recipe, httpbin: Path | None, hosts: Path) -> None:
        self._addresses = recipe.unreachable
        self._httpbin = httpbin
        self._hosts = hosts

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._addresses or self._httpbin)

    @property
    def shown(self) -> list[Shown]:
        """The files that the sandbox has to show."""
        return [] if self._httpbin is None else [Shown(self._httpbin, _INSIDE), Shown(self._hosts, "/etc/hosts")]

    def around(self, command: Sequence[str]) -> list[str]:
        """The command that runs another beside the services."""
        if not self.any:
            return list(command)
        given = [",".join(self._addresses), _INSIDE if self._httpbin else ""]
        return [f"{CONDA}/host-python", "-IS", f"{CONDA}/shim/network.py", *given, *command]


async def services_of(cache: Cache, recipe: Recipe) -> TestServices:
    """The services of a recipe, installed where they are missing. Raises ``InfrastructureError``."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = cache.path("services", f"{_HTTPBIN[0]}-python{version}")

    async def make(into: Path) -> None:
        (into / "hosts").write_text(_HOSTS)
        install = [str(find_uv()), "pip", "install", "--quiet", "--python", sys.executable]
        await checked([*install, "--target", str(into / "httpbin"), *_HTTPBIN], "install httpbin", timeout=600)

    if not recipe.httpbin:
        return TestServices(recipe, None, place / "hosts")
    await cache.made(place, make)
    return TestServices(recipe, place / "httpbin", place / "hosts")


SETUP_TIME = 3600.0
"""Seconds that an environment, or a repository's installation, may take."""

_LAYOUT = "4"
"""Increased when older layers become unusable."""

_CLONED = re.compile(r"\bgit clone\b.*?(https://\S+)")
# The clone is one pack already; to pack it again takes minutes.
_PACKING = re.compile(r"^git gc\b.*$", re.MULTILINE)
_BRANCH = re.compile(r"\bgit clone\b.*--branch (\S+)")


class LocalBackend:
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
        limits: InstanceLimits | None = None,
        network: bool = False,
    ) -> None:
        self._cache = Cache(cache or default_cache())
        self._sources = (CloneSource(self._cache),) if sources is None else tuple(sources)
        self._guard = guard or NoGuard()
        self._limits = limits
        self._network = network

    async def check(self) -> None:
        """Raise ``ConfigError`` without bubblewrap, git, patch or uv. Removes leftovers of killed processes."""
        await asyncio.to_thread(check_bubblewrap)
        find_uv()
        for program in ("git", "patch", "prlimit"):
            try:
                await checked([program, "--version"], program, timeout=20)
            except InfrastructureError as error:
                raise ConfigError(f"the local back end needs the program {program}: {error}") from error
        for left in self._runs().iterdir():
            if not Path("/proc", left.name.partition("-")[0]).exists():
                await remove(left)

    async def prepare(self, instance: Instance) -> Path:
        """The layer of the instance, made if missing. Raises ``InfrastructureError`` and ``ConfigError``."""
        recipe = await self._recipe(instance)
        layer, _, _ = await self._layer(instance, recipe)
        return layer

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """A copy of the installed repository, whose last commit holds what set-up changed, if anything; what an agent
        does is the difference to that. The environment is shown read-only.

        Raises ``InfrastructureError``; ``ConfigError`` for a row without a known recipe.
        """
        recipe = await self._recipe(instance)
        layer, interpreter, _ = await self._layer(instance, recipe)
        await copy_tree(layer / "testbed", directory)
        await _commit_changes(directory)
        environment = f"{ENVIRONMENTS}/testbed"
        return Checkout(
            directory=directory,
            mounts=(
                Mount(host=layer / "conda" / "envs", inside=ENVIRONMENTS),
                *(Mount(host=part, inside=str(part)) for part in installed_parts(interpreter.prefix)),
                # Where the environment looks for the installed project.
                Mount(host=directory, inside=PARTS["testbed"]),
            ),
            variables={
                "PATH": f"{environment}/bin:/usr/local/bin:/usr/bin:/bin",
                "VIRTUAL_ENV": environment,
                "CONDA_PREFIX": environment,
                "CONDA_DEFAULT_ENV": "testbed",
            },
        )

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """The verdict on ``patch``; ``logs`` is the instance's folder. Never raises for what a patch does."""
        written = InstanceLogs(logs)

        async def grade() -> PatchVerdict:
            recipe = await self._recipe(instance)
            written.write_script(recipe.evaluation_script)
            layer, _, sandbox = await self._layer(instance, recipe)
            services = None if self._network else await services_of(self._cache, recipe)
            async with self._box(layer, sandbox, self._guard.equipment(instance), services) as box:
                return await evaluate(box, instance, recipe, patch, written, timeout=timeout, guard=self._guard)

        return await grade_and_log(instance, patch, written, grade)

    async def close(self) -> None:
        """Nothing to release; the cache stays."""

    async def _recipe(self, instance: Instance) -> Recipe:
        def read_file(repo: str, commit: str, path: str) -> str | None:
            wanted = instance.model_copy(update={"repo": repo, "base_commit": commit})
            return asyncio.run_coroutine_threadsafe(self._read(wanted, path), loop).result()

        loop = asyncio.get_running_loop()
        return await asyncio.to_thread(recipe_of, instance, read_file)

    async def _read(self, instance: Instance, path: str) -> str | None:
        return await file_at(await find_repository(instance, self._sources), instance.base_commit, path)

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
            await _set_up(sandbox, into, layer, script, [Shown(origin, ORIGIN_INSIDE)], _cloned_from_origin(recipe))
            await remove(origin)

        if not layer.exists():
            await self._cache.made(environment, make_environment)
            await self._cache.made(layer, make_layer)
        return layer, interpreter, sandbox

    def _runs(self) -> Path:
        return self._cache.path("runs", "any").parent

    @asynccontextmanager
    async def _box(
        self, layer: Path, sandbox: InstanceSandbox, equipment: GuardEquipment, services: TestServices | None
    ) -> AsyncIterator[LocalBox]:
        scratch = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self._runs()))
        try:
            room = await _open(layer, equipment, scratch)
            yield LocalBox(sandbox, room, equipment, scratch, services)
        finally:
            await remove(scratch)


class LocalBox:
    """A layer with changes of its own on top, in ``scratch``. Without ``services`` the tests have the network."""

    def __init__(
        self,
        sandbox: InstanceSandbox,
        room: Room,
        equipment: GuardEquipment,
        scratch: Path,
        services: TestServices | None,
    ) -> None:
        self._sandbox = sandbox
        self._room = room
        self._variables = equipment.variables
        self._script = scratch / "eval.sh"
        self._scratch = scratch
        self._shown = [Shown(scratch / "guard", GUARD), Shown(scratch / "out", GUARD_OUT, writable=True)]
        self._services = services

    async def put(self, inside: str, text: str) -> None:
        """Write the patch or the script; the script is shown read-only."""
        place = {PATCH_INSIDE: self._room.tmp / "patch.diff", SCRIPT_INSIDE: self._script}[inside]
        await asyncio.to_thread(place.write_bytes, text.encode())

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        given: bytes | None = None,
        tests: bool = False,
        prelude: Prelude | None = None,
    ) -> Ended:
        """Run in a sandbox that ends with the command and kills all of its processes."""
        if not tests:
            return await run(self._sandbox.wrap(self._room, command, network=False), timeout=timeout, given=given)
        shown = [*self._shown, Shown(self._script, SCRIPT_INSIDE)]
        services = self._services
        wrapped = self._sandbox.wrap(
            self._room,
            services.around(command) if services else command,
            network=services is None,
            shown=[*shown, *services.shown] if services else shown,
            variables=self._variables,
            capabilities=NEEDED_CAPABILITIES if services and services.any else (),
        )
        return await run(wrapped, timeout=timeout, given=given, prelude=prelude)

    async def left(self) -> Mapping[str, bytes]:
        """Regular files in the guard's folder, without too large ones."""
        return read_left(self._scratch)


async def _open(layer: Path, equipment: GuardEquipment, scratch: Path) -> Room:
    make_guard_folders(scratch, equipment)
    (scratch / "tmp").mkdir(mode=0o700)
    (scratch / "eval.sh").touch()
    upper, work, merged = (scratch / name for name in ("upper", "work", "layer"))
    merged.mkdir()
    if await asyncio.to_thread(can_overlay, scratch.parent):
        upper.mkdir()
        work.mkdir()
        return Room(merged, scratch / "tmp", Overlay(layer, upper, work, merged))
    for name in PARTS:
        await copy_tree(layer / name, merged / name)
    return Room(merged, scratch / "tmp")


async def _set_up(
    sandbox: InstanceSandbox,
    layer: Path,
    place: Path,
    text: str,
    shown: Sequence[Shown] = (),
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
        shown=[*shown, Shown(file, "/setup.sh")],
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
    git = ["git", "-C", str(directory), "-c", "core.fileMode=false", "-c", "core.hooksPath=/dev/null"]
    who = ["-c", "user.name=SWE-bench", "-c", "user.email=setup@swebench.config", "-c", "gc.auto=0"]
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/nonexistent",
        **git_settings({"safe.directory": "*"}),
    }
    changed = await run([*git, "diff", "--quiet", "HEAD"], variables=variables)
    if changed.code:
        commit = [*git, *who, "commit", "--quiet", "--no-verify", "--all", "--message=SWE-bench"]
        await checked(commit, f"commit what set-up changed in {directory.name}", variables=variables)

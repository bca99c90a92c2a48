"""Cached layers: an environment for all instances that share it, and on top of it an instance with its repository
installed. Both are plain folders with ``PARTS`` in them; graded patches never write there.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.environments.workspace.processes import run
from openhands_rl_plugin.evals.swe.backends.caching import Cache, link_tree, remove
from openhands_rl_plugin.evals.swe.backends.interpreters import Interpreter
from openhands_rl_plugin.evals.swe.backends.package_index import without_logins
from openhands_rl_plugin.evals.swe.backends.repositories import (
    BRANCH,
    ORIGIN_INSIDE,
    STORE_INSIDE,
    RepositorySource,
    find_repository,
    make_origin,
)
from openhands_rl_plugin.evals.swe.backends.sandbox import InstanceSandbox, Room, Shown, git_settings, shim_digest
from openhands_rl_plugin.evals.swe.backends.uv_cache import shared_folder
from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.types import Instance

SETUP_TIME = 3600.0
"""Seconds that an environment, or a repository's installation, may take."""

_LAYOUT = "3"
"""Increased when older layers become unusable."""

_CLONED = re.compile(r"\bgit clone\b.*?(https://\S+)")
# The clone borrows all its objects; their later replacements are packed already.
_PACKING = re.compile(r"^git gc\b.*$", re.MULTILINE)
_BRANCH = re.compile(r"\bgit clone\b.*--branch (\S+)")


class Layers:
    """Makes layers, or finds them in the cache."""

    def __init__(self, cache: Cache, sources: Sequence[RepositorySource]) -> None:
        self._cache = cache
        self._sources = tuple(sources)

    async def environment(self, recipe: Recipe, interpreter: Interpreter, sandbox: InstanceSandbox) -> Path:
        """The environment of a recipe. Raises ``InfrastructureError`` with the script's last line."""
        place = self._cache.path("environments", environment_key(recipe, interpreter))

        async def make(into: Path) -> None:
            for name in ("conda", "root"):
                (into / name).mkdir()
            await self._script(sandbox, into, place, recipe.environment_script, "setup_env.sh")
            if not (into / "conda" / "testbed" / "bin" / "python").exists():
                raise InfrastructureError(f"the environment's script made no environment; see {_log(place)}")

        await self._cache.made(place, make, within=self._building())
        return place

    async def instance(
        self, instance: Instance, recipe: Recipe, interpreter: Interpreter, sandbox: InstanceSandbox
    ) -> Path:
        """The environment with the instance's repository installed. Raises ``InfrastructureError``."""
        key = _digest(environment_key(recipe, interpreter), recipe.install_script, instance.base_commit)
        place = self._cache.path("instances", f"{instance.instance_id}.{key}")
        if place.exists():
            return place
        environment = await self.environment(recipe, interpreter, sandbox)

        async def make(into: Path) -> None:
            git = await find_repository(instance, self._sources)
            branch = _BRANCH.search(recipe.install_script)
            await asyncio.gather(
                make_origin(self._cache, git, instance, into, [branch[1]] if branch else [BRANCH]),
                *(link_tree(environment / name, into / name) for name in ("conda", "root")),
            )
            (into / "testbed").mkdir()
            origin = [Shown(into / "origin.git", ORIGIN_INSIDE), Shown(into / "store.git", STORE_INSIDE)]
            script = _PACKING.sub(r": \g<0>", recipe.install_script)
            await self._script(sandbox, into, place, script, "setup_repo.sh", origin, _cloned_from_origin(recipe))
            _own_objects(into)
            await remove(into / "origin.git")
            await remove(into / "store.git")

        await self._cache.made(place, make, within=self._building())
        return place

    def _building(self) -> Path:
        """Layers are made inside uv's cache, because uv links files, which takes no time and no space, only within
        one mount. What changes an environment replaces files, and graded patches never write there.
        """
        return self._cache.path("uv", "building", "any").parent

    async def _script(
        self,
        sandbox: InstanceSandbox,
        layer: Path,
        place: Path,
        text: str,
        name: str,
        shown: Sequence[Shown] = (),
        variables: dict[str, str] | None = None,
    ) -> None:
        """Run one of the set-up scripts with the network on; its output is stored next to the layer."""
        file, tmp, own = layer / name, layer / "tmp", layer / "uv"
        file.write_text(text)
        tmp.mkdir()
        sandbox.make_own(own)
        command = sandbox.wrap(
            Room(layer, tmp, shared_folder(self._cache), own),
            ["/bin/bash", f"/{name}"],
            network=True,
            setup=True,
            shown=[*shown, Shown(file, f"/{name}")],
            variables=variables,
        )
        ended = await run(command, timeout=SETUP_TIME)
        ended = ended._replace(output=without_logins(ended.output))
        _log(place).write_bytes(ended.output)
        if ended.timed_out or ended.code:
            reason = f"not done after {ended.seconds:.0f} s" if ended.timed_out else ended.last_line
            raise InfrastructureError(f"{name} of {place.name}: {reason}; see {_log(place)}")
        await remove(tmp)
        await remove(own)


def environment_key(recipe: Recipe, interpreter: Interpreter) -> str:
    """The name of a recipe's environment: the same for all instances that share it."""
    parts = (_LAYOUT, recipe.environment_script, str(interpreter.program), recipe.exclude_newer, shim_digest())
    return _digest(*parts)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:22]


def _log(place: Path) -> Path:
    return place.with_name(f"{place.name}.log")


def _cloned_from_origin(recipe: Recipe) -> dict[str, str]:
    """Variables that make git clone from the origin instead of the script's URL."""
    match = _CLONED.search(recipe.install_script)
    address = match[1] if match else "https://github.com/"
    settings = {
        "safe.directory": "*",
        "protocol.file.allow": "always",
        "advice.detachedHead": "false",
    }
    # Each setting has one value here, and git prefers the longer URL.
    names = [(f"url.{ORIGIN_INSIDE}.insteadOf", address), (f"url.{ORIGIN_INSIDE}/.insteadOf", f"{address}.git")]
    return git_settings({**settings, **dict(names)})


def _own_objects(layer: Path) -> None:
    """Move the borrowed objects into the clone: the store is not mounted later."""
    objects = layer / "testbed" / ".git" / "objects"
    for file in (layer / "store.git" / "objects" / "pack").iterdir():
        shutil.move(file, objects / "pack" / file.name)
    (objects / "info" / "alternates").unlink(missing_ok=True)

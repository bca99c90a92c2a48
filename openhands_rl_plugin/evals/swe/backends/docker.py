"""Instances in the official images of SWE-bench and SWE-Gym, through the ``docker`` or the ``podman`` program.

Scripts, markers and verdicts are those of the local back end; only the ``Box`` differs.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.processes import Ended, checked, run
from openhands_rl_plugin.environments.workspace.task_workspace import WorkspaceMount
from openhands_rl_plugin.evals.swe.grading import BoxBackend
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.recipes import Recipe, recipe_of
from openhands_rl_plugin.evals.swe.types import Checkout, Instance

ENVIRONMENT = "/opt/miniconda3/envs/testbed"

_LABEL, _LONGEST_LIFE = "openhands-rl", "86400"
_SHUTTING_DOWN = 2.0
_PULL_TIME, _START_TIME, _COPY_TIME = 3600.0, 120.0, 600.0
_LOST = "the container engine was lost during the run"


class DockerBackend(BoxBackend):
    """Grades each patch in a new container, which is always removed.

    ``program``: one with docker's arguments; left out, ``docker``, or ``podman`` where only that is installed.
    """

    def __init__(
        self, *, program: str = "", guard: RewardHackGuard | None = None, network: bool = False, memory: str = "16g"
    ) -> None:
        super().__init__(guard, network=network)
        self._program = program or ("podman" if shutil.which("podman") and not shutil.which("docker") else "docker")
        self._memory = memory

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

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """Copy repository and environment out of the image. Raises ``InfrastructureError`` and ``ConfigError``."""
        copies = {ENVIRONMENT: directory.with_name(f"{directory.name}.environment"), "/testbed": directory}
        async with self.box(instance, await self.recipe(instance)) as box:
            for inside, host in copies.items():
                copy = [self._program, "cp", "--archive", f"{box.container}:{inside}", str(host)]
                await checked(copy, f"copy {inside} out of the image", timeout=_COPY_TIME)
        return Checkout(
            directory=directory,
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
        bounds = ["--memory", self._memory, "--pids-limit", "8192", "--security-opt", "no-new-privileges"]
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
            state = await checked(look, _LOST, timeout=_START_TIME)
            if "true" not in state.text:
                # An engine that is shutting down ends its containers, and answers for a moment.
                await asyncio.sleep(_SHUTTING_DOWN)
                await checked(look, _LOST, timeout=_START_TIME)
        return ended

"""Instances in the official images of SWE-bench and SWE-Gym, through the ``docker`` program.

Scripts, markers and verdicts are those of the local back end; only the ``Box`` differs.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments.workspace.processes import Ended, checked, run
from openhands_rl_plugin.environments.workspace.task_workspace import WorkspaceMount
from openhands_rl_plugin.evals.swe.backends.backend import BoxBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.grading import Guard
from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.types import Checkout, Instance

ENVIRONMENT = "/opt/miniconda3/envs/testbed"

_LABEL, _LONGEST_LIFE = "openhands-rl", 86400
_SHUTTING_DOWN = 2.0
_PULL_TIME, _START_TIME, _COPY_TIME = 3600.0, 120.0, 600.0


class DockerBackend(BoxBackend):
    """Grades each patch in a new container, which is always removed.

    ``mirror``: a folder of git directories with the requirement files of recipes. ``program``: one with docker's
    arguments; left out, ``docker``, or ``podman`` where only that is installed.
    """

    name = "docker"

    def __init__(
        self,
        *,
        program: str = "",
        mirror: Path | None = None,
        guard: Guard | None = None,
        network: bool = False,
        memory: str = "16g",
    ) -> None:
        self._program = program or ("podman" if shutil.which("podman") and not shutil.which("docker") else "docker")
        super().__init__([MirrorSource(mirror)] if mirror else [], guard, network=network)
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

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """Copy repository and environment out of the image. Raises ``InfrastructureError`` and ``ConfigError``."""
        image = await self._image(image_of(instance, await self.recipe(instance)))
        checkout = checkout_of(directory)
        async with self._container(image) as container:
            for mount in checkout.mounts:
                copy = [self._program, "cp", "--archive", f"{container}:{mount.inside}", str(mount.host)]
                await checked(copy, f"copy {mount.inside} out of {image}", timeout=_COPY_TIME)
        return checkout

    @asynccontextmanager
    async def box(self, instance: Instance, recipe: Recipe) -> AsyncIterator[DockerBox]:
        """A container of the instance's image, which is pulled if missing."""
        async with self._container(await self._image(image_of(instance, recipe))) as container:
            yield DockerBox(self._program, container)

    async def _image(self, image: str) -> str:
        """The image's name, after it was pulled if missing."""
        if (await run([self._program, "image", "inspect", image], timeout=_START_TIME)).code:
            pull = [self._program, "pull", "--quiet", "--platform", platform_of(image), image]
            await checked(pull, f"pull {image}", timeout=_PULL_TIME)
        return image

    @asynccontextmanager
    async def _container(self, image: str) -> AsyncIterator[str]:
        name = f"{_LABEL}-{uuid.uuid4().hex}"
        command = start_command(self._program, name, image, network=self._network, memory=self._memory)
        try:
            await checked(command, f"start a container of {image}", timeout=_START_TIME)
            yield name
        finally:
            await asyncio.shield(run([self._program, "rm", "--force", "--volumes", name], timeout=_START_TIME))


class DockerBox:
    """A started container."""

    def __init__(self, program: str, container: str) -> None:
        self._program = program
        self._container = container

    async def put(self, inside: str, text: str) -> None:
        """Copy a file into the container."""
        await copy_in(self._program, self._container, inside, text)

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        given: bytes | None = None,
        tests: bool = False,
    ) -> Ended:
        """``docker exec``. At the time limit the container is stopped: ending the client would not do that.

        Raises ``InfrastructureError`` when the engine or the container is gone. A container that has ended was ended by
        what ran in it.
        """
        # The engine keeps two streams apart, and what is read then is not in the order in which it was written.
        together = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *command]
        command = exec_command(self._program, self._container, together)
        ended = await run(command, timeout=timeout, given=given)
        if ended.timed_out:
            await run([self._program, "kill", self._container], timeout=_START_TIME)
        elif tests or ended.code:
            look = [self._program, "inspect", "--format", "{{.State.Running}}", self._container]
            state = await checked(look, "the container engine was lost during the run", timeout=_START_TIME)
            if "true" not in state.text:
                # An engine that is shutting down ends its containers, and answers for a moment.
                await asyncio.sleep(_SHUTTING_DOWN)
                await checked(look, "the container engine was lost during the run", timeout=_START_TIME)
        return ended


def start_command(program: str, name: str, image: str, *, network: bool, memory: str) -> list[str]:
    """The command that starts an idle container, which ends by itself after a day."""
    bounds = ["--memory", memory, "--pids-limit", "8192", "--security-opt", "no-new-privileges"]
    net = [] if network else ["--network", "none"]
    place = ["--platform", platform_of(image), "--workdir", "/testbed", "--entrypoint", "sleep"]
    named = ["--init", "--name", name, "--label", _LABEL]
    return [program, "run", "--detach", *named, *place, *net, *bounds, image, str(_LONGEST_LIFE)]


def exec_command(program: str, container: str, command: Sequence[str]) -> list[str]:
    """The command that runs another in a container as the official tools do, with stdin."""
    return [program, "exec", "--interactive", "--user", "root", "--workdir", "/testbed", container, *command]


def platform_of(image: str) -> str:
    """The platform in an official image's name; this machine's for another."""
    machine = platform.machine()
    if ".x86_64." in image or (".arm64." not in image and machine not in ("aarch64", "arm64")):
        return "linux/amd64"
    return "linux/arm64"


async def copy_in(program: str, container: str, inside: str, text: str) -> None:
    """Write a file in a container. Raises ``InfrastructureError``."""
    command = exec_command(program, container, ["/bin/sh", "-c", 'cat >"$0"', inside])
    await checked(command, f"copy {inside} in", timeout=_COPY_TIME, given=text.encode())


def image_of(instance: Instance, recipe: Recipe) -> str:
    """The name of the instance's image. Raises ``ConfigError``."""
    if recipe.image is None:
        raise ConfigError(f"{instance.instance_id}: its row names no image; use --backend local")
    return recipe.image


def checkout_of(directory: Path) -> Checkout:
    """A checkout whose two mounts are to be copied out of the image."""
    environment = directory.with_name(f"{directory.name}.environment")
    return Checkout(
        directory=directory,
        mounts=(
            WorkspaceMount(host=environment, inside=ENVIRONMENT),
            WorkspaceMount(host=directory, inside="/testbed"),
        ),
        variables={"PATH": f"{ENVIRONMENT}/bin:/usr/local/bin:/usr/bin:/bin", "CONDA_DEFAULT_ENV": "testbed"},
    )

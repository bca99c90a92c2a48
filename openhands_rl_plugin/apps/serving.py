"""What a policy is made of, found or started: weights, versions of an adapter, a model server as a child process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from openhands_rl_plugin.apps.demo_model import named_model
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.environments.workspace.processes import dying_with_parent
from openhands_rl_plugin.evals.runs.suites import own_suite
from openhands_rl_plugin.models.adapters.publisher import publisher_for
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.client import local_weights, served_base
from openhands_rl_plugin.models.generator.config import server_options

LATEST, BASE = "latest", "base"


def given_weights(model: Path | None) -> Path:
    """The model's directory. Raises ``ConfigError`` where none is given, or that is none."""
    if model is None:
        raise ConfigError("no model is given: give its folder with --model, or its server as base_url in [rl.serving]")
    if (weights := local_weights(named_model(model))) is None:
        raise ConfigError(f"--model {model}: this is not the folder of a model (it has no config.json)")
    return weights


@contextmanager
def served_policy(settings: RLSettings, model: Path | None, directory: Path) -> Iterator[tuple[RLSettings, Path]]:
    """The settings with the server's address and base model, and the folder of its weights.

    ``model``: the weights' folder, which a server may also name itself. Without a server in ``[rl.serving]`` the
    embedded one runs until the block ends, with its log in ``directory``. Raises ``ConfigError`` without weights on
    this machine, ``InfrastructureError`` where the server does not answer.
    """
    serving = settings.serving
    if serving.base_url:
        base = served_base(serving.base_url, serving.model, serving.api_key(), serving.request_timeout)
        weights = base.weights if model is None else given_weights(model)
        if weights is None:
            raise ConfigError(
                f"the weights of {base.id!r} are not on this machine (its server names no local directory as root): "
                "give the model's directory with --model"
            )
        yield settings.model_copy(update={"serving": serving.model_copy(update={"model": base.id})}), weights
        return
    weights = given_weights(model)
    given = server_options(settings, str(weights)) | {"served_model_name": serving.model or weights.name}
    command = ["serve", *(f"--{option.replace('_', '-')}={value}" for option, value in given.items())]
    with running_command(command, directory / "logs" / "serve.log") as url:
        at = {"base_url": f"{url}/v1", "base_urls": (), "api_key_env": "", "server": "embedded"}
        own = serving.model_copy(update={**at, "model": given["served_model_name"]})
        yield settings.model_copy(update={"serving": own}), weights


def find_version(adapters: AdapterStore, name: str, wanted: str, option: str) -> Adapter:
    """The version that ``option`` names: a number, a name or ``latest``. Raises ``ConfigError``."""
    versions = adapters.versions(name)
    found = versions[-1:] if wanted == LATEST else [one for one in versions if wanted in (str(one.version), one.name)]
    if not found:
        known = ", ".join(str(each.version) for each in versions) or "none"
        raise ConfigError(f"{option} {wanted}: {name} has no such version in {adapters.root}; available: {known}")
    return found[0]


def starting_point(adapters: AdapterStore, name: str, start: str) -> Adapter | None:
    """The version ``--from`` names, which training continues; ``None`` for the base model. Raises ``ConfigError``."""
    if start == BASE or (start == LATEST and not adapters.versions(name)):
        return None
    return find_version(adapters, name, start, "--from")


async def publish(serving: ServingSettings, adapters: AdapterStore, adapter: Adapter) -> None:
    """Bring a version into use on every server, or on none, and print that. Raises ``PublishError``."""
    async with publisher_for(serving, adapters) as publisher:
        report = await publisher.publish(adapter)
        served = await publisher.served_model(adapter)
    proof = "no probe" if report.difference is None else f"probe within {report.difference:.4f} nats"
    where = f"{', '.join(serving.publish_urls)} after {report.seconds:.1f} s ({proof})"
    print(f"{adapter.name} is in use at {where}; its model name is {served}")


@contextmanager
def running_command(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Run ``openhands-rl ARGUMENTS --port PORT`` until the block ends; yields its URL once ``/health`` answers.

    The port is a free one. Raises ``InfrastructureError`` with the last line of the log when the command ends
    before, or does not answer within half an hour: a large model, or a machine with other work, may take minutes.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-P", "-m", "openhands_rl_plugin.cli", *arguments, "--port", str(port)]
    # Fewer arenas: what one thread of the server frees, the others can use.
    environment, nothing = {"MALLOC_ARENA_MAX": "2", **os.environ}, subprocess.DEVNULL
    with open(log, "ab") as output:
        # A group of its own: Ctrl-C in the terminal is for the parent, whose last requests are still answered.
        child = subprocess.Popen(
            dying_with_parent(program), stdin=nothing, stdout=output, stderr=output, env=environment, process_group=0
        )
    url, given_up = f"http://127.0.0.1:{port}", time.monotonic() + _STARTING
    try:
        while not _answers(url):
            if child.poll() is not None or time.monotonic() > given_up:
                *_, last = ["no output", *log.read_text(errors="replace").split("\n")[:-1]]
                raise InfrastructureError(f"{url} did not come up: {last} (log: {log})")
            time.sleep(0.1)
        yield url
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10)
        child.kill()
        child.wait()


_STARTING = 1800.0


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5).is_success
    return False


@contextmanager
def served_suite(settings: RLSettings, suite: str, directory: Path) -> Iterator[RLSettings]:
    """The settings with the environment of a suite that brings a server, which runs until the block ends."""
    own = own_suite(suite)
    if own is None or not own.server:
        yield settings
        return
    with running_command(own.server, directory / "logs" / f"{suite}.log") as url:
        options = settings.environment if settings.env_name == suite else {}
        yield settings.model_copy(update={"env_name": suite, "env_server_base": url, "environment": options})

"""Checks of the installation: Python, packages, OpenHands and its agent registry, bubblewrap."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires

from openhands_rl_plugin.cli.doctor_checks.findings import Finding, fail, ok, warn
from openhands_rl_plugin.config.host import V0_PACKAGE, V1_PACKAGES, HostName, installed_hosts, version_of
from openhands_rl_plugin.core.errors import ConfigError, describe
from openhands_rl_plugin.environments.workspace.bubblewrap import find_bubblewrap

HOST, HOST_VERSION = V0_PACKAGE, "1.6"
REGISTRATION_SECONDS = 180.0
"""Importing OpenHands takes 10 seconds, 20 before its files are compiled; slow disks need more."""

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 12), (3, 13)
_CORE = ("httpx", "pydantic", "rich", "starlette", "uvicorn")
_OWN = "openhands_rl_plugin"
_OF_EXTRA = re.compile(r"(?P<package>[A-Za-z0-9._-]+).*;.*extra == ['\"](?P<extra>[\w-]+)['\"]")
_NOT_LISTED = {"all", "openhands", "sdk"}
_REGISTERED_V0 = """
import logging
logging.disable(logging.CRITICAL)
import openhands.agenthub
from openhands.controller.agent import Agent
print("registered as", Agent.get_cls("RLAgent").__module__)
"""
_REGISTERED_V1 = """
import logging
logging.disable(logging.CRITICAL)
import openhands_rl_plugin.hosts.v1
from openhands.sdk import AgentBase
agent = AgentBase.model_validate({"kind": "RLAgent", "llm": {"model": "openai/m"}, "tools": []})
print("registered as", type(agent).__module__)
"""
_REMEDY = 'the line classpath = "openhands_rl_plugin.hosts.v0.agent.RLAgent" in [agent.RLAgent] works without it'
_REMEDY_V1 = "install the package anew: pip install --force-reinstall 'openhands_rl_plugin[sdk]'"


def check_installation(*, registration: bool = True) -> Iterator[Finding]:
    """All checks. ``registration`` imports OpenHands in another process, which takes 10 seconds or more."""
    yield _python()
    yield _core()
    yield from (_extra(name, packages) for name, packages in _extras().items())
    hosts = installed_hosts()
    yield _host(hosts)
    if registration and "v0" in hosts:
        yield _registration("V0", _REGISTERED_V0, _REMEDY)
    elif registration and hosts:
        yield _registration("V1", _REGISTERED_V1, _REMEDY_V1)
    yield _bubblewrap()


def _python() -> Finding:
    said = ".".join(map(str, sys.version_info[:3]))
    if _OLDEST_PYTHON <= sys.version_info[:2] <= _NEWEST_PYTHON:
        return ok("python", said)
    return fail("python", f"{said} is not supported", "install Python 3.12 or 3.13 and the package there")


def _core() -> Finding:
    versions = {name: version_of(name) for name in _CORE}
    own = version_of(_OWN)
    if missing := [name for name, found in versions.items() if found is None]:
        return fail("packages", f"{', '.join(missing)} missing", "pip install --upgrade openhands_rl_plugin")
    listed = ", ".join(f"{name} {found}" for name, found in versions.items())
    return ok("packages", f"openhands_rl_plugin {own or 'from its sources'}; {listed}")


def _extras() -> dict[str, list[str]]:
    """Extra -> its packages, from the package's metadata."""
    try:
        asked = requires(_OWN) or []
    except PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in asked:
        if (match := _OF_EXTRA.match(line)) is not None and match["extra"] not in _NOT_LISTED:
            found.setdefault(match["extra"], []).append(match["package"])
    return found


def _extra(name: str, packages: Sequence[str]) -> Finding:
    versions = {package: version_of(package) for package in packages}
    what = f"extra {name}"
    if missing := [package for package, found in versions.items() if found is None]:
        remedy = f"needed for this only: pip install 'openhands_rl_plugin[{name}]'"
        return warn(what, f"{', '.join(missing)} not installed", remedy)
    return ok(what, ", ".join(f"{package} {found}" for package, found in versions.items()))


def _host(hosts: Sequence[HostName]) -> Finding:
    v0 = version_of(HOST)
    sdk = ", ".join(f"{package} {version_of(package)}" for package in V1_PACKAGES)
    if "v0" in hosts:
        # What V0 brings of V1 is an old release; with ``[rl] host = "v1"`` it is used all the same.
        return ok("host", f"OpenHands V0: {HOST} {v0}" + (f"; also V1: {sdk}" if "v1" in hosts else ""))
    if "v1" in hosts:
        return ok("host", f"OpenHands V1: {sdk}")
    if v0 is not None:
        remedy = f"pip install '{HOST}=={HOST_VERSION}.*': the last one with an agent registry and a controller"
        return fail("host", f"{HOST} {v0} is not {HOST_VERSION}", remedy)
    remedy = (
        "to run inside OpenHands: pip install 'openhands_rl_plugin[sdk]' (V1) or 'openhands_rl_plugin[openhands]' (V0)"
    )
    old = [f"{package} {found}" for package in V1_PACKAGES if (found := version_of(package)) is not None]
    return warn("host", f"{', '.join(old)} alone or too old" if old else "OpenHands is not installed", remedy)


def _registration(host: str, program: str, remedy: str) -> Finding:
    """Look the agent up in a new process, as OpenHands does."""
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=REGISTRATION_SECONDS,
            env=environ,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail("registration", f"OpenHands {host} cannot be imported: {describe(error)}", remedy)
    if done.returncode == 0 and done.stdout.strip().startswith("registered as"):
        return ok("registration", f"RLAgent {done.stdout.strip()}")
    said = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return fail("registration", f"OpenHands {host} does not know RLAgent ({said})", remedy)


def _bubblewrap() -> Finding:
    try:
        return ok("bubblewrap", f"{find_bubblewrap()} makes sandboxes")
    except ConfigError as error:
        return warn(
            "bubblewrap",
            str(error),
            'no agent works on files until it does; without isolation: [rl.workspace] isolation = "none"',
        )

"""Checks of the installation: Python, packages, OpenHands and its agent registry, bubblewrap."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from openhands_rl_plugin.cli.doctor_checks.findings import Finding, fail, ok, warn
from openhands_rl_plugin.core.errors import ConfigError, describe
from openhands_rl_plugin.environments.workspace.bubblewrap import find_bubblewrap

HOST, HOST_VERSION = "openhands-ai", "1.6"
REGISTRATION_SECONDS = 180.0
"""Importing OpenHands takes 10 seconds, 20 before its files are compiled; slow disks need more."""

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 12), (3, 13)
_CORE = ("httpx", "pydantic", "rich", "starlette", "uvicorn")
_OWN = "openhands_rl_plugin"
_OF_EXTRA = re.compile(r"(?P<package>[A-Za-z0-9._-]+).*;.*extra == ['\"](?P<extra>[\w-]+)['\"]")
_NOT_LISTED = {"all", "openhands"}
_REGISTERED = """
import logging
logging.disable(logging.CRITICAL)
import openhands.agenthub
from openhands.controller.agent import Agent
print("registered as", Agent.get_cls("RLAgent").__module__)
"""
_REMEDY = 'the line classpath = "openhands_rl_plugin.hosts.v0.agent.RLAgent" in [agent.RLAgent] works without it'


def check_installation(*, registration: bool = True) -> Iterator[Finding]:
    """All checks. ``registration`` imports OpenHands in another process, which takes 10 seconds or more."""
    yield _python()
    yield _core()
    yield from (_extra(name, packages) for name, packages in _extras().items())
    installed = _version(HOST)
    yield _host(installed)
    if installed is not None and registration:
        yield _registration()
    yield _bubblewrap()


def _python() -> Finding:
    said = ".".join(map(str, sys.version_info[:3]))
    if _OLDEST_PYTHON <= sys.version_info[:2] <= _NEWEST_PYTHON:
        return ok("python", said)
    return fail("python", f"{said} is not supported", "install Python 3.12 or 3.13 and the package there")


def _core() -> Finding:
    versions = {name: _version(name) for name in _CORE}
    own = _version(_OWN)
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
    versions = {package: _version(package) for package in packages}
    what = f"extra {name}"
    if missing := [package for package, found in versions.items() if found is None]:
        remedy = f"needed for this only: pip install 'openhands_rl_plugin[{name}]'"
        return warn(what, f"{', '.join(missing)} not installed", remedy)
    return ok(what, ", ".join(f"{package} {found}" for package, found in versions.items()))


def _host(installed: str | None) -> Finding:
    if installed is None:
        remedy = "to run inside OpenHands: pip install 'openhands_rl_plugin[openhands]'"
        return warn("host", f"{HOST} is not installed", remedy)
    if installed.split(".")[:2] != HOST_VERSION.split("."):
        remedy = f"pip install '{HOST}=={HOST_VERSION}.*': the last one with an agent registry and a controller"
        return fail("host", f"{HOST} {installed} is not {HOST_VERSION}", remedy)
    return ok("host", f"{HOST} {installed}")


def _registration() -> Finding:
    """Look the agent up in a new process, as OpenHands does."""
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _REGISTERED],
            capture_output=True,
            text=True,
            timeout=REGISTRATION_SECONDS,
            env=environ,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail("registration", f"OpenHands cannot be imported: {describe(error)}", _REMEDY)
    if done.returncode == 0 and done.stdout.strip().startswith("registered as"):
        return ok("registration", f"RLAgent {done.stdout.strip()}")
    said = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return fail("registration", f"OpenHands does not know RLAgent ({said})", _REMEDY)


def _bubblewrap() -> Finding:
    try:
        return ok("bubblewrap", f"{find_bubblewrap()} makes sandboxes")
    except ConfigError as error:
        return warn(
            "bubblewrap",
            str(error),
            'no agent works on files until it does; without isolation: [rl.workspace] isolation = "none"',
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

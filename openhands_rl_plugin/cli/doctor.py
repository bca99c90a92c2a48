"""``openhands-rl doctor``: check the installation, the settings, stores and services; find the causes of drift."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.text import Text

from openhands_rl_plugin.cli.options.stored import add_filters, add_store, filter_of
from openhands_rl_plugin.cli.options.stores import open_store
from openhands_rl_plugin.config.build import check_environment_server, open_storage
from openhands_rl_plugin.config.host import V0_PACKAGE, V1_PACKAGES, HostName, installed_hosts, version_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings, read_document, table_of
from openhands_rl_plugin.config.workspace import PromptName
from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    ConfigError,
    InfrastructureError,
    MissingExtraError,
    RLError,
    boundary,
    describe,
    from_extra,
)
from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.servers import is_loopback
from openhands_rl_plugin.core.types import FailureKind, Frozen
from openhands_rl_plugin.environments.workspace.bubblewrap import find_bubblewrap
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.server_models import listed_models
from openhands_rl_plugin.trajectories.drift import DriftReport
from openhands_rl_plugin.trajectories.view.terminal import table

if TYPE_CHECKING:
    from openhands_rl_plugin.trajectories.drift import Decode


class Level(StrEnum):
    """``warn``: something optional does not work. ``fail``: something necessary does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(Frozen):
    """One line: what was checked, the result, and the remedy."""

    level: Level
    what: str
    said: str
    remedy: str = ""


def ok(what: str, said: str) -> Finding:
    """It works."""
    return Finding(level=Level.OK, what=what, said=said)


def warn(what: str, said: str, remedy: str) -> Finding:
    """Something optional does not work."""
    return Finding(level=Level.WARN, what=what, said=said, remedy=remedy)


def fail(what: str, said: str, remedy: str) -> Finding:
    """Something necessary does not work."""
    return Finding(level=Level.FAIL, what=what, said=said, remedy=remedy)


_INSTRUCTIONS: Mapping[PromptName, str] = {
    "standard": "OpenHands' own ([rl.workspace] prompt): a model needs a context of 16,384 tokens or more",
    "compact": "RLAgent's short ones ([rl.workspace] prompt), under 700 tokens",
}

_OF_ENVIRONMENTS = {"env_name", "env_port", "env_server_base", "environment"}


async def check_all(config: Path | None, *, probe: bool = False, registration: bool = True) -> list[Finding]:
    """Every check. Servers are checked only with a ``config``; without it the other checks use the defaults.

    The environment is checked where ``config`` names one and its ``[core] runtime`` is not a workspace.
    """
    findings = list(check_installation(registration=registration))
    settings = RLSettings()
    if config is not None:
        try:
            settings = load_settings(config)
        except ConfigError as error:
            return [*findings, *(fail("configuration", line, "") for line in str(error).splitlines())]
        findings += [ok("configuration", str(config)), ok("instructions", _INSTRUCTIONS[settings.workspace.prompt])]
    findings += await _storage(settings)
    findings += check_adapters(settings.serving.adapters_directory, settings.serving.adapter)
    if config is None:
        return findings
    if settings.serving.base_url:
        serving = settings.serving
        findings += check_model_server(serving.base_url, serving.model, serving.api_key(), probe=probe)
    runtime = (table_of(read_document(config), ("core",)) or {}).get("runtime")
    if settings.model_fields_set & _OF_ENVIRONMENTS and not str(runtime).endswith("WorkspaceRuntime"):
        findings.append(check_environment(settings))
    return findings


async def _storage(settings: RLSettings) -> list[Finding]:
    try:
        storage = open_storage(settings)
    except (ConfigError, MissingExtraError) as error:
        return [fail("storage", str(error), "")]
    try:
        if settings.storage_backend == "file":
            return await check_storage(settings.storage.directory, storage)
        return [await check_episodes(settings.storage_backend, storage)]
    finally:
        await storage.close()


LITTLE_BYTES, TOO_LITTLE_BYTES = 2 * 1024**3, 100 * 1024**2
"""Below the first a warning: a run stores gigabytes. Below the second a failure: writes are about to fail."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


async def check_storage(folder: Path, storage: TrajectoryStorage) -> list[Finding]:
    """Whether the store can be written and read, and who else may read it."""
    findings = [_writable("storage", folder), _space("disk of the storage", folder)]
    if not folder.exists():
        return findings
    findings.append(_private("permissions of the storage", folder))
    return [*findings, await check_episodes(str(folder), storage)]


async def check_episodes(where: str, storage: TrajectoryStorage) -> Finding:
    """Read the store, a folder or a server."""
    try:
        finished = await storage.count(TrajectoryFilter())
        unfinished = await storage.count(TrajectoryFilter(finished=False))
    except RLError as error:
        return fail("stored episodes", str(error), "")
    return ok("stored episodes", f"{finished:,} and {unfinished:,} unfinished in {where}")


def check_adapters(root: Path, name: str) -> Iterator[Finding]:
    """Which version is in use, and whether its weights are intact."""
    what = f"adapter {name}"
    if not root.exists():
        yield ok(what, f"none yet: {root} will be created")
        return
    yield _writable("adapters", root)
    store = AdapterStore(root)
    try:
        current, latest = store.current(name), store.latest(name)
        if current is not None:
            store.verify(current)
    except RLError as error:
        remedy = "publish again, or remove the pointer to go back to the base model"
        yield fail(what, str(error), remedy)
        return
    if current is None:
        yield ok(what, "the base model is in use" + (f"; the newest version is {latest.name}" if latest else ""))
        return
    behind = f"; {latest.name} is newer and was not published" if latest and latest.name != current.name else ""
    yield ok(what, f"{current.name} is in use and undamaged{behind}")


def _writable(what: str, folder: Path) -> Finding:
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return fail(
            what, f"{place} cannot be written: {describe(error)}", "change its permissions or choose another path"
        )
    return ok(what, f"{folder} can be written" + ("" if place == folder else " (it will be created)"))


def _space(what: str, folder: Path) -> Finding:
    place = _existing(folder)
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return fail(what, f"{place} cannot be read: {describe(error)}", "check the disk")
    room = f"{free / 1024**3:,.1f} GiB free"
    remedy = "free some space, or choose another path in [rl.storage]"
    if free < TOO_LITTLE_BYTES:
        return fail(what, room, remedy)
    return warn(what, room, remedy) if free < LITTLE_BYTES else ok(what, room)


def _private(what: str, folder: Path) -> Finding:
    """The mode of the folder itself protects everything in it."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & _OTHERS:
        return warn(what, f"others may read {folder} ({mode:04o})", f"chmod 700 {folder}")
    return ok(what, f"private ({mode:04o})")


def _existing(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


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
_REMEDY_V1 = "install the package anew, in a clone of it: pip install --force-reinstall '.[sdk]'"


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
    version = ".".join(map(str, sys.version_info[:3]))
    if _OLDEST_PYTHON <= sys.version_info[:2] <= _NEWEST_PYTHON:
        return ok("python", version)
    return fail("python", f"{version} is not supported", "install Python 3.12 or 3.13 and the package there")


def _core() -> Finding:
    versions = {name: version_of(name) for name in _CORE}
    if missing := [name for name, found in versions.items() if found is None]:
        return fail("packages", f"{', '.join(missing)} missing", "pip install --upgrade openhands_rl_plugin")
    listed = ", ".join(f"{name} {found}" for name, found in versions.items())
    return ok("packages", f"openhands_rl_plugin {version_of(_OWN) or 'from its sources'}; {listed}")


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
            [sys.executable, "-P", "-c", program],
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
    printed = (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return fail("registration", f"OpenHands {host} does not know RLAgent ({printed})", remedy)


def _bubblewrap() -> Finding:
    try:
        return ok("bubblewrap", f"{find_bubblewrap()} makes sandboxes")
    except ConfigError as error:
        return warn(
            "bubblewrap",
            str(error),
            'no agent works on files until it does; without isolation: [rl.workspace] isolation = "none"',
        )


SECONDS = 10.0
PROBE_SECONDS = 60.0


def check_model_server(base_url: str, model: str, api_key: str | None, *, probe: bool) -> Iterator[Finding]:
    """List the models; with ``probe`` also request one token, which must come with ids and logprobs."""
    what = f"model server {base_url}"
    start = "start it, for example with `openhands-rl serve`, or change [rl.serving] base_url"
    try:
        listed = listed_models(base_url, api_key, SECONDS)
    except InfrastructureError as error:
        # A server of this machine that nobody has started yet is no error of the file.
        yield (warn if not probe and _is_here(base_url) else fail)(what, str(error), start)
        return
    except RLError as error:
        yield fail(what, str(error), "correct it in [rl.serving]")
        return
    if listed is None:
        yield fail(what, "has no list of models", start)
        return
    served = [each.id for each in listed]
    named = ", ".join(served[:5]) + (" ..." if len(served) > 5 else "")
    if model and model not in served:
        yield fail(what, f"serves {named or 'nothing'}, not {model}", "set [rl.serving] model to one of these")
        return
    yield ok(what, f"serves {named}")
    if probe and (asked := model or next(iter(served), "")):
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        with httpx.Client(timeout=SECONDS, headers=headers, trust_env=False) as client:
            yield _probe(client, base_url, asked)


def _probe(client: httpx.Client, base_url: str, model: str) -> Finding:
    what = f"token ids of {model}"
    remedy = "training needs both: use vLLM (return_token_ids) or `openhands-rl serve`"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say yes."}],
        "max_tokens": 1,
        "logprobs": True,
        "return_token_ids": True,
    }
    try:
        answer = client.post(f"{base_url}/chat/completions", json=body, timeout=PROBE_SECONDS)
        document = answer.raise_for_status().json()
        choice = document["choices"][0]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        return fail(what, f"no answer to a request for one token: {describe(error)}", remedy)
    with_ids = bool(document.get("prompt_token_ids")) and bool(choice.get("token_ids"))
    with_logprobs = bool((choice.get("logprobs") or {}).get("content"))
    if with_ids and with_logprobs:
        return ok(what, "come with every answer, and so do logprobs")
    missing = " and ".join(name for name, there in (("ids", with_ids), ("logprobs", with_logprobs)) if not there)
    return fail(what, f"an answer has no {missing}", remedy)


def _is_here(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")


def check_environment(settings: RLSettings) -> Finding:
    """Whether the environment of ``[rl] env_name`` can be used: its server listens, or its library is installed."""
    what = f"environment {settings.env_name}"
    try:
        check_environment_server(settings)
    except RLError as error:
        return (warn if _is_here(settings.environment_url) else fail)(what, str(error), "")
    return ok(what, "can be used")


_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


_NO_IDS = "nothing to compare: `openhands-rl stats` says why turns have no token ids"


def print_drift(console: Console, report: DriftReport) -> None:
    """Print the causes in a table, the costliest first, then the setting against each, with examples."""
    found = f"{report.episodes:,} episodes, {report.turns:,} turns with token ids in {report.segments:,} segments"
    tokens = f"{report.tokens:,} tokens, {report.sampled_tokens:,} of them sampled"
    console.print(Text(f"{found} ({report.segments_by_drift:,} because of drift): {tokens}"))
    if not report.causes:
        line, style = ("every turn extends the one before", "green") if report.turns else (_NO_IDS, "yellow")
        console.print(Text(line, style))
        return
    columns = ("cause", "breaks", "episodes", "tokens again", "of all")
    rows = [
        (
            each.cause.value,
            f"{each.breaks:,}",
            f"{each.episodes:,}",
            f"{each.repeated_tokens:,}",
            f"{each.repeated_tokens / report.tokens:.0%}",
        )
        for each in report.causes
    ]
    console.print(table(columns, rows, numbers=columns[1:]))
    for each in report.causes:
        console.print(Text(f"\n{each.cause.value}", "bold"))
        console.print(Text(f"  set: {each.setting}"), soft_wrap=True)
        for example in each.examples:
            console.print(Text(visible(f"  see: {example}"), "dim"), soft_wrap=True)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print a line for each finding, and its remedy under it."""
    for each in findings:
        line = Text(f"{each.level.value:<5}", _STYLES[each.level])
        line.append(visible(f"{each.what}: {each.said}"), "default")
        console.print(line, soft_wrap=True)
        if each.remedy:
            console.print(Text(visible(f"      {each.remedy}"), "dim"), soft_wrap=True)


EPILOG = """examples:
  openhands-rl doctor
  openhands-rl doctor --config config.toml --probe
  openhands-rl doctor drift ~/.openhands/rl_trajectories
  openhands-rl doctor drift ~/.openhands/rl_trajectories --run demo --tokenizer ./Qwen3-0.6B
"""

# A nested parser would reset options given before `check` to its own defaults.
_UNSET: Mapping[str, Any] = {"default": argparse.SUPPRESS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``check`` (the default) and ``drift STORE``."""
    what = parser.add_subparsers(dest="what", metavar="{check,drift}")
    for check in (parser, what.add_parser("check", help="check the installation (the default)")):
        check.add_argument(
            "--config", type=Path, metavar="FILE", help="also check the paths and servers of this config.toml", **_UNSET
        )
        probe, quick = "request one token and check for its ids and logprobs", "skip importing OpenHands (10 seconds)"
        check.add_argument("--probe", action="store_true", help=probe, **_UNSET)
        check.add_argument("--quick", action="store_true", help=quick, **_UNSET)
        check.add_argument("--json", action="store_true", help="print the findings as JSON", **_UNSET)
    drift = what.add_parser("drift", help="find turns that do not extend the previous one: cause, cost, setting")
    add_store(drift)
    add_filters(drift)
    drift.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder with tokenizer.json, to show texts instead of token ids"
    )
    drift.add_argument("--json", action="store_true", help="print the report as JSON", **_UNSET)
    parser.set_defaults(config=None, probe=False, quick=False, json=False)


async def run(args: argparse.Namespace) -> int:
    """Print the findings; exit code 1 when a check failed. Raises ``RLError`` when the store or a filter is wrong."""
    if args.what == "drift" and (args.config or args.probe or args.quick):
        raise ConfigError("--config, --probe and --quick are options of `doctor check`; leave them out with `drift`")
    return await (_drift(args) if args.what == "drift" else _check(args))


async def _check(args: argparse.Namespace) -> int:
    from openhands_rl_plugin.trajectories.view.terminal import console, print_json

    findings = await check_all(args.config, probe=args.probe, registration=not args.quick)
    if args.json:
        print_json(findings)
    else:
        print_findings(console(), findings)
    return int(any(each.level is Level.FAIL for each in findings))


async def _drift(args: argparse.Namespace) -> int:
    from openhands_rl_plugin.trajectories.drift import drift_of
    from openhands_rl_plugin.trajectories.view.terminal import console, print_json

    decode = _decoder(args.tokenizer) if args.tokenizer is not None else None
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        report = await drift_of(storage.find(filter_of(args)), decode)
    if args.json:
        print_json(report)
    else:
        print_drift(console(), report)
    return 0


def _decoder(folder: Path) -> Decode:
    with from_extra("train", "tokenizers"):
        from tokenizers import Tokenizer
    try:
        with boundary(FailureKind.MODEL, "tokenizer"):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except CaughtFailure as error:
        raise ConfigError(f"--tokenizer: {folder}/tokenizer.json cannot be read: {error.failure.message}") from error
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)

"""``openhands-rl doctor``: write a configuration, check it and the installation; find the causes of drift.

examples:
  openhands-rl doctor --init --model model --base-url http://127.0.0.1:8100/v1 --workspace ./my-repository
  openhands-rl doctor
  openhands-rl doctor --config config.toml --probe
  openhands-rl doctor --config config.toml --show
  openhands-rl doctor drift ~/.openhands/rl_trajectories
  openhands-rl doctor drift ~/.openhands/rl_trajectories --run demo --tokenizer ./Qwen3-0.6B
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

from openhands_rl_plugin.cli.options import add_filters, add_store, filter_of, load_tokenizer, open_store
from openhands_rl_plugin.config.build import check_plugins, open_storage
from openhands_rl_plugin.config.host import V0_PACKAGE, V1_PACKAGES, installed_hosts, version_of
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.config.toml import has_settings, load_settings, starting_config
from openhands_rl_plugin.config.work import DEFAULT_FILE
from openhands_rl_plugin.core.errors import (
    ConfigError,
    EpisodeError,
    InfrastructureError,
    MissingExtraError,
    RLError,
    describe,
)
from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.servers import is_loopback
from openhands_rl_plugin.core.types import Message, SamplingParams
from openhands_rl_plugin.environments.workspace.sandbox import find_bubblewrap
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.openai import OpenAIEngine
from openhands_rl_plugin.models.engines.server_models import listed_models
from openhands_rl_plugin.trajectories.view import console, print_json, table

REGISTRATION_SECONDS = 180.0
"""Importing OpenHands takes 10 seconds, 20 before its files are compiled; slow disks need more."""
SECONDS, PROBE_SECONDS = 10.0, 60.0

_OWN = "openhands_rl_plugin"
_OF_EXTRA = re.compile(r"(?P<package>[A-Za-z0-9._-]+).*;.*extra == ['\"](?P<extra>[\w-]+)['\"]")
_NOT_LISTED = {"all", "openhands", "sdk"}
# What each host's own lookup of the agent prints, and what helps where it fails.
_REGISTRATION = {
    "v0": (
        "import openhands.agenthub\nfrom openhands.controller.agent import Agent\n"
        "print('registered as', Agent.get_cls('RLAgent').__module__)",
        'the line classpath = "openhands_rl_plugin.hosts.v0.agent.RLAgent" in [agent.RLAgent] works without it',
    ),
    "v1": (
        "import openhands_rl_plugin.hosts.v1\nfrom openhands.sdk import AgentBase\n"
        "agent = AgentBase.model_validate({'kind': 'RLAgent', 'llm': {'model': 'openai/m'}, 'tools': []})\n"
        "print('registered as', type(agent).__module__)",
        "install the package anew, in a clone of it: pip install --force-reinstall '.[sdk]'",
    ),
}


class Finding(NamedTuple):
    """One line: what was checked, what was found, and the remedy.

    ``level``: ``warn`` where something optional does not work, ``fail`` where something necessary does not.
    """

    level: Literal["ok", "warn", "fail"]
    what: str
    found: str
    remedy: str = ""


async def check_all(config: Path | None, *, probe: bool = False, registration: bool = True) -> list[Finding]:
    """Every check. The model server is checked only with a ``config``; without it the others use the defaults."""
    findings = list(check_installation(registration=registration))
    settings = RLSettings()
    if config is not None:
        try:
            settings = checked_settings(config)
        except ConfigError as error:
            return [*findings, *(Finding("fail", "configuration", line) for line in str(error).splitlines())]
        findings.append(Finding("ok", "configuration", str(config)))
    findings += await check_storage(settings)
    findings.append(check_adapters(settings.serving.adapters_directory, settings.serving.adapter))
    if config is not None and settings.serving.base_url:
        findings += await check_model_server(settings.serving, probe=probe)
    return findings


def checked_settings(config: Path) -> RLSettings:
    """The settings of a file that has some, whose plugins can be loaded. Raises ``ConfigError``."""
    settings = load_settings(config)
    try:
        if not has_settings(config):
            raise ConfigError("there is no [rl] section in it (nor [extended.rl] or [agent.RLAgent.rl])")
        check_plugins(settings)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{config}: {line}" for line in str(error).splitlines())) from error
    return settings


def check_installation(*, registration: bool = True) -> Iterator[Finding]:
    """The package, its extras, OpenHands, bubblewrap. ``registration`` imports OpenHands, which takes 10 seconds."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "package", f"{_OWN} {version_of(_OWN) or 'from its sources'} on Python {python}")
    for extra, packages in _extras().items():
        if missing := [package for package in packages if version_of(package) is None]:
            remedy = f"needed for this only: pip install 'openhands_rl_plugin[{extra}]'"
            yield Finding("warn", f"extra {extra}", f"{', '.join(missing)} not installed", remedy)
        else:
            found = ", ".join(f"{package} {version_of(package)}" for package in packages)
            yield Finding("ok", f"extra {extra}", found)
    yield _host()
    if registration and (hosts := installed_hosts()):
        yield _registration(hosts[0])
    try:
        yield Finding("ok", "bubblewrap", f"{find_bubblewrap()} makes sandboxes")
    except ConfigError as error:
        remedy = 'no agent works on files until it does; without isolation: [rl.workspace] isolation = "none"'
        yield Finding("warn", "bubblewrap", str(error), remedy)


def _extras() -> dict[str, list[str]]:
    """Extra -> its packages, from the package's metadata; none where the package runs from its sources."""
    found: dict[str, list[str]] = {}
    for line in (requires(_OWN) or []) if version_of(_OWN) is not None else []:
        if (match := _OF_EXTRA.match(line)) is not None and match["extra"] not in _NOT_LISTED:
            found.setdefault(match["extra"], []).append(match["package"])
    return found


def _host() -> Finding:
    hosts, v0 = installed_hosts(), version_of(V0_PACKAGE)
    sdk = ", ".join(f"{name} {version}" for name in V1_PACKAGES if (version := version_of(name)) is not None)
    if hosts:  # V0 brings an old release of V1, which ``[rl] host = "v1"`` uses all the same
        found = {"v0": f"OpenHands V0: {V0_PACKAGE} {v0}", "v1": f"OpenHands V1: {sdk}"}
        return Finding("ok", "host", "; also ".join(found[host] for host in hosts))
    if v0 is not None:
        remedy = f"pip install '{V0_PACKAGE}==1.6.*': the last one with an agent registry and a controller"
        return Finding("fail", "host", f"{V0_PACKAGE} {v0} is not 1.6", remedy)
    install = "pip install 'openhands_rl_plugin[sdk]' (V1) or 'openhands_rl_plugin[openhands]' (V0)"
    found = f"{sdk} alone or too old" if sdk else "OpenHands is not installed"
    return Finding("warn", "host", found, f"to run inside OpenHands: {install}")


def _registration(host: str) -> Finding:
    """Look the agent up in a new process, as OpenHands does."""
    program, remedy = _REGISTRATION[host]
    quiet = f"import logging\nlogging.disable(logging.CRITICAL)\n{program}"
    environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [sys.executable, "-P", "-c", quiet]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=REGISTRATION_SECONDS, env=environ, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("fail", "registration", f"OpenHands cannot be imported: {describe(error)}", remedy)
    if done.returncode == 0 and done.stdout.strip().startswith("registered as"):
        return Finding("ok", "registration", f"RLAgent {done.stdout.strip()}")
    printed = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return Finding("fail", "registration", f"OpenHands {host.upper()} does not know RLAgent ({printed})", remedy)


async def check_storage(settings: RLSettings) -> list[Finding]:
    """Whether the store can be written and read."""
    findings, where = [], settings.storage_backend
    try:
        storage = open_storage(settings)
        if where == "file":
            folder = settings.storage.directory
            where = str(folder)
            findings.append(_writable("storage", folder))
            if not folder.exists():
                return findings
        finished = await storage.count(TrajectoryFilter())
        unfinished = await storage.count(TrajectoryFilter(finished=False))
        found = f"{finished:,} and {unfinished:,} unfinished in {where}"
        findings.append(Finding("ok", "stored episodes", found))
        await storage.close()
    except (RLError, MissingExtraError) as error:
        findings.append(Finding("fail", "stored episodes", str(error)))
    return findings


def _writable(what: str, folder: Path) -> Finding:
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(place, os.W_OK):
        return Finding("fail", what, f"{place} cannot be written", "change its permissions or choose another path")
    return Finding("ok", what, f"{folder} can be written" + ("" if place == folder else " (it will be created)"))


def check_adapters(root: Path, name: str) -> Finding:
    """Which version is in use, and whether its weights are intact."""
    what, store = f"adapter {name}", AdapterStore(root)
    try:
        if (current := store.current(name)) is None:
            return Finding("ok", what, f"the base model is in use, as {root} says")
        store.verify(current)
    except RLError as error:
        return Finding("fail", what, str(error), "publish again, or remove the pointer to go back to the base model")
    return Finding("ok", what, f"{current.name} is in use and undamaged")


async def check_model_server(serving: ServingSettings, *, probe: bool) -> list[Finding]:
    """List the models; with ``probe`` also request one token, which must come with ids and logprobs."""
    url, model = serving.base_url, serving.model
    what = f"model server {url}"
    start = "start it, for example with `openhands-rl serve`, or change [rl.serving] base_url"
    try:
        listed = listed_models(url, serving.api_key(), SECONDS)
    except RLError as error:
        # A server of this machine that nobody has started yet is not an error of the file.
        later = isinstance(error, InfrastructureError) and not probe and is_loopback(urlsplit(url).hostname or "")
        return [Finding("warn" if later else "fail", what, str(error), start)]
    if listed is None:
        return [Finding("fail", what, "has no list of models", start)]
    served = [each.id for each in listed]
    names = ", ".join(served[:5]) + (" ..." if len(served) > 5 else "")
    if model and model not in served:
        remedy = "set [rl.serving] model to one of these"
        return [Finding("fail", what, f"serves {names or 'nothing'}, not {model}", remedy)]
    findings = [Finding("ok", what, f"serves {names}")]
    if probe and (probed := model or next(iter(served), "")):
        findings.append(await _probe(OpenAIEngine(probed, url, serving.api_key(), timeout=PROBE_SECONDS, retries=0)))
    return findings


async def _probe(engine: OpenAIEngine) -> Finding:
    """Whether one completion of one token has ids and logprobs."""
    what = f"token ids of {engine.model}"
    remedy = "training needs both: use vLLM (return_token_ids) or `openhands-rl serve`"
    try:
        question = Message(role="user", content="Say yes.")
        (completion,) = await engine.complete([question], sampling=SamplingParams(max_tokens=1))
    except EpisodeError as error:
        return Finding("fail", what, f"a request for one token fails: {error}", remedy)
    finally:
        await engine.aclose()
    if completion.tokens is None or completion.tokens.logprobs is None:
        missing = "none" if completion.tokens is None else "ids, and no logprobs"
        return Finding("fail", what, f"a completion has {missing}", remedy)
    return Finding("ok", what, "come with every completion, and so do logprobs")


def print_findings(out: Console, findings: Sequence[Finding]) -> None:
    """Print a line for each finding, and its remedy under it."""
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for level, what, found, remedy in findings:
        out.print(Text(f"{level:<5}", styles[level]).append(visible(f"{what}: {found}"), "default"), soft_wrap=True)
        if remedy:
            out.print(Text(visible(f"      {remedy}"), "dim"), soft_wrap=True)


def print_drift(out: Console, report: Mapping[str, Any]) -> None:
    """Print the causes in a table, the costliest first, then the setting against each, with examples."""
    found = "{episodes:,} episodes, {turns:,} turns with token ids in {segments:,} segments".format_map(report)
    tokens = "{tokens:,} tokens, {sampled_tokens:,} of them sampled".format_map(report)
    out.print(Text(f"{found} ({report['segments_by_drift']:,} because of drift): {tokens}"))
    if not report["causes"]:
        none = "nothing to compare: `openhands-rl list STORE --by` says why turns have no token ids"
        out.print(Text("every turn extends the one before", "green") if report["turns"] else Text(none, "yellow"))
        return
    columns = ("cause", "breaks", "episodes", "tokens again", "of all")
    rows = []
    for each in report["causes"]:
        counts = (f"{each[name]:,}" for name in ("breaks", "episodes", "repeated_tokens"))
        rows.append((each["cause"], *counts, f"{each['repeated_tokens'] / report['tokens']:.0%}"))
    out.print(table(columns, rows, numbers=columns[1:]))
    for each in report["causes"]:
        out.print(Text(f"\n{each['cause']}", "bold"))
        out.print(Text(f"  set: {each['setting']}"), soft_wrap=True)
        for example in each["examples"]:
            out.print(Text(visible(f"  see: {example}"), "dim"), soft_wrap=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checks of the installation, a new configuration, or ``drift STORE``."""
    file = "also check the paths and servers of this config.toml; with --init the file to write (default: config.toml)"
    parser.add_argument("--config", type=Path, metavar="FILE", help=file)
    parser.add_argument("--show", action="store_true", help="print the effective settings of --config as JSON")
    parser.add_argument("--probe", action="store_true", help="request one token and check for its ids and logprobs")
    parser.add_argument("--quick", action="store_true", help="skip importing OpenHands (10 seconds)")
    new = parser.add_argument_group("a new configuration")
    new.add_argument("--init", action="store_true", help="write a config.toml to start from")
    new.add_argument("--model", default="model", metavar="NAME", help="name of the model on its server")
    server = "OpenAI-compatible server of the model, up to and including /v1"
    new.add_argument("--base-url", default="http://127.0.0.1:8100/v1", metavar="URL", help=server)
    new.add_argument("--workspace", default="./workspace", metavar="DIR", help="folder that the agent works in")
    short = "compact: short instructions, for models with a context of less than 16,384 tokens"
    new.add_argument("--prompt", choices=["standard", "compact"], default="standard", help=short)
    about = "find turns that do not extend the previous one: cause, cost, setting"
    drift = parser.add_subparsers(dest="what", metavar="drift").add_parser("drift", help=about, description=about)
    add_store(drift)
    add_filters(drift)
    texts = "folder with tokenizer.json, to show texts instead of token ids"
    drift.add_argument("--tokenizer", type=Path, metavar="DIR", help=texts)
    drift.add_argument("--json", action="store_true", help="print the report as JSON")


async def run(args: argparse.Namespace) -> int:
    """Print the findings; exit code 1 when a check failed. Raises ``RLError`` when a file, store or filter is wrong."""
    if args.what == "drift":
        return await _drift(args)
    if args.init:
        return _init(args, args.config or DEFAULT_FILE)
    if args.show:
        print_json({"rl": checked_settings(args.config or DEFAULT_FILE).model_dump(mode="json")})
        return 0
    findings = await check_all(args.config, probe=args.probe, registration=not args.quick)
    print_findings(console(), findings)
    return int(any(each.level == "fail" for each in findings))


def _init(args: argparse.Namespace, file: Path) -> int:
    text = starting_config(model=args.model, base_url=args.base_url, workspace=args.workspace, prompt=args.prompt)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; it stays as it is") from error
    load_settings(file)
    options = shlex.join(["--config", str(file), "--workspace", args.workspace])
    print(f"wrote {file}; start the model's server, then:\n  openhands-rl run {options} -t 'What is to be done'")
    return 0


async def _drift(args: argparse.Namespace) -> int:
    from openhands_rl_plugin.trajectories.view import drift_of

    decode = None
    if args.tokenizer is not None:
        decode = partial(load_tokenizer(args.tokenizer).decode, skip_special_tokens=False)
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        report = await drift_of(storage.find(filter_of(args)), decode)
    if args.json:
        print_json(report)
    else:
        print_drift(console(), report)
    return 0

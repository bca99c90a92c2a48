"""``openhands-rl doctor``: write a configuration, check it and the installation; find the causes of drift.

examples:
  openhands-rl doctor --init --model model --base-url http://127.0.0.1:8100/v1 --workspace ./my-repository
  openhands-rl doctor
  openhands-rl doctor --config config.toml
  openhands-rl doctor --config config.toml --show
  openhands-rl doctor drift ~/.openhands/rl_trajectories
  openhands-rl doctor drift ~/.openhands/rl_trajectories --run demo --tokenizer ./Qwen3-0.6B
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from openhands_rl_plugin.cli.options import add_filters, add_store, filter_of, load_tokenizer, open_store
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.host import V0_PACKAGE, V1_PACKAGES, host_of, version_of
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.config.toml import DEFAULT_FILE, has_settings, load_settings, starting_config
from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.core.messages import visible
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Message, SamplingParams
from openhands_rl_plugin.environments.workspace.sandbox import find_bubblewrap
from openhands_rl_plugin.models.engines.client import OpenAIEngine, listed_models
from openhands_rl_plugin.trajectories.view import console, print_json, table

SECONDS = 60.0

_OWN = "openhands_rl_plugin"
_OF_EXTRA = re.compile(r"(?P<package>[A-Za-z0-9._-]+).*;.*extra == ['\"](?P<extra>[\w-]+)['\"]")
_NOT_LISTED = {"all", "openhands", "sdk"}


class Finding(NamedTuple):
    """One line: what was checked, what was found, and the remedy.

    ``level``: ``warn`` where something optional does not work, ``fail`` where something necessary does not.
    """

    level: Literal["ok", "warn", "fail"]
    what: str
    found: str
    remedy: str = ""


async def check_all(config: Path | None) -> list[Finding]:
    """Every check. The model server is checked only with a ``config``; without it the others use the defaults."""
    findings, settings = [*check_installation()], RLSettings()
    if config is not None:
        try:
            settings = checked_settings(config)
        except ConfigError as error:
            return [*findings, *(Finding("fail", "configuration", line) for line in str(error).splitlines())]
        findings.append(Finding("ok", "configuration", str(config)))
    findings.append(await _storage(settings))
    if config is not None and settings.serving.base_url:
        findings.append(await _model_server(settings.serving))
    return findings


def checked_settings(config: Path) -> RLSettings:
    """The settings of a file that has some. Raises ``ConfigError``."""
    settings = load_settings(config)
    if not has_settings(config):
        raise ConfigError(f"{config}: there is no [rl] section in it (nor [extended.rl] or [agent.RLAgent.rl])")
    return settings


def check_installation() -> Iterator[Finding]:
    """The package, its extras, OpenHands, bubblewrap."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "package", f"{_OWN} {version_of(_OWN) or 'from its sources'} on Python {python}")
    for extra, packages in _extras().items():
        if missing := [package for package in packages if version_of(package) is None]:
            remedy = f"needed for this only: pip install 'openhands_rl_plugin[{extra}]'"
            yield Finding("warn", f"extra {extra}", f"{', '.join(missing)} not installed", remedy)
        else:
            yield Finding("ok", f"extra {extra}", _versions(packages))
    try:
        host = host_of(RLSettings())
        packages = _versions([V0_PACKAGE] if host == "v0" else V1_PACKAGES)
        yield Finding("ok", "host", f"OpenHands {host.upper()}: {packages}")
    except ConfigError as error:
        yield Finding("warn", "host", str(error))
    try:
        yield Finding("ok", "bubblewrap", f"{find_bubblewrap()} makes sandboxes")
    except ConfigError as error:
        remedy = 'no agent works on files until it does; without isolation: [rl.workspace] isolation = "none"'
        yield Finding("warn", "bubblewrap", str(error), remedy)


def _versions(packages: Sequence[str]) -> str:
    return ", ".join(f"{package} {version_of(package)}" for package in packages)


def _extras() -> dict[str, list[str]]:
    """Extra -> its packages, from the package's metadata; none where the package runs from its sources."""
    found: dict[str, list[str]] = {}
    for line in (requires(_OWN) or []) if version_of(_OWN) is not None else []:
        if (match := _OF_EXTRA.match(line)) is not None and match["extra"] not in _NOT_LISTED:
            found.setdefault(match["extra"], []).append(match["package"])
    return found


async def _storage(settings: RLSettings) -> Finding:
    """Whether the store can be written and read."""
    from openhands_rl_plugin.trajectories.sqlite.storage import FILE_NAME, earlier_schema

    where, upgraded = settings.storage_backend, ""
    if where == "file":
        folder = settings.storage.directory
        place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not os.access(place, os.W_OK):
            remedy = "change its permissions or choose another [rl.storage] path"
            return Finding("fail", "storage", f"{place} cannot be written", remedy)
        if place != folder:
            return Finding("ok", "storage", f"{folder} will be created")
        where = str(folder)
    try:
        if (Path(where) / FILE_NAME).is_file() and (schema := earlier_schema(Path(where))):
            upgraded = f"; it was of schema {schema} and is upgraded now"
        storage = open_storage(settings)
        count = await storage.count(TrajectoryFilter(finished=None))
        await storage.close()
    except RLError as error:
        return Finding("fail", "storage", str(error))
    return Finding("ok", "storage", f"{count:,} episodes in {where}{upgraded}")


async def _model_server(serving: ServingSettings) -> Finding:
    """Whether the server has the model, and a completion of one token comes with ids and logprobs."""
    url, key = serving.base_url, serving.api_key()
    what, remedy = f"model server {url}", "start it, for example with `openhands-rl serve`, or correct [rl.serving]"
    try:
        served = [each.id for each in listed_models(url, key, SECONDS) or ()]
        if (model := serving.model or next(iter(served), "")) not in served:
            return Finding("fail", what, f"serves {', '.join(served) or 'no models'}, not {model}", remedy)
        engine = OpenAIEngine(model, url, key, timeout=SECONDS, retries=0)
        question = [Message(role="user", content="Say yes.")]
        (completion,) = await engine.complete(question, sampling=SamplingParams(max_tokens=1))
        await engine.aclose()
    except RLError as error:
        return Finding("fail", what, str(error), remedy)
    if completion.tokens is None or completion.tokens.logprobs is None:
        remedy = "training needs both: use vLLM (return_token_ids) or `openhands-rl serve`"
        return Finding("fail", what, f"completions of {model} have no token ids, or no logprobs", remedy)
    return Finding("ok", what, f"completions of {model} have token ids and logprobs")


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
    file = "check this config.toml, its store and its server too; with --init: write it (default: config.toml)"
    parser.add_argument("--config", type=Path, metavar="FILE", help=file)
    parser.add_argument("--show", action="store_true", help="print the effective settings of --config as JSON")
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
    findings = await check_all(args.config)
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

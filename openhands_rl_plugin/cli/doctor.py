"""``openhands-rl doctor``: write a configuration, check it and the installation, name the causes of drift.

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
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from rich.text import Text

from openhands_rl_plugin.apps.stores import open_store
from openhands_rl_plugin.cli.options import add_filters, add_store, filter_of
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.host import V0_PACKAGE, V1_PACKAGES, host_of, version_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import DEFAULT_FILE, has_settings, load_settings, starting_config
from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.core.messages import one_line, visible
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Message, SamplingParams
from openhands_rl_plugin.environments.workspace.sandbox import find_bubblewrap
from openhands_rl_plugin.models.engines.client import OpenAIEngine, check_model_server, served_base
from openhands_rl_plugin.trajectories.drift import drift_of, load_tokenizer
from openhands_rl_plugin.trajectories.view import console, print_drift, print_json

_SECONDS, _LONGEST, _OWN = 60.0, 300, "openhands_rl_plugin"
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


async def _host(settings: RLSettings) -> str:
    host = host_of(settings)
    versions = (f"{package} {version_of(package)}" for package in ([V0_PACKAGE] if host == "v0" else V1_PACKAGES))
    return f"OpenHands {host.upper()}: {', '.join(versions)}"


async def _training(settings: RLSettings) -> str:
    if (torch := version_of("torch")) is None:
        raise ConfigError("torch is not installed")
    return f"torch {torch}"


async def _bubblewrap(settings: RLSettings) -> str:
    return f"{find_bubblewrap()} makes sandboxes"


async def _storage(settings: RLSettings) -> str:
    """The number of episodes in a store that can be written."""
    where = settings.storage_backend
    if where == "file":
        where = folder = settings.storage.directory
        place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not os.access(place, os.W_OK):
            raise ConfigError(f"{place} cannot be written")
    storage = open_storage(settings)
    try:
        return f"{await storage.count(TrajectoryFilter(finished=None)):,} episodes in {where}"
    finally:
        await storage.close()


async def _model_server(settings: RLSettings) -> str:
    """Ask for a completion of one token, with ids and logprobs."""
    if not (url := settings.serving.base_url):
        return ""
    key = settings.serving.api_key()
    model = settings.serving.model or served_base(url, "", key, _SECONDS).id
    check_model_server(url, model, key)
    question = [Message(role="user", content="Say yes.")]
    async with aclosing(OpenAIEngine(model, url, key, timeout=_SECONDS, retries=0)) as engine:
        (completion,) = await engine.complete(question, sampling=SamplingParams(max_tokens=1))
    if completion.tokens is None or completion.tokens.logprobs is None:
        missing = f"{url}: completions of {model} have no token ids, or no logprobs"
        raise ConfigError(f"{missing}; training needs both, which vLLM and `openhands-rl serve` report")
    return f"{url}: completions of {model} have token ids and logprobs"


CHECKS: Sequence[tuple[str, Callable[[RLSettings], Awaitable[str]], str, str]] = (
    ("host", _host, "warn", "needed for the agents of OpenHands only"),
    ("training", _training, "warn", "needed for `train` and `serve` only: pip install 'openhands_rl_plugin[train]'"),
    ("bubblewrap", _bubblewrap, "warn", 'without it: [rl.workspace] isolation = "none"'),
    ("storage", _storage, "fail", "change its permissions, or correct [rl.storage]"),
    ("model server", _model_server, "fail", "its address is [rl.serving] base_url"),
)
"""The checks: name, function (it returns an empty text if it does not apply), severity of a failure, remedy."""


async def check_all(config: Path | None) -> AsyncIterator[tuple[str, str, str]]:
    """Check the installation, and with the settings of ``config``, if it is given, its storage and its server.

    Gives ``ok``, ``warn`` (something optional does not work) or ``fail``, what was checked, and what was found.
    """
    yield "ok", "package", f"{_OWN} {version_of(_OWN) or 'from its sources'} on Python {sys.version.split()[0]}"
    settings, checks = RLSettings(), CHECKS
    if config is not None:
        try:
            settings = load_settings(config)
            if not has_settings(config):
                raise ConfigError(f"{config}: there is no [rl] section in it (nor [extended.rl] or [agent.RLAgent.rl])")
            yield "ok", "configuration", str(config)
        except ConfigError as error:
            for line in str(error).splitlines():
                yield "fail", "configuration", line
            checks = [each for each in CHECKS if each[2] == "warn"]
    for what, check, level, remedy in checks:
        try:
            if found := await check(settings):
                yield "ok", what, found
        except RLError as error:
            yield level, what, f"{one_line(str(error), _LONGEST).rstrip('.')}; {remedy}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checks of the installation, a new configuration, or ``drift STORE``."""
    file = "check this config.toml, its store and its server too; with --init: write it (default: config.toml)"
    parser.add_argument("--config", type=Path, metavar="FILE", help=file)
    parser.add_argument("--show", action="store_true", help="print the effective settings of --config as JSON")
    new = parser.add_argument_group("a new configuration")
    new.add_argument("--init", action="store_true", help="write a config.toml to start from")
    new.add_argument("--model", default="model", metavar="NAME", help="name of the model on its server")
    url = "http://127.0.0.1:8100/v1"
    new.add_argument("--base-url", default=url, metavar="URL", help="OpenAI-compatible server, up to and including /v1")
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
        print_json({"rl": load_settings(args.config or DEFAULT_FILE).model_dump(mode="json")})
        return 0
    out, failed = console(), False
    async for level, what, found in check_all(args.config):
        text = Text(f"{level:<5}", _STYLES[level]).append(visible(f"{what}: {found}"), "default")
        out.print(text, soft_wrap=True)
        failed |= level == "fail"
    return int(failed)


def _init(args: argparse.Namespace, file: Path) -> int:
    text = starting_config(model=args.model, base_url=args.base_url, workspace=args.workspace, prompt=args.prompt)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; it stays as it is") from error
    options = shlex.join(["--config", str(file), "--workspace", args.workspace])
    print(f"wrote {file}; start the model's server, then:\n  openhands-rl run {options} -t 'What is to be done'")
    return 0


async def _drift(args: argparse.Namespace) -> int:
    decode = args.tokenizer and partial(load_tokenizer(args.tokenizer).decode, skip_special_tokens=False)
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        report = await drift_of(storage.find(filter_of(args)), decode)
    if args.json:
        print_json(report)
    else:
        print_drift(console(), report)
    return 0

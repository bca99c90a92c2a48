"""``openhands-rl doctor``: check the installation, or analyse drift between the turns of stored episodes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openhands_rl_plugin.cli.options.stored import add_filters, add_store, filter_of
from openhands_rl_plugin.cli.options.stores import open_store
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, MissingExtraError, boundary
from openhands_rl_plugin.core.types import FailureKind

if TYPE_CHECKING:
    from openhands_rl_plugin.trajectories.drift import Decode

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
    from openhands_rl_plugin.cli.doctor_checks.checks import check_all
    from openhands_rl_plugin.cli.doctor_checks.findings import Level
    from openhands_rl_plugin.cli.doctor_checks.pages import print_findings
    from openhands_rl_plugin.trajectories.view.terminal import console, print_json

    findings = await check_all(args.config, probe=args.probe, registration=not args.quick)
    if args.json:
        print_json(findings)
    else:
        print_findings(console(), findings)
    return int(any(each.level is Level.FAIL for each in findings))


async def _drift(args: argparse.Namespace) -> int:
    from openhands_rl_plugin.cli.doctor_checks.pages import print_drift
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
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise MissingExtraError("tokenizers", "train") from error
    try:
        with boundary(FailureKind.MODEL, "tokenizer"):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except CaughtFailure as error:
        raise ConfigError(f"--tokenizer: {folder}/tokenizer.json cannot be read: {error.failure.message}") from error
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)

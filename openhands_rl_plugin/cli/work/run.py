"""``openhands-rl run``: let the agent work on a task in a folder, and record it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from openhands_rl_plugin.cli.options.fields import add_fields, read_fields
from openhands_rl_plugin.config.work import WorkOptions
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.transcript import visible

EPILOG = """examples:
  openhands-rl run -t "Make the failing test pass" --model policy --base-url http://127.0.0.1:8100/v1
  openhands-rl run -t "Make the failing test pass" --workspace ./my-repository --config config.toml
  openhands-rl run -f task.md --strategy BestOfN --max-turns 30 --store ./trajectories
  echo "Say what this code does" | openhands-rl run -f -

OpenHands V1 (its SDK) plays it in this process; where only V0 is installed, `python -m openhands.core.main` does. [rl]
host decides where both could. Commands stay in the folder ([rl.workspace]). Ctrl-C stops it; what was sampled stays.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The task, the folder, and one option for each field of ``WorkOptions``."""
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("-t", "--task", metavar="TEXT", help="what is to be done")
    task.add_argument("-f", "--file", metavar="FILE", help="a file with the task; -: standard input")
    parser.add_argument(
        "--workspace",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder that the agent works in (default: this one)",
    )
    add_fields(parser, WorkOptions, lists="commas")


def run(args: argparse.Namespace) -> int:
    """Play the task; exit code 1 where the agent did not finish, 130 after Ctrl-C. Raises ``ConfigError``."""
    from openhands_rl_plugin.hosts.programs import run_task

    return run_task(_task(args), args.workspace, read_fields(args, WorkOptions), _show)


def _task(args: argparse.Namespace) -> str:
    text = args.task
    if text is None:
        try:
            text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--file: {args.file} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError("the task is empty; say what is to be done")
    return text


def _show(line: str) -> None:
    print(visible(line), flush=True)

"""``python -m openhands_rl_plugin.cli.rollout``: one episode against an endpoint, as one JSON object, for trainers.

examples:
  python -m openhands_rl_plugin.cli.rollout --task webshop-3 --base-url http://127.0.0.1:8100/v1 --model policy
  python -m openhands_rl_plugin.cli.rollout --suite swe-tasks.jsonl --task pytest-dev__pytest-7373 --base-url URL \\
      --model trl-policy-v3 --host v1 --max-turns 30 >episode.json
  echo '{"id": "a", "environment": "gymnasium/FrozenLake-v1", "data": {"idx": 4}}' \\
      | python -m openhands_rl_plugin.cli.rollout --task - --config config.toml --strategy BestOfN

An ID is one of --suite: repair-1, swe-local, ..., or a file (.jsonl, .json, .parquet) of rows with SWE-bench's columns,
or of tasks (id, environment, instruction, data). Without --suite it is N or NAME-N, the number of a task of [rl]
env_name in --config (by default webshop-N), or one of swe-local. -: one row as JSON on standard input.

The object goes to standard output, everything else to standard error: reward, segments (input_ids, mask, logprobs),
messages; or failure with its kind: infrastructure (worth a retry), environment, model, grader, configuration (the
command has to be changed). Exit code 0: a valid episode, whatever its reward; 3: none, and no reward. The episode is
stored; with --run-id, --group-id and --sample it is rolled out once, however often the command is run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from openhands_rl_plugin.apps.rollout.play import play
from openhands_rl_plugin.apps.rollout.rollout import PlayedRollout
from openhands_rl_plugin.apps.stores import open_store
from openhands_rl_plugin.cli import Parser, ended, program, run_command
from openhands_rl_plugin.cli.options import STORE_HELP, add_fields, add_option, read_fields
from openhands_rl_plugin.cli.terminal import sayable
from openhands_rl_plugin.config.rollout import PlayOptions
from openhands_rl_plugin.core.errors import ConfigError, EpisodeError, RLError

INVALID = 3
"""The exit code without a valid episode."""

RESUME = "nothing is reported for this episode; run the command again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The task, and one option for each field of ``PlayOptions``."""
    add_option(parser, "--task", "ID|-", "the task's id; -: its row as JSON on standard input", required=True)
    parser.add_argument("--store", metavar="STORE", help=f"{STORE_HELP} (default: [rl.storage])")
    add_fields(parser, PlayOptions)


def main(argv: Sequence[str] | None = None) -> int:
    """Roll out one episode; the exit code is 3 without a valid one."""
    parser = Parser(prog="python -m openhands_rl_plugin.cli.rollout", description=__doc__)
    add_arguments(parser)
    return ended(lambda: run_command(sys.modules[__name__], parser, argv))


async def run(args: argparse.Namespace) -> int:
    """Roll it out; exit code 3 without a valid episode."""
    # Otherwise OpenHands logs every step.
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    try:
        with redirect_stdout(sys.stderr):
            shown = (await _play(args)).model_dump(mode="json")
        if (failure := shown["failure"]) is not None:  # errors of others repeat addresses with passwords
            failure["message"] = sayable(failure["message"])
    except RLError as error:  # nothing was rolled out, or nothing could be stored
        kind = error.kind.value if isinstance(error, EpisodeError) else "configuration"
        failure = {"kind": kind, "message": sayable(str(error)), "boundary": "rollout.start"}
        shown = {"schema_version": 1, "reward": None, "failure": failure, "segments": []}
        print("\n".join(f"error: {line}" for line in sayable(str(error)).splitlines()), file=sys.stderr)
    print(json.dumps(shown))
    return 0 if shown["failure"] is None else INVALID


async def _play(args: argparse.Namespace) -> PlayedRollout:
    options = read_fields(args, PlayOptions)
    try:
        task = json.loads(sys.stdin.read()) if args.task == "-" else args.task
    except ValueError as error:
        raise ConfigError(f"--task -: standard input is not JSON: {error}") from error
    if args.task == "-" and not isinstance(task, dict):
        raise ConfigError("--task -: standard input is no JSON object")
    async with open_store(args.store, create=True) if args.store else nullcontext() as storage:
        return await play(task, options, storage=storage)


if __name__ == "__main__":
    sys.exit(program(main))

"""Options of the commands that read stored episodes, and the types of options."""

from __future__ import annotations

import argparse
import getpass
import json
from datetime import datetime

from openhands_rl_plugin.cli.options.numbers import finite, natural
from openhands_rl_plugin.cli.options.stores import STORE_HELP
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import SEARCHED, TrajectoryFilter
from openhands_rl_plugin.core.types import FailureKind, JsonObject, StopReason


def add_store(parser: argparse.ArgumentParser) -> None:
    """``STORE``."""
    parser.add_argument("store", metavar="STORE", help=STORE_HELP)


def add_skip_damaged(parser: argparse.ArgumentParser) -> None:
    """``--skip-damaged``, the ``skip_damaged`` of ``open_store``."""
    parser.add_argument(
        "--skip-damaged",
        action="store_true",
        help="leave out the episodes and scores that cannot be read any more, and list them on standard error",
    )


def add_filters(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``TrajectoryFilter`` that picks episodes, and ``--skip-damaged``."""
    add_skip_damaged(parser)
    group = parser.add_argument_group("filters", "Every filter that is given must match; bounds are inclusive.")
    group.add_argument("--run", "--run-id", dest="run", metavar="ID", help="episodes of this run")
    group.add_argument("--group", metavar="ID", help="episodes of this group of attempts at one task")
    group.add_argument("--task", metavar="ID", help="episodes of this task")
    group.add_argument("--environment", metavar="NAME", help="episodes in this environment")
    group.add_argument("--split", metavar="NAME", help="episodes of tasks of this split, such as train or heldout")
    group.add_argument("--strategy", metavar="NAME", help="episodes of this rollout strategy, such as ReAct")
    group.add_argument("--adapter", metavar="NAME", help="sampled from a version of this adapter")
    group.add_argument("--policy-version", type=natural, metavar="VERSION", help="sampled from this version number")
    group.add_argument("--stop", choices=[each.value for each in StopReason], help="why the episode ended")
    group.add_argument(
        "--failed", action=argparse.BooleanOptionalAction, help="only failed episodes, or only those without failure"
    )
    group.add_argument("--failure", choices=[each.value for each in FailureKind], help="what the episode failed of")
    group.add_argument("--min-reward", type=finite, metavar="REWARD", help="lowest reward")
    group.add_argument("--max-reward", type=finite, metavar="REWARD", help="highest reward")
    group.add_argument(
        "--since",
        type=_time,
        metavar="TIME",
        help="ended at this local time or later: 2025-01-31T12:00, or seconds since 1970",
    )
    group.add_argument("--until", type=_time, metavar="TIME", help="ended at this time or before")
    searched = ", ".join(name.removesuffix("_id").replace("_", " ") for name in SEARCHED)
    group.add_argument("--contains", metavar="TEXT", help=f"with this text in one of {searched}")
    group.add_argument("--labelled", metavar="TEXT", help="with this tag, or a label of this kind, such as verdict")
    ended = group.add_mutually_exclusive_group()
    ended.add_argument("--unfinished", action="store_true", help="only episodes that have not ended")
    ended.add_argument("--all", action="store_true", help="also episodes that have not ended")


def filter_of(args: argparse.Namespace) -> TrajectoryFilter:
    """The filter that the options give. Raises ``ConfigError`` when nothing can match."""
    for low, high, what in (("min_reward", "max_reward", "reward"), ("since", "until", "time")):
        bounds = getattr(args, low), getattr(args, high)
        if None not in bounds and bounds[0] > bounds[1]:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in (low, high))
            raise ConfigError(f"{options}: no {what} lies between {bounds[0]:g} and {bounds[1]:g}; swap them")
    # An episode that has not ended stopped as "unfinished", whatever else is asked for.
    unfinished = args.unfinished or args.stop == StopReason.UNFINISHED
    return TrajectoryFilter(
        run_id=args.run,
        group_id=args.group,
        task_id=args.task,
        environment=args.environment,
        split=args.split,
        strategy=args.strategy,
        adapter=args.adapter,
        policy_version=args.policy_version,
        stop=StopReason(args.stop) if args.stop else None,
        failed=args.failed,
        failure_kind=FailureKind(args.failure) if args.failure else None,
        finished=False if unfinished else None if args.all else True,
        reward_at_least=args.min_reward,
        reward_at_most=args.max_reward,
        since=args.since,
        until=args.until,
        contains=args.contains,
        label=args.labelled,
    )


def add_reward(parser: argparse.ArgumentParser) -> None:
    """``--reward``: which scores stand as rewards."""
    about = (
        "take the scores of this reward as the rewards: human, verifier, tests, ... (default: the newest judgement of "
    )
    parser.add_argument("--reward", metavar="NAME", help=f"{about}the outcome, or else the return)")


def author() -> str:
    """Who judges, as this machine knows the user; empty where it does not."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def json_object(text: str) -> JsonObject:
    """The options of a plugin, as an option's type."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError('must be a JSON object, such as {"threshold": 0.5}')
    return found


def _time(text: str) -> float:
    """Seconds since 1970, or a local date and time."""
    try:
        return finite(text)
    except argparse.ArgumentTypeError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise argparse.ArgumentTypeError(
            f"must be like 2025-01-31T12:00, or seconds since 1970; got {text!r}"
        ) from error

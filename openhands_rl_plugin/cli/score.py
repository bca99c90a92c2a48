"""``openhands-rl score STORE``: judge stored episodes with any reward, a trained verifier among them."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.stored import add_filters, add_store, filter_of
from openhands_rl_plugin.cli.options.stores import open_store
from openhands_rl_plugin.cli.train.reward import json_options
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import Reward

if TYPE_CHECKING:
    from openhands_rl_plugin.rollout.rescoring import ScoreProgress
    from openhands_rl_plugin.rollout.scoring import ScoreReport

HELP = "judge stored episodes with a reward or a verifier"
RESUME = "what was scored is kept; the same command goes on with the rest"
EPILOG = """examples:
  openhands-rl score ./trajectories --reward success
  openhands-rl score ./trajectories --reward success --options '{"threshold": 0.5}' --run night-3
  openhands-rl score ./trajectories --verifier ./adapters/verifier-v000001
  openhands-rl score ./trajectories --verifier ./adapters/verifier-v000001 --base-url http://127.0.0.1:8100/v1

Scores are appended; episodes that have one of the same version are skipped, and the newest score is the one that
listings show. Attempts at one task are judged together, so that a verifier computes what they share once.
"""
_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The store, the reward or the verifier, and the filters."""
    add_store(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--reward", metavar="NAME", help="return, success, matching, ..., or module:Class")
    what.add_argument("--verifier", metavar="DIR", help="the directory of a version that `train --verifier` made")
    parser.add_argument(
        "--options", type=json_options, default={}, metavar="JSON", help="the reward's options, an object"
    )
    parser.add_argument("--model", metavar="DIR", help="of a verifier: its base model, where that has moved")
    parser.add_argument("--base-url", metavar="URL", help="of a verifier: ask this server instead of loading the model")
    parser.add_argument("--served-model", metavar="NAME", help="its name there (default: that of the directory)")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the server's key")
    parser.add_argument("--dry-run", action="store_true", help="only say how many episodes would be judged")
    add_filters(parser)


def run(args: argparse.Namespace) -> int:
    """Score. Exit code 1 when nothing could be judged. Raises ``RLError`` for wrong options, stores and servers."""
    return asyncio.run(_score(args))


async def _score(args: argparse.Namespace) -> int:
    from openhands_rl_plugin.rollout.rescoring import rescore

    reward = _reward(args)
    async with open_store(args.store) as storage:
        with _progress() as advanced:
            report = await rescore(storage, reward, filter_of(args), on_progress=advanced, dry_run=args.dry_run)
    _say(report, reward, dry_run=args.dry_run)
    return 0 if report.scored or report.already_scored or not report.unscored else 1


def _reward(args: argparse.Namespace) -> Reward:
    names = ("model", "base_url", "served_model", "api_key_env")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.verifier:
        return build("rewards", "verifier", {"adapter": args.verifier, **given, **args.options})
    if given:
        option = min(given).replace("_", "-")
        raise ConfigError(
            f"--{option} is for a verifier: give --verifier DIR, or put a reward's options into --options"
        )
    return build("rewards", args.reward, args.options)


def _say(report: ScoreReport, reward: Reward, *, dry_run: bool) -> None:
    print(f"{reward.version}: {report.scored} {'to score' if dry_run else 'scored'}, {report.already_scored} already")
    if report.unscored:
        print(f"{len(report.unscored)} without a score:")
        reasons = Counter(f"{failure.kind}: {failure.message}" for _, failure in report.unscored)
        for reason, count in reasons.most_common(_SHOWN):
            print(f"  {count} x {reason}")
        if len(reasons) > _SHOWN:
            print(f"  and {len(reasons) - _SHOWN} other reasons")


@contextmanager
def _progress() -> Iterator[Callable[[ScoreProgress], None]]:
    """A bar with the time left on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("scoring", total=None)

        def advanced(at: ScoreProgress) -> None:
            progress.update(task, completed=at.done, total=at.total)

        yield advanced

"""``openhands-rl score``: score stored episodes with a reward, a verifier, what people labelled, or by hand.

examples:
  openhands-rl score ./trajectories --id 3f2a --value 1 --note "all tests pass"
  openhands-rl score ./trajectories --id 3f2a --id 77b0 --value 0
  openhands-rl score ./trajectories --reward human
  openhands-rl score ./trajectories --reward success
  openhands-rl score ./trajectories --reward success --options '{"threshold": 0.5}' --run night-3
  openhands-rl score ./trajectories --verifier ./adapters/verifier-v000001
  openhands-rl score ./trajectories --verifier ./adapters/verifier-v000001 --base-url http://127.0.0.1:8100/v1

Scores are appended. Episodes that already have a score of the same version are skipped. Listings, and the rewards
return, success and recorded, go by the newest judgement of the outcome; what a verifier says, and what people labelled
(human), never takes its place.

--value is a score that you ask for: it counts at once. Labels (openhands-rl label STORE, the studio) count only where
--reward human is asked for: what more than half of an episode's labellers said, none after a tie. The same command
again scores what was labelled since, and withdraws what was taken back.

Attempts at one task are scored together, so that a verifier computes their common prefix once.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options import add_filters, add_store, author, filter_of, finite, json_object, open_store
from openhands_rl_plugin.cli.terminal import sayable
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.types import StopReason

if TYPE_CHECKING:
    from openhands_rl_plugin.rollout.scoring import ScoreReport


RESUME = "finished scores are kept; the same command scores the rest"
_SHOWN = 5
_WITHDRAW = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The store, the reward or the verifier, and the filters."""
    add_store(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--reward", metavar="NAME", help="name of a reward (human, return, success, matching, ...), or module:Class"
    )
    what.add_argument("--verifier", metavar="DIR", help="folder of a version trained by `train --verifier`")
    value = "your own score of the episodes of --id: 1 solved, 0 not, or any number; none withdraws the last one"
    what.add_argument("--value", type=_verdict, metavar="REWARD", help=value)
    own = "an episode's id, or a unique prefix of it (for --value; may be repeated)"
    parser.add_argument("--id", action="append", dest="ids", metavar="ID", help=own)
    parser.add_argument("--note", default="", metavar="TEXT", help="why, kept with --value")
    parser.add_argument("--options", type=json_object, default={}, metavar="JSON", help="the reward's options")
    parser.add_argument("--model", metavar="DIR", help="verifier: folder of its base model, if it has moved")
    parser.add_argument("--base-url", metavar="URL", help="verifier: query this server instead of loading the model")
    parser.add_argument(
        "--served-model", metavar="NAME", help="verifier: its model name on the server (default: the folder's name)"
    )
    parser.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable with the server's API key")
    parser.add_argument("--dry-run", action="store_true", help="only print how many episodes would be scored")
    add_filters(parser)


async def run(args: argparse.Namespace) -> int:
    """Score. Exit code 1 when no episode could be scored. Raises ``RLError`` for wrong options, stores and servers."""
    if args.value is not None:
        return await _say(args)
    if args.ids or args.note:
        raise ConfigError("--id and --note go with a score by hand: give --value REWARD too, or choose by filters")
    from openhands_rl_plugin.rollout.scoring import rescore
    from openhands_rl_plugin.trajectories.view.terminal import progress_bar

    reward = _reward(args)
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        with progress_bar("scoring") as bar:
            report = await rescore(
                storage,
                reward,
                filter_of(args),
                on_progress=lambda at: bar.update(at.done, at.total),
                dry_run=args.dry_run,
            )
    _print_report(report, reward, dry_run=args.dry_run)
    return 0 if report.scored or report.already_scored or report.withdrawn or not report.unscored else 1


async def _say(args: argparse.Namespace) -> int:
    from openhands_rl_plugin.rollout.scoring import give_score
    from openhands_rl_plugin.trajectories.view.episode import find_episode

    if not args.ids:
        raise ConfigError("--value is a score of an episode: give its --id; `openhands-rl list STORE` shows them")
    value = None if args.value == _WITHDRAW else float(args.value)
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        # All are looked up first, so that a wrong id leaves nothing half done.
        found = [(await find_episode(storage, each))[0] for each in args.ids]
        for episode in found:
            if episode.stop is StopReason.UNFINISHED:
                raise ConfigError(f"{episode.id} has not ended yet: judge it when it has")
            if episode.failure is not None:
                raise ConfigError(f"{episode.id} failed ({episode.failure.kind}), so that no score would count")
        if args.dry_run:
            print(f"{len(found)} to score")
            return 0
        for episode in found:
            await give_score(storage, episode.id, value, note=args.note, author=author())
            print(f"{episode.id}: {'score withdrawn' if value is None else f'{value:g}'}")
    return 0


def _verdict(text: str) -> str:
    return text if text == _WITHDRAW else str(finite(text))


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


def _print_report(report: ScoreReport, reward: Reward, *, dry_run: bool) -> None:
    withdrawn = f", {report.withdrawn} {'to withdraw' if dry_run else 'withdrawn'}" if report.withdrawn else ""
    scored = f"{report.scored} {'to score' if dry_run else 'scored'}"
    print(f"{reward.version}: {scored}, {report.already_scored} already{withdrawn}")
    if report.unscored:
        print(f"{len(report.unscored)} without a score:")
        reasons = Counter(
            f"{failure.kind}: {failure.message.removeprefix('GraderError: ')}" for _, failure in report.unscored
        )
        for reason, count in reasons.most_common(_SHOWN):
            print(f"  {count} x {sayable(reason)}")
        if len(reasons) > _SHOWN:
            print(f"  and {len(reasons) - _SHOWN} other reasons")

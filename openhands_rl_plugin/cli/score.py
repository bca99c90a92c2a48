"""``openhands-rl score``: score stored episodes with a reward, a verifier, people's labels, or by hand.

examples:
  openhands-rl score ./trajectories --id 3f2a --value 1 --note "all tests pass"
  openhands-rl score ./trajectories --id 3f2a --id 77b0 --value 0
  openhands-rl score ./trajectories --id 3f2a --better-than 77b0 --note "a smaller change"
  openhands-rl score ./trajectories --reward human
  openhands-rl score ./trajectories --reward success
  openhands-rl score ./trajectories --reward success --set threshold=0.5 --run night-3
  openhands-rl score ./trajectories --verifier ./adapters/verifier-v000001
  openhands-rl score ./trajectories --verifier ./adapters/verifier-v000001 \\
      --set base_url=http://127.0.0.1:8100/v1

Scores are appended. Episodes that already have a score of the same version are skipped. Listings, and the rewards
return, success and recorded, go by the newest judgement of the outcome; what a verifier says, and what people labelled
(human), never takes its place.

--value is a score of your own: it counts at once. Labels (of the studio) count only where --reward human is asked for:
the verdict of more than half of an episode's labellers, none after a tie. The same command again scores what was
labelled since, and withdraws what was taken back. `train --reward human` learns from them; `train --algorithm dpo` and
`export --format preferences` use --better-than before the rewards of the same two.

Attempts at one task are scored together, so that a verifier computes their common prefix once.
"""

from __future__ import annotations

import argparse
from collections import Counter

from openhands_rl_plugin.apps.stores import open_store
from openhands_rl_plugin.cli.options import add_filters, add_store, author, filter_of, finite
from openhands_rl_plugin.cli.terminal import sayable
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.config.toml import changed
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import LabelKind
from openhands_rl_plugin.rollout.scoring import add_label, check_judged, give_score, rescore
from openhands_rl_plugin.trajectories.view import find_episode, progress_bar

RESUME = "finished scores are kept; the same command goes on with the rest"
_WITHDRAW = "none"


def score(text: str) -> str:
    return text if text == _WITHDRAW else str(finite(text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The store, the reward or the verifier, and the filters."""
    add_store(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    name = "name of a reward (human, return, success, matching, ...), or module:Class"
    what.add_argument("--reward", metavar="NAME", help=name)
    what.add_argument("--verifier", metavar="DIR", help="folder of a version trained by `train --verifier`")
    value = "your own score of the episodes of --id: 1 solved, 0 not, or any number; none withdraws the last one"
    what.add_argument("--value", type=score, metavar="REWARD", help=value)
    what.add_argument("--better-than", metavar="ID", help="keep that --id is better than this attempt at the same task")
    own = "an episode's id, or a unique prefix of it (may be repeated)"
    parser.add_argument("--id", action="append", dest="ids", default=[], metavar="ID", help=own)
    parser.add_argument("--note", default="", metavar="TEXT", help="why, kept with --value or --better-than")
    parser.add_argument("--author", default=author(), metavar="NAME", help="who judges (default: the user's name)")
    about = "options of the reward, such as threshold=0.5; of a verifier: model=DIR, or base_url=URL of a server"
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=about)
    parser.add_argument("--dry-run", action="store_true", help="only print how many episodes would be scored")
    add_filters(parser)


async def run(args: argparse.Namespace) -> int:
    """Score. Exit code 1 when no episode could be scored. Raises ``RLError`` for wrong options, stores and servers."""
    by_hand = not (args.reward or args.verifier)
    if by_hand != bool(args.ids) or (args.dry_run if by_hand else args.note):
        raise ConfigError("--id and --note go with --value or --better-than, --dry-run with --reward or --verifier")
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        if by_hand:
            return await _by_hand(args, storage)
        chosen = {"adapter": args.verifier} if args.verifier else {}
        reward = build("rewards", args.reward or "verifier", {**chosen, **changed(args.set)})
        with progress_bar("scoring") as bar:
            report = await rescore(storage, reward, filter_of(args), on_progress=bar.update, dry_run=args.dry_run)
    done = ("to score", "to withdraw") if args.dry_run else ("scored", "withdrawn")
    withdrawn = f", {report.withdrawn} {done[1]}" if report.withdrawn else ""
    print(f"{reward.version}: {report.scored} {done[0]}, {report.already_scored} already{withdrawn}")
    why = (f"{failure.kind}: {failure.message.removeprefix('GraderError: ')}" for _, failure in report.unscored)
    for reason, count in Counter(why).most_common():
        print(f"  without a score, {count} x {sayable(reason)}")
    return 0 if report.scored or report.already_scored or report.withdrawn or not report.unscored else 1


async def _by_hand(args: argparse.Namespace, storage: TrajectoryStorage) -> int:
    """Give ``--value`` to the episodes of ``--id``, or keep that they are better than that of ``--better-than``."""
    # All are looked up first, so that a wrong id leaves nothing half done.
    found = [(await find_episode(storage, each))[0] for each in [*args.ids, *filter(None, [args.better_than])]]
    others = found[len(args.ids) :]
    for episode in found[: len(args.ids)]:
        check_judged(episode, *others)
    value = None if args.value in (None, _WITHDRAW) else float(args.value)
    for episode in found[: len(args.ids)]:
        for other in others:
            given = {"value": 1.0, "other": other.id, "text": args.note, "author": args.author}
            await add_label(storage, episode.id, LabelKind.PREFERENCE, **given)
            print(f"{episode.id}: better than {other.id}")
        if not others:
            await give_score(storage, episode.id, value, note=args.note, author=args.author)
            print(f"{episode.id}: {'score withdrawn' if value is None else f'{value:g}'}")
    return 0

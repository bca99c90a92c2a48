"""``openhands-rl score``: score stored episodes with a reward, a verifier, what people labelled, or by hand.

examples:
  openhands-rl score ./trajectories --id 3f2a --value 1 --note "all tests pass"
  openhands-rl score ./trajectories --id 3f2a --id 77b0 --value 0
  openhands-rl score ./trajectories --id 3f2a --better-than 77b0 --note "a smaller change"
  openhands-rl score ./trajectories --ask --run night-3 --actions 10
  openhands-rl score ./trajectories --ask pairs
  openhands-rl score ./trajectories --reward human
  openhands-rl score ./trajectories --reward success
  openhands-rl score ./trajectories --reward success --options '{"threshold": 0.5}' --run night-3
  openhands-rl score ./trajectories --verifier ./adapters/verifier-v000001
  openhands-rl score ./trajectories --verifier ./adapters/verifier-v000001 --base-url http://127.0.0.1:8100/v1

Scores are appended. Episodes that already have a score of the same version are skipped. Listings, and the rewards
return, success and recorded, go by the newest judgement of the outcome; what a verifier says, and what people labelled
(human), never takes its place.

--value is a score that you ask for: it counts at once. Labels (--ask, the studio) count only where --reward human is
asked for: what more than half of an episode's labellers said, none after a tie. The same command again scores what was
labelled since, and withdraws what was taken back. `train --reward human` learns from them.

--ask shows the task, the last actions, and the change (or the last answer) of one episode after another. Answer y, n, a
number, s (skip), u (undo your newest label), m TEXT (a comment) or q (quit); text behind a verdict is kept as a note:
`n broke the tests`. Episodes that failed, that were judged or labelled before or that were skipped are not shown;
--again shows them too. --ask pairs asks which of two attempts at one task is better: 1, 2, = (equally good), s, u or q;
`train --algorithm dpo` and `export --format preferences` use the answers before the rewards of the same two.

Attempts at one task are scored together, so that a verifier computes their common prefix once.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from openhands_rl_plugin.cli.options import (
    add_filters,
    add_store,
    author,
    filter_of,
    finite,
    json_object,
    open_store,
    option_of,
    positive,
)
from openhands_rl_plugin.cli.terminal import sayable
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.judgements import (
    ALIKE,
    asked_in_common,
    labels_of,
    newest_outcome,
    patch_of,
    preferences,
    standing,
    verdicts,
)
from openhands_rl_plugin.core.messages import one_line, visible
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter
from openhands_rl_plugin.core.types import StopReason, Trajectory
from openhands_rl_plugin.rollout.scoring import SKIPPED, ScoreReport, add_label, give_score, rescore, undo
from openhands_rl_plugin.trajectories.view import console, find_episode, message_text, progress_bar, shortened

RESUME = "finished scores and answers are kept; the same command goes on with the rest"
_SHOWN, _WITHDRAW, _MOST, _WIDTH = 5, "none", (60, 6000), 160


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
    ask = "ask you about stored episodes, or which of two attempts at a task is better; the answers are kept as labels"
    what.add_argument("--ask", nargs="?", const="episodes", choices=["episodes", "pairs"], help=ask)
    what.add_argument("--better-than", metavar="ID", help="keep that --id is better than this attempt at the same task")
    what.add_argument("--undo", action="store_true", help="take back your newest label, whatever it was")
    own = "an episode's id, or a unique prefix of it (for --value; may be repeated)"
    parser.add_argument("--id", action="append", dest="ids", metavar="ID", help=own)
    parser.add_argument("--note", default="", metavar="TEXT", help="why, kept with --value or --better-than")
    parser.add_argument("--author", default=author(), metavar="NAME", help="who judges (default: the user's name)")
    last = "with --ask: show so many of the last actions"
    parser.add_argument("--actions", type=positive, default=5, metavar="COUNT", help=last)
    again = "with --ask: also what was judged before, and what was skipped"
    parser.add_argument("--again", action="store_true", help=again)
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
    if (args.ids or args.note) and (args.value is None and not args.better_than):
        raise ConfigError("--id and --note go with a score by hand: give --value REWARD too, or choose by filters")
    reward = _reward(args) if args.reward or args.verifier else None
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        if args.value is not None:
            return await _give(args, storage)
        if reward is None:
            if args.undo:
                return 0 if await _undo(args, storage) else 1
            return await _prefer(args, storage) if args.better_than else await _ask(args, storage)
        with progress_bar("scoring") as bar:
            report = await rescore(
                storage,
                reward,
                filter_of(args),
                on_progress=bar.update,
                dry_run=args.dry_run,
            )
    _print_report(report, reward, dry_run=args.dry_run)
    return 0 if report.scored or report.already_scored or report.withdrawn or not report.unscored else 1


async def _give(args: argparse.Namespace, storage: TrajectoryStorage) -> int:
    if not args.ids:
        raise ConfigError("--value is a score of an episode: give its --id; `openhands-rl list STORE` shows them")
    value = None if args.value == _WITHDRAW else float(args.value)
    # All are looked up first, so that a wrong id leaves nothing half done.
    found = [(await find_episode(storage, each))[0] for each in args.ids]
    _refuse_unjudgeable(found)
    if args.dry_run:
        print(f"{len(found)} to score")
        return 0
    for episode in found:
        await give_score(storage, episode.id, value, note=args.note, author=args.author)
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
        option = option_of(min(given))
        raise ConfigError(f"{option} is for a verifier: give --verifier DIR, or put a reward's options into --options")
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


# --- questions of a person

_ASK = {
    False: ("solved? [y]es, [n]o, a number, [s]kip, [u]ndo, co[m]ment, [q]uit: ", ("y", "n", "s", "u", "m")),
    True: ("which is better? [1], [2], [=] alike, [s]kip, [u]ndo, [q]uit: ", ("1", "2", "=", "s", "u")),
}
_VERDICTS = {"y": 1.0, "n": 0.0}


async def _ask(args: argparse.Namespace, storage: TrajectoryStorage) -> int:
    """Ask about each episode, or about neighbouring attempts at each task, until all are judged or the user quits.

    Of two attempts the policy is hidden and the sides are shuffled, so that neither sways the answer.
    """
    pairs = args.ask == "pairs"
    where = filter_of(args).model_copy(update={"finished": True, "failed": False})
    groups: dict[object, list[str]] = defaultdict(list)
    if pairs:
        async for trajectory, _ in storage.find(where):
            groups[asked_in_common(trajectory.task)].append(trajectory.id)
        questions: list[tuple[str, ...]] = [pair for attempts in groups.values() for pair in pairwise(attempts)]
    else:
        questions = [(summary.id,) async for summary in storage.summaries(where)]
    question, words = _ASK[pairs]
    judged, before, at, again = 0, 0, 0, args.again
    while at < len(questions):
        if not (episodes := await _open(storage, questions[at], again=again)):
            before, at, again = before + 1, at + 1, args.again
            continue
        _show(episodes, args.actions, f"{at + 1} of {len(questions)}")
        ids = [each.id for each in episodes]
        while (answer := _answer(question, words, numbers=not pairs)) is not None and answer[0] == "m":
            await add_label(storage, ids[0], LabelKind.COMMENT, text=answer[1], author=args.author)
        if answer is None:
            break
        word, note = answer
        if word == "u":
            label = await _undo(args, storage)
            judged -= label is not None and label.value is not None and judged > 0
            about = {label.trajectory_id, label.other} - {None} if label is not None else set()
            if (back := next((n for n, each in enumerate(questions) if {*each} == about), None)) is not None:
                at, again = back, True
            continue
        other = ids[1] if pairs else None
        if word == "s":
            await add_label(storage, ids[0], LabelKind.TAG, other=other, text=SKIPPED, author=args.author)
        elif pairs:
            better, worse = reversed(ids) if word == "2" else ids
            given = {"value": ALIKE if word == "=" else 1.0, "other": worse, "text": note, "author": args.author}
            await add_label(storage, better, LabelKind.PREFERENCE, **given)
        else:
            value = _VERDICTS[word] if word in _VERDICTS else float(word)
            await add_label(storage, ids[0], LabelKind.VERDICT, value=value, text=note, author=args.author)
        judged, at, again = judged + (word != "s"), at + 1, args.again
    print(f"{judged} labelled of {len(questions)} that match, {before} judged before; answers are kept")
    return 0


async def _open(storage: TrajectoryStorage, ids: tuple[str, ...], *, again: bool) -> list[Trajectory]:
    """The episode, or both in random order; none if they were judged or skipped before, or look the same.

    Read one question at a time: others may label the same store.
    """
    found = [pair async for pair in storage.find(TrajectoryFilter(ids=ids))]
    labels = standing(await labels_of(storage, ids))
    skipped = {frozenset({each.trajectory_id, each.other} - {None}) for each in labels if each.kind is LabelKind.TAG}
    if len(ids) == 1:
        judged = verdicts(labels) or any(newest_outcome(scores) is not None for _, scores in found)
    else:
        judged = frozenset(ids) in preferences(labels)
    if not again and (judged or frozenset(ids) in skipped):
        return []
    episodes = [trajectory for trajectory, _ in found]
    if len(ids) == 2 and (len(episodes) < 2 or _content(episodes[0]) == _content(episodes[1])):
        return []
    # The same order each time: who comes back to a pair finds it as it was.
    random.Random("\0".join(sorted(ids))).shuffle(episodes)
    return episodes


def _content(trajectory: Trajectory) -> tuple[object, ...]:
    return trajectory.messages(), trajectory.evidence


def _show(episodes: Sequence[Trajectory], actions: int, heading: str) -> None:
    """What was asked, what was done last, and the change, or the last answer."""
    task = episodes[0].task.instruction or next((m.content for m in episodes[0].messages() if m.role == "user"), "")
    _write(shortened(task or "", *_MOST), "cyan")
    for side, episode in enumerate(episodes, 1):
        what = f"{episode.id} · {episode.policy.served_name} · {episode.stop.value}"
        _write(f"── {heading}: {side if len(episodes) > 1 else what} ──", "bold")
        messages = episode.messages()
        turns = [at for at, message in enumerate(messages) if message.role == "assistant"][-actions:]
        for message in messages[turns[0] :] if turns else ():
            style = "green" if message.role == "assistant" else "dim"
            _write(f"  {message.role}: {one_line(message_text(message), _WIDTH)}", style)
        if patch := patch_of(episode):
            _write(shortened(patch, *_MOST), "yellow")
        elif turns:
            _write(shortened(message_text(messages[turns[-1]]), *_MOST), "green")


def _write(text: str, style: str) -> None:
    console().print(Text(visible(text), style), soft_wrap=True)


def _answer(question: str, words: Sequence[str], *, numbers: bool) -> tuple[str, str] | None:
    """One of ``words``, or a number, and the note behind it; ``None`` to quit, also at the end of the input."""
    while True:
        try:
            word, _, note = input(question).strip().partition(" ")
        except EOFError:
            return None
        if word == "q":
            return None
        if word in words or (numbers and _is_number(word)):
            return word, note.strip()
        print(f"{word!r} is none of {', '.join((*words, 'q'))}{' or a number' if numbers else ''}")


def _is_number(word: str) -> bool:
    try:
        finite(word)
    except argparse.ArgumentTypeError:
        return False
    return True


async def _undo(args: argparse.Namespace, storage: TrajectoryStorage) -> Label | None:
    """Take back the author's newest label, and print that."""
    if (label := await undo(storage, author=args.author)) is None:
        print("there is nothing to take back")
        return None
    about = label.trajectory_id if label.other is None else f"{label.trajectory_id} and {label.other}"
    what = label.text if label.kind is LabelKind.TAG else label.kind.value
    print(f"taken back: {what}{'' if label.value is None else f' {label.value:g}'} of {about}")
    return label


async def _prefer(args: argparse.Namespace, storage: TrajectoryStorage) -> int:
    """Keep that the episode of ``--id`` is better than that of ``--better-than``."""
    if len(args.ids or ()) != 1:
        raise ConfigError("--better-than compares two attempts: give the better one as --id")
    one, other = [(await find_episode(storage, each))[0] for each in (args.ids[0], args.better_than)]
    _refuse_unjudgeable((one, other))
    if one.id == other.id:
        raise ConfigError(f"{one.id} is one episode: give the ids of two")
    if asked_in_common(one.task) != asked_in_common(other.task):
        raise ConfigError(f"{one.id} and {other.id} are of two tasks: only attempts at one task can be compared")
    given = {"value": 1.0, "other": other.id, "text": args.note, "author": args.author}
    await add_label(storage, one.id, LabelKind.PREFERENCE, **given)
    print(f"{one.id}: better than {other.id}")
    return 0


def _refuse_unjudgeable(episodes: Sequence[Trajectory]) -> None:
    for each in episodes:
        if each.stop is StopReason.UNFINISHED:
            raise ConfigError(f"{each.id} has not ended yet: judge it when it has")
        if each.failure is not None:
            raise ConfigError(f"{each.id} failed ({each.failure.kind}), so that no score would count")

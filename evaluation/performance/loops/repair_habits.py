"""How a policy works on repair tasks: whether it runs the tests before it finishes, and what follows a failed edit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from openhands_rl_plugin.contrib.repair.rows import RUN_TESTS
from openhands_rl_plugin.core.statistics import Estimate, wilson
from openhands_rl_plugin.core.types import Trajectory

_FAILED = re.compile(r"(\d+) failed, \d+ passed")


class Habits(NamedTuple):
    """Shares over episodes. ``finished``: of all, those that called finish. ``tested``: of those, the ones that ran the
    tests after their last edit. ``failed``: of all, those with a command whose edits were not made, or of which none
    made the tests pass. ``recovered``: of those, the ones that are resolved."""

    finished: Estimate
    tested: Estimate
    failed: Estimate
    recovered: Estimate

    def line(self) -> str:
        """The shares with their counts."""
        parts = zip(("finish", "run the tests before", "fail with an edit", "recover"), self, strict=True)
        return ", ".join(f"{name} {share.mean:.2f} of {share.n}" if share.n else f"{name} -" for name, share in parts)


def habits(episodes: Sequence[tuple[Trajectory, bool]]) -> Habits:
    """Of episodes with whether their tests passed in the end."""
    finished = tested = failed = recovered = 0
    for trajectory, resolved in episodes:
        ended, was_tested, erred = _looked_at(trajectory)
        finished += ended
        tested += ended and was_tested
        failed += erred
        recovered += erred and resolved
    return Habits(
        wilson(finished, len(episodes)),
        wilson(tested, finished),
        wilson(failed, len(episodes)),
        wilson(recovered, failed),
    )


def _looked_at(trajectory: Trajectory) -> tuple[bool, bool, bool]:
    """Whether it finished, whether the tests ran after the last edit, and whether an edit failed."""
    ended = tested = erred = False
    edited = False
    answer = ""
    for at in trajectory.path():
        node = trajectory.nodes[at]
        text = str(node.message.content or "")
        if node.sampled:
            answer = text
            ended = "<function=finish>" in text
            if _is_edit(text):
                edited, tested = True, False
            continue
        ran = RUN_TESTS in answer and " passed" in text
        tested |= ran
        failed = _FAILED.findall(text)[-1:] not in ([], ["0"])
        erred |= edited and failed if ran else _is_edit(answer) and "has been edited" not in text
        answer = ""
    return ended, tested, erred


def _is_edit(answer: str) -> bool:
    """By OpenHands' editor, or by ``sed``, alone or with the tests in the same command."""
    return any(
        each in answer for each in ("<parameter=command>str_replace</parameter>", "sed -i", f"{RUN_TESTS} --edit")
    )

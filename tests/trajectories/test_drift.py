from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from drifting import (
    OTHER_END,
    Answer,
    Server,
    condensed,
    decode,
    play,
    rendered,
    reply,
    trimmed,
    with_spaces_in_json,
    without_thinking,
)

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.types import JsonObject, Message, Trajectory
from openhands_rl_plugin.testing import example_trajectory
from openhands_rl_plugin.trajectories.drift import Cause, breaks_of, drift_of
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

THOUGHT = "<think>I should list the files first.</think>Let me look at it."
PLAIN = [Answer("Let me look at the files."), Answer("Now I know what to do."), Answer("It is done as you said.")]
THINKING = [Answer(THOUGHT), Answer(THOUGHT), Answer("It is done.")]
CALL = reply("I look.", '{"command":"ls"}')
CALLING = [Answer('I look.<call>bash {"command":"ls"}</call>', CALL), *PLAIN]
SPACED = reply("I look.", '{"command": "ls"}')


def parsed_reasoning() -> list[Answer]:
    """A server that takes the reasoning out of the message."""
    apart: JsonObject = {
        "response": {"choices": [{"message": {"reasoning_content": "I should list the files first."}}]}
    }
    return [Answer(THOUGHT, reply("Let me look at it."), metadata=apart), *PLAIN]


def restyled(message: Message) -> tuple[int, ...]:
    """The same text in other tokens: every ``oo`` is one."""
    ids = list(rendered(message))
    while (at := next((at for at in range(len(ids) - 1) if ids[at : at + 2] == [111, 111]), -1)) >= 0:
        ids[at : at + 2] = [999]
    return tuple(ids)


CASES: dict[str, tuple[Cause, Trajectory, int]] = {
    "template strips thinking": (Cause.REASONING, play(Server(history=without_thinking), THINKING), 2),
    "reasoning parser": (Cause.REASONING, play(Server(), parsed_reasoning()), 1),
    "template writes arguments anew": (Cause.ARGUMENTS, play(Server(history=with_spaces_in_json), CALLING), 1),
    "host writes arguments anew": (
        Cause.ARGUMENTS,
        play(Server(), [Answer(CALLING[0].sampled, CALL, SPACED), *PLAIN]),
        1,
    ),
    "condenser": (Cause.CONDENSED, play(Server(), [*PLAIN, *PLAIN], rewrite=condensed, rewrite_at=3), 1),
    "other end token": (Cause.SPECIAL, play(Server(end=(OTHER_END,)), PLAIN), 2),
    "empty thinking in the generation prompt": (
        Cause.GENERATION_PROMPT,
        play(Server(generation_prompt="<think>\n\n</think>\n\n"), PLAIN),
        2,
    ),
    "trailing white space": (Cause.WHITESPACE, play(Server(history=trimmed), [Answer("Let me look.\n\n"), *PLAIN]), 1),
    "other tokens for the same text": (
        Cause.UNKNOWN,
        play(Server(history=restyled), [Answer("A good look."), *PLAIN[1:]]),
        1,
    ),
}


@pytest.mark.parametrize(("cause", "trajectory", "count"), CASES.values(), ids=CASES)
def test_the_cause_of_a_break_is_named(cause: Cause, trajectory: Trajectory, count: int) -> None:
    assert [each.cause for each in breaks_of(trajectory)] == [cause] * count


def test_a_tokenizer_separates_other_tokens_from_another_text() -> None:
    _, trajectory, _ = CASES["other tokens for the same text"]

    def text(ids: object) -> str:
        return decode(list(ids)).replace("<999>", "oo")

    assert [each.cause for each in breaks_of(trajectory, text)] == [Cause.RETOKENISED]


async def pairs(*trajectories: Trajectory) -> AsyncIterator[tuple[Trajectory, tuple[()]]]:
    for trajectory in trajectories:
        yield trajectory, ()


async def test_the_report_adds_up() -> None:
    thinking, calling = CASES["template strips thinking"][1], CASES["template writes arguments anew"][1]
    report = await drift_of(pairs(thinking, calling, example_trajectory(0)), decode)
    assert report["episodes"] == 3
    assert {each["cause"]: (each["breaks"], each["episodes"]) for each in report["causes"]} == {
        Cause.REASONING: (2, 1),
        Cause.ARGUMENTS: (1, 1),
    }
    again = [each["repeated_tokens"] for each in report["causes"]]
    assert again == sorted(again, reverse=True) and report["segments"] == 3 + 3
    example = next(each for each in report["causes"] if each["cause"] is Cause.ARGUMENTS)["examples"][0]
    assert example.startswith("drifting #") and example.endswith(": '' became ' '")
    assert all(each["setting"] for each in report["causes"])


async def stored(folder: Path) -> None:
    async with FileTrajectoryStorage(folder) as storage:
        for at, (_, trajectory, _) in enumerate(CASES.values()):
            await storage.add(trajectory.model_copy(update={"id": f"episode-{at:02d}", "run_id": f"run-{at % 2}"}))


def test_the_command_reads_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(stored(tmp_path))
    assert cli.main(["doctor", "drift", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["episodes"] == len(CASES)
    assert {each["cause"] for each in report["causes"]} == {cause for cause, _, _ in CASES.values()}
    assert cli.main(["doctor", "drift", str(tmp_path), "--run", "run-0"]) == 0
    printed = capsys.readouterr().out
    assert Cause.REASONING in printed and "enable_thinking" in printed
    assert cli.main(["doctor", "drift", str(tmp_path), "--run", "none"]) == 0
    assert "`openhands-rl list STORE --by` says why turns have no token ids" in capsys.readouterr().out
    assert cli.main(["doctor", "drift", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("error: ")

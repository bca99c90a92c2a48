"""What is said of a gym before the run, and of what it earned after it."""

from __future__ import annotations

import shlex
from pathlib import Path

from openhands_rl_plugin.apps.loop.run import LoopResult
from openhands_rl_plugin.apps.loop.summary import evaluations
from openhands_rl_plugin.contrib.improve.gym import Gym, said
from openhands_rl_plugin.core.types import JsonObject

_SAME_FILES = (
    "  the files are too few to be split: both parts read the same ones, so the result says what was learnt of this "
    "code, and less about code that is new",
)


def gym_lines(gym: Gym) -> list[str]:
    """The tasks found, and why others were dropped."""
    survey, parts = gym.survey, []
    for count, fixes, files, what in (
        (gym.counts[0], gym.fixes[0], gym.files[0], "to train on"),
        (gym.counts[1], gym.fixes[1], gym.files[1], "held out"),
    ):
        parts.append(f"{count} {what} ({fixes} past fixes; they change {files} {'files' if files > 1 else 'file'})")
    apart = f"no {gym.split_by} is changed by both"
    return [
        f"tests: {survey.steady} pass in every run, {survey.seconds:.1f} s for one",
        *(f"  {note}" for note in survey.notes()),
        f"tasks: {', '.join(parts)}; {apart}",
        *(_SAME_FILES if gym.split_by == "function" else ()),
        f"  {gym.tried} changes tried; dropped: {said(gym.dropped)}",
    ]


def earned_lines(result: LoopResult) -> list[str]:
    """Success on held-out tasks before and after, each with its 95% interval, and the change."""
    told = []
    measured = evaluations(result.state)
    for one, what in zip((measured[0], measured[-1]), ("before", "after"), strict=True):
        success = one.success
        rate = (
            f"{success.mean:.2f} (95% interval {success.low:.2f} to {success.high:.2f})"
            if success.n
            else "nothing valid"
        )
        told.append(f"held-out tasks {what}: {rate}, {success.n} tasks")
    return [*told, *(change.sentence() for change in result.changes)]


def use_lines(result: LoopResult, model: Path, adapter: str, adapters: Path, *, server: str) -> list[str]:
    """How the adapter is used; ``server``: where it is in use already, empty after a run with a server of its own."""
    if result.state.adapter is None:
        return ["no adapter was made: nothing was learnt"]
    told = [f"adapter: {result.state.adapter} in {adapters}"]
    if server:
        return [*told, f"use it: {result.state.adapter} is served at {server}"]
    where = shlex.join(["--adapters", str(adapters), "--adapter", adapter])
    return [
        *told,
        f"use it: openhands-rl serve --model {shlex.quote(str(model))} --port 8100",
        f"        openhands-rl adapters publish {where} --base-url http://127.0.0.1:8100/v1",
    ]


def earned(result: LoopResult) -> JsonObject:
    """The same for a program: the stages that measured, and the changes."""
    return {
        "evaluations": [one.model_dump(mode="json") for one in evaluations(result.state)],
        "changes": [change.model_dump(mode="json") for change in result.changes],
        "adapter": result.state.adapter,
        "report": str(result.report),
    }

"""A store as a night of training leaves it, for pages and pictures of the studio."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

from evaluation.performance.studio.episodes import Words, coding_episode, long_episode, searched_episode
from openhands_rl_plugin.core.types import Failure, FailureKind, Message, Node, Score, StopReason, Trajectory
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

NOW = 1.78e9
TASKS = ("fix-discount", "fix-orders", "fix-parser", "fix-cache", "fix-config", "fix-rounding")
GONE = Failure(kind=FailureKind.ENVIRONMENT, message="No such file or directory: src", boundary="workspace.step")
LOST = Failure(kind=FailureKind.INFRASTRUCTURE, message="the inference server closed the connection", boundary="llm")


def episodes(words: Words, samples: int = 8) -> Iterator[Trajectory]:
    """Groups of ``samples`` for each task and adapter version; some failed, some were cut short."""
    drawn, at = random.Random(7), 0
    for version in (None, 1, 2, 3):
        for number, task in enumerate(TASKS):
            for sample in range(samples):
                at += 1
                solved = drawn.random() < 0.36 + 0.15 * (version or 0) - 0.07 * number
                failure = GONE if drawn.random() < 0.04 else LOST if drawn.random() < 0.02 else None
                yield coding_episode(
                    words,
                    f"{task}-{'base' if version is None else f'v{version}'}-{sample}",
                    seed=at,
                    task=task,
                    group=f"{task}/{version or 0}",
                    version=version,
                    turns=drawn.randrange(3, 12),
                    reward=None if failure else float(solved) if drawn.random() < 0.8 else round(drawn.random(), 2),
                    failure=failure,
                    stop=StopReason.MAX_TURNS if not failure and drawn.random() < 0.1 else None,
                    finished=NOW - 86_400 + at * 240,
                    breaks=2 if drawn.random() < 0.15 else 0,
                    split="heldout" if sample == 0 else "train",
                )
    yield searched_episode(words, "kettle-mcts", seed=3, finished=NOW - 600)
    yield coding_episode(words, "fix-orders-breaks", seed=5, task="fix-orders", turns=12, breaks=3, finished=NOW - 400)
    long = long_episode(words, "fix-orders-long")
    yield long.model_copy(update={"times": long.times.model_copy(update={"finished": NOW - 300})})


def hostile(identity: str, texts: tuple[str, ...], *, finished: float = NOW) -> Trajectory:
    """An episode every text of which tries to act on the page."""
    made = coding_episode(Words(), identity, seed=1, turns=len(texts), finished=finished)
    text = " ".join(texts)
    nodes = [
        each.model_copy(update={"message": _hostile(each, texts[at % len(texts)])})
        for at, each in enumerate(made.nodes)
    ]
    return made.model_copy(
        update={
            "nodes": tuple(nodes),
            "run_id": text,
            "group_id": text,
            "task": made.task.model_copy(update={"id": text, "instruction": text, "environment": text, "split": text}),
            "strategy": made.strategy.model_copy(update={"name": text, "options": {text: text}}),
            "policy": made.policy.model_copy(update={"base_model": text, "adapter": text}),
            "failure": Failure(kind=FailureKind.MODEL, message=text, boundary=text),
            "evidence": {text: text, "patch": text},
        }
    )


def _hostile(node: Node, text: str) -> Message:
    calls = tuple(call.model_copy(update={"name": text, "arguments": text}) for call in node.message.tool_calls)
    return node.message.model_copy(update={"content": text, "tool_calls": calls})


def seed(folder: Path, samples: int = 8) -> Path:
    """Fill ``folder/store`` and write ``folder/tokenizer``; returns the store's folder."""
    words = Words()

    async def fill() -> None:
        async with FileTrajectoryStorage(folder / "store", durable=False) as storage:
            for at, each in enumerate(episodes(words, samples)):
                await storage.add(each)
                if each.failure is None and each.task.environment == "workspace":
                    reward = each.nodes[-1].reward
                    score = Score(trajectory_id=each.id, reward=reward, reward_version="tests-1", detail={"passed": 14})
                    await storage.add_scores([score])
                if at % 7 == 0 and each.failure is None:
                    opinion = Score(trajectory_id=each.id, reward=0.6, value=0.4, reward_version="verifier-2")
                    await storage.add_scores([opinion])

    asyncio.run(fill())
    words.write_tokenizer(folder / "tokenizer")
    return folder / "store"


if __name__ == "__main__":
    import sys

    from seeded_run import seed_run

    print(seed(Path(sys.argv[1])), seed_run(Path(sys.argv[1])))

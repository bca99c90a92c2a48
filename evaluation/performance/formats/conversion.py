"""How fast recorded trajectories become training sequences, and how many tokens are left to train on.

    python -m evaluation.performance.formats.conversion [--repeats 5] [--peer-python PATH] [--json FILE]

16 trajectories of 30 turns (prompts of 6,000 to 35,000 tokens, 300 sampled a turn) become one sequence each: token ids,
mask and logprobs. ``--peer-python`` is a Python with trl 1.16; its ``_chain_to_sequences`` takes turns with ours in
every repeat and must give the same sequences. Theirs are lists, ours are the tuples of frozen ``Sample`` values. Each
starts from what its recorder keeps: TRL's from whole prompts, which it compares with what it holds; ours from the
differences, because the recorder has compared when the turn was recorded.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.types import (
    Message,
    Node,
    PolicyRef,
    Sample,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Tokens,
    Trajectory,
)
from openhands_rl_plugin.training.data.batch import pack, samples_of
from openhands_rl_plugin.training.data.layout import lay_out

TRAJECTORIES, TURNS = 16, 30
FIRST_PROMPT, OBSERVATION, SAMPLED = 6_000, 700, 300
VOCABULARY = 150_000


class Turn(NamedTuple):
    """The tokens since the last turn, those that were sampled, and their logprobs."""

    delta: list[int]
    sampled: list[int]
    logprobs: list[float]


def recorded(seed: int = 0) -> list[list[Turn]]:
    """The same trajectories in every run; they have nothing in common."""
    source = random.Random(seed)
    return [
        [
            Turn(
                delta=source.choices(range(VOCABULARY), k=OBSERVATION if turn else FIRST_PROMPT),
                sampled=source.choices(range(VOCABULARY), k=SAMPLED),
                logprobs=[-source.random() for _ in range(SAMPLED)],
            )
            for turn in range(TURNS)
        ]
        for _ in range(TRAJECTORIES)
    ]


def trajectory_of(number: int, turns: Sequence[Turn]) -> Trajectory:
    """As the storage gives it back."""
    policy = PolicyRef(base_model="model")
    nodes: list[Node] = []
    for at, turn in enumerate(turns):
        tokens = Tokens(
            extends=at > 0,
            prompt_ids=tuple(turn.delta),
            sampled_ids=tuple(turn.sampled),
            logprobs=tuple(turn.logprobs),
        )
        nodes.append(Node(parent=len(nodes) - 1 if nodes else None, message=Message(role="user", content="...")))
        said = Message(role="assistant", content="...")
        nodes.append(Node(parent=len(nodes) - 1, message=said, sampled=True, tokens=tokens, policy=policy))
    return Trajectory(
        id=str(number),
        run_id="run",
        group_id="group",
        task=Task(id="task", environment="none"),
        strategy=StrategySpec(name="StandardReAct"),
        policy=policy,
        nodes=tuple(nodes),
        head=len(nodes) - 1,
        stop=StopReason.TERMINATED,
        times=Times(started=0.0, finished=1.0),
    )


def convert(trajectories: Sequence[Trajectory]) -> tuple[float, list[Sample]]:
    """Seconds, and the sequences."""
    gc.collect()
    started = time.perf_counter()
    samples = [sample for trajectory in trajectories for sample in samples_of(trajectory)]
    return time.perf_counter() - started, samples


class Peer:
    """TRL's converter in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def convert(self) -> tuple[float, list[list[int]]]:
        """Seconds, and for each sequence its length, its trained tokens and the sum of its ids."""
        self._stdin.write("\n")
        self._stdin.flush()
        answer = json.loads(self._stdout.readline())
        return answer["seconds"], answer["sequences"]


@contextmanager
def peer(python: str | None, turns: Sequence[Sequence[Turn]]) -> Iterator[Peer | None]:
    """The process of the peer, which has the same trajectories in memory."""
    if python is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "turns.json"
        file.write_text(json.dumps(turns), encoding="utf-8")
        command = [python, str(Path(__file__).with_name("conversion_peer.py")), str(file)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield Peer(process)
            assert process.stdin is not None
            process.stdin.close()


def measure(repeats: int, python: str | None) -> dict[str, float]:
    """Medians in milliseconds, and the counts of tokens."""
    turns = recorded()
    trajectories = [trajectory_of(number, each) for number, each in enumerate(turns)]
    ours: list[float] = []
    theirs: list[float] = []
    _, samples = convert(trajectories)
    with peer(python, turns) as other:
        if other is not None:
            _, found = other.convert()
            expected = [[len(s.input_ids), sum(s.mask), sum(s.input_ids)] for s in samples]
            if found != expected:
                raise SystemExit("the two converters do not agree on the sequences")
        for repeat in range(repeats):
            for mine in (True, False) if repeat % 2 == 0 else (False, True):
                if mine:
                    ours.append(convert(trajectories)[0] * 1e3)
                elif other is not None:
                    theirs.append(other.convert()[0] * 1e3)
    figures = {"openhands_rl_plugin_ms": statistics.median(ours)}
    if theirs:
        figures["trl_ms"] = statistics.median(theirs)
        figures["trl_over_ours"] = figures["trl_ms"] / figures["openhands_rl_plugin_ms"]
    return figures | _tokens(turns, samples)


def _tokens(turns: Sequence[Sequence[Turn]], samples: Sequence[Sample]) -> dict[str, float]:
    a_call = 0
    for episode in turns:
        held = 0
        for turn in episode:
            held += len(turn.delta) + len(turn.sampled)
            a_call += held
    unique = sum(len(turn.delta) + len(turn.sampled) for episode in turns for turn in episode)
    rows = sum(len(lay_out([sample.input_ids for sample in group]).ids) for group in pack(samples, 65_536))
    return {
        "unique_tokens": unique,
        "tokens_if_every_call_is_trained": a_call,
        "per_call_over_unique": a_call / unique,
        "packed_rows_over_unique": rows / unique,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-python", help="a Python that has trl 1.16 installed")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    figures = measure(options.repeats, options.peer_python)
    for name, value in figures.items():
        print(f"{name}: {value:,.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()

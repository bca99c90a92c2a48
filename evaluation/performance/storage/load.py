"""What the stores are given: sessions of turns with realistic texts, token ids and logprobs. Nothing but the standard
library is imported, so that other projects' Pythons can make the same ones.

The texts are pieces of Python's own library, as a coding agent sees them. A piece of text of one to seven characters is
a token; equal pieces have equal ids, scattered over a vocabulary of the size of Qwen's. The logprobs have 32 bits, as
servers send them: half of them near zero, where a policy was sure.
"""

from __future__ import annotations

import random
import re
import struct
import sysconfig
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

READ_TOKENS = 1000
SAMPLED_TOKENS = 300

_VOCABULARY = 151_936
_PIECE = re.compile(r" ?\w{1,6}|[^\w\s]{1,2}|\s+")
_SOURCES = (
    "argparse",
    "ast",
    "asyncio/tasks",
    "datetime",
    "dataclasses",
    "inspect",
    "json/decoder",
    "tarfile",
    "typing",
)


class Turn(NamedTuple):
    """What a policy read and answered: texts, and the new token ids of both."""

    read: str
    answer: str
    read_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def session(seed: int, turns: int) -> list[Turn]:
    """The turns of one session; each one reads ``READ_TOKENS`` and samples ``SAMPLED_TOKENS``."""
    random_ = random.Random(seed)
    return [_turn(random_) for _ in range(turns)]


def prompts(turns: list[Turn]) -> Iterator[list[int]]:
    """The whole prompt of each turn, which is what a model server reports."""
    context: list[int] = []
    for turn in turns:
        context = [*context, *turn.read_ids]
        yield context
        context = [*context, *turn.answer_ids]


def _turn(random_: random.Random) -> Turn:
    (read, read_ids), (answer, answer_ids) = (_excerpt(random_, count) for count in (READ_TOKENS, SAMPLED_TOKENS))
    sure = (random_.random() < 0.5 for _ in answer_ids)
    logprobs = [-(10 ** random_.uniform(-7, -2)) if each else -random_.expovariate(1.0) for each in sure]
    layout = f"<{len(logprobs)}f"
    return Turn(read, answer, read_ids, answer_ids, struct.unpack(layout, struct.pack(layout, *logprobs)))


def _excerpt(random_: random.Random, count: int) -> tuple[str, tuple[int, ...]]:
    pieces, ids = _library()
    start = random_.randrange(len(pieces) - count)
    return "".join(pieces[start : start + count]), ids[start : start + count]


@cache
def _library() -> tuple[list[str], tuple[int, ...]]:
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in _SOURCES)
    pieces = _PIECE.findall(text)
    return pieces, tuple(zlib.crc32(piece.encode()) % _VOCABULARY for piece in pieces)

"""More calls of a function: small changes of those that were recorded."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence

from openhands_rl_plugin.contrib.repair.calling import canonical

type Call = tuple[tuple[str, ...], dict[str, str]]
"""Arguments as the text of literals: positional, keywords."""

MOST = 60
_LONGEST = 100


def varied(calls: Sequence[Call], seed: str) -> list[Call]:
    """The calls and variations of them, without repetitions, in an order that depends on ``seed``. At most ``MOST``."""
    order = random.Random(seed)
    own = list(calls)
    order.shuffle(own)
    found: dict[str, Call] = {_key(call): call for call in own[: MOST // 2]}
    others = [other for call in own for other in _neighbours(call)]
    order.shuffle(others)
    for call in others:
        if len(found) >= MOST:
            break
        found.setdefault(_key(call), call)
    return list(found.values())


def _key(call: Call) -> str:
    return repr((call[0], sorted(call[1].items())))


def _neighbours(call: Call) -> Iterator[Call]:
    positional, keywords = call
    for at, text in enumerate(positional):
        for other in _others(text):
            yield (*positional[:at], other, *positional[at + 1 :]), keywords
    for name, text in keywords.items():
        for other in _others(text):
            yield positional, {**keywords, name: other}


def _others(text: str) -> Iterator[str]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return
    for other in _changed(value):
        try:
            new = canonical(other)
        except ValueError:
            continue
        if new != text and len(new) <= _LONGEST:
            yield new


def _changed(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1, -value, 2 * value, 0)
    elif isinstance(value, float):
        yield from (-value, value + 1.5, round(value))
    elif isinstance(value, str):
        yield from (
            value.upper(),
            value.lower(),
            value[::-1],
            value[1:],
            value[:-1],
            f"{value} {value}",
            f" {value}",
            "",
        )
    elif isinstance(value, list | tuple) and value:
        yield from (value[::-1], value[1:], value[:-1], 2 * value, value[:1])
    elif isinstance(value, dict) and value:
        yield dict(list(value.items())[1:])
        yield dict(reversed(value.items()))

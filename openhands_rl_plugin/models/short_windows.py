"""Windows of attention made so short that a check with a few tokens reaches beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WINDOW = 16
"""Tokens that a window is shortened to."""

_NAMES = ("sliding_window", "attention_chunk_size", "window_size", "index_topk")


@contextmanager
def short_windows(model: Any) -> Iterator[None]:
    """Shorten the windows of a transformers model inside the block.

    A window is thousands of tokens wide, so an implementation that ignores it computes a short check rightly.
    """
    owners = [model.config, model.config.get_text_config(), *model.modules()]
    found = [
        (owner, name, getattr(owner, name))
        for owner in {id(owner): owner for owner in owners}.values()
        for name in _NAMES
        if type(owner.__dict__.get(name)) is int and owner.__dict__[name] > WINDOW
    ]
    for owner, name, _ in found:
        setattr(owner, name, WINDOW)
    try:
        yield
    finally:
        for owner, name, value in found:
            setattr(owner, name, value)

"""Takes secrets out of text before it reaches a store, a log or a report; ``secrets`` defines a secret.

Each becomes ``[redacted]``; what was redacted before stays as it is. Besides the known shapes, the values of this
process's own secret environment variables are found wherever they stand, whatever they look like.

Token ids spell the text that they were made from. So a node whose text held a secret keeps no ids, and neither do the
nodes below it: their prompts hold the same secret, and ids of a prompt without it were never seen by the model. Such a
path can be read, but not trained on from there. Only the touched ids cannot be cut out instead: which ids spell the
secret is known to the model's tokenizer alone, and answers below may repeat it in ids that no recorded text says, such
as reasoning that the server took out. ``redact_nodes`` does that for a running episode,
``redact_trajectory`` for a whole one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from openhands_rl_plugin.core.secrets import SHORTEST_OWN, find_secrets, is_secret_item, own_secrets
from openhands_rl_plugin.core.types import Frozen, JsonObject, Message, Node, Tokens, Trajectory

REDACTED = "[redacted]"

_MOST_PASSES = 4
_KEPT = frozenset({"id", "trajectory_id", "run_id", "group_id", "tool_call_id"})
"""Fields by which records and calls are found again."""

# Nearly every field of a node is one of these, or a short text that many nodes have: a model's name, a role.
_WITHOUT_TEXT = frozenset({bool, float, int, type(None), Tokens})
_SHORT = 64

_own_of_this_block: ContextVar[tuple[str, ...] | None] = ContextVar("own_secrets", default=None)


@contextmanager
def secrets_looked_up_once() -> Iterator[None]:
    """Read the secret environment variables only at the beginning of the block, to redact many short records fast."""
    token = _own_of_this_block.set(_own())
    try:
        yield
    finally:
        _own_of_this_block.reset(token)


def redact_text(text: str) -> str:
    """``text`` with every secret replaced; the same object when there is none. Takes linear time."""
    return _text(text, _own())


def redact_json(value: JsonObject) -> JsonObject:
    """``value`` with the secrets in its texts and names replaced; the same object when there is none."""
    return _clean(value, _own())


def redact_value[Value: Frozen](value: Value) -> Value:
    """A frozen value with the secrets in all its texts replaced, except for ids; the same object when there is none."""
    return _clean(value, _own())


def redact_nodes(
    nodes: Sequence[Node], *, first: int = 0, tainted: Iterable[int | None] = ()
) -> tuple[tuple[Node, ...], frozenset[int | None]]:
    """The redacted ``nodes``, of which the first has index ``first``, and the indices of all tainted nodes so far.

    A node is tainted when its text held a secret or its parent is tainted; a tainted node keeps no token ids.
    ``tainted`` is the result of the call for the nodes before ``first``; ``None`` in it taints every node.
    """
    own = _own()
    known = set(tainted)
    redacted: list[Node] = []
    for index, node in enumerate(nodes, first):
        clean = _clean(node, own)
        if clean is not node or node.parent in known:
            known.add(index)
            clean = _without_tokens(clean)
        redacted.append(clean)
    return tuple(redacted), frozenset(known)


def redact_trajectory(trajectory: Trajectory) -> Trajectory:
    """A whole episode without secrets. One in the tools' descriptions is a part of every prompt."""
    clean = redact_value(trajectory.model_copy(update={"nodes": ()}))
    nodes, tainted = redact_nodes(trajectory.nodes)
    if clean.tools != trajectory.tools:
        nodes = tuple(_without_tokens(node) for node in nodes)
    elif not tainted:
        nodes = trajectory.nodes
    return clean.model_copy(update={"nodes": nodes})


def is_redacted(message: Message) -> bool:
    """Whether a secret was taken out of what the message says, or out of its calls."""
    return any(REDACTED in text for text in (message.content or "", *(call.arguments for call in message.tool_calls)))


def _without_tokens(node: Node) -> Node:
    return node if node.tokens is None else node.model_copy(update={"tokens": None})


class RedactingFilter(logging.Filter):
    """Takes secrets out of log records, also out of their exceptions."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true: a record is changed, never dropped."""
        record.msg, record.args = redact_text(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact_text(record.exc_text)
        return True


def redacting_logger(name: str) -> logging.Logger:
    """The logger of that name; its records hold no secrets."""
    logger = logging.getLogger(name)
    if not any(isinstance(each, RedactingFilter) for each in logger.filters):
        logger.addFilter(RedactingFilter())
    return logger


def _own() -> tuple[str, ...]:
    known = _own_of_this_block.get()
    return tuple(secret for secret in own_secrets() if secret not in REDACTED) if known is None else known


def _text(text: str, own: tuple[str, ...]) -> str:
    if len(text) < SHORTEST_OWN:
        return text
    clean = _searched_short(text, own) if len(text) <= _SHORT else _searched(text, own)
    return text if clean == text else clean


def _searched(text: str, own: tuple[str, ...]) -> str:
    # The text after a secret may be one itself, found only without it.
    for _ in range(_MOST_PASSES):
        parts: list[str] = []
        at = 0
        for start, end in find_secrets(text, own):
            if start >= at:
                parts += (text[at:start], REDACTED)
            at = max(at, end)
        clean = "".join((*parts, text[at:]))
        if clean == text:
            break
        text = clean
    return text


_searched_short = lru_cache(4096)(_searched)


def _clean[Value](value: Value, own: tuple[str, ...], name: str = "") -> Value:
    """The same without secrets; ``name`` is that of an item of open JSON. The same object when there is none."""
    changed: Any = value
    if isinstance(value, str):
        changed = REDACTED if name and is_secret_item(name, value) else _text(value, own)
    elif isinstance(value, dict):
        items = [(key, item, _text(key, own), _clean(item, own, key)) for key, item in value.items()]
        if any(key is not clean_key or item is not clean for key, item, clean_key, clean in items):
            changed = {clean_key: clean for _, _, clean_key, clean in items}
    elif isinstance(value, list | tuple):
        cleaned = [_clean(each, own, name) for each in value]
        if any(new is not old for new, old in zip(cleaned, value, strict=True)):
            changed = type(value)(cleaned)
    # Last, because it is found out by pydantic's own check, which is slow.
    elif isinstance(value, Frozen) and not isinstance(value, Tokens):
        changes: dict[str, Any] = {}
        for key, field in vars(value).items():
            texts = field and type(field) not in _WITHOUT_TEXT and key not in _KEPT
            if texts and (clean := (_text if type(field) is str else _clean)(field, own)) is not field:
                changes[key] = clean
        if changes:
            changed = value.model_copy(update=changes)
    return changed

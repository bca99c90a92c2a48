"""Takes secrets out of text before it reaches a store, a log or a report; ``secret_shapes`` defines a secret.

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

from pydantic import JsonValue

from openhands_rl_plugin.core.secret_shapes import (
    SHORTEST_OWN,
    find_secrets,
    is_secret_item,
    names_anything,
    own_secrets,
)
from openhands_rl_plugin.core.types import Frozen, JsonObject, Message, Node, Tokens, Trajectory

REDACTED = "[redacted]"

_MOST_PASSES = 4
_KEPT = frozenset({"id", "trajectory_id", "run_id", "group_id", "tool_call_id"})
"""Fields by which records and calls are found again."""


_own_of_this_block: ContextVar[tuple[str, ...] | None] = ContextVar("own_secrets", default=None)


@contextmanager
def secrets_looked_up_once() -> Iterator[None]:
    """For many short records in a row: the secret environment variables are those of the beginning of the block."""
    token = _own_of_this_block.set(_own())
    try:
        yield
    finally:
        _own_of_this_block.reset(token)


def redact_text(text: str) -> str:
    """``text`` with every secret replaced; the same object when there is none. Takes linear time."""
    return _Redaction().text(text)


def redact_json(value: JsonObject) -> JsonObject:
    """``value`` with the secrets in its texts and names replaced; the same object when there is none."""
    return _Redaction().table(value)


def redact_value[Value: Frozen](value: Value) -> Value:
    """A frozen value with the secrets in all its texts replaced, except for ids; the same object when there is none."""
    return _Redaction().value(value)


def redact_nodes(
    nodes: Sequence[Node], *, first: int = 0, tainted: Iterable[int] = ()
) -> tuple[tuple[Node, ...], frozenset[int]]:
    """The redacted ``nodes``, of which the first has index ``first``, and the indices of all tainted nodes so far.

    A node is tainted when its text held a secret or its parent is tainted; a tainted node keeps no token ids.
    ``tainted`` is the result of the call for the nodes before ``first``.
    """
    redaction = _Redaction()
    known = set(tainted)
    if not known and not redaction.suspects(nodes):
        return tuple(nodes), frozenset()
    redacted: list[Node] = []
    for index, node in enumerate(nodes, first):
        clean = redaction.value(node) if redaction.suspects((node,)) else node
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


class _Redaction:
    """One pass over something, with the secrets that this process has now."""

    def __init__(self) -> None:
        known = _own_of_this_block.get()
        self._own = _own() if known is None else known

    def suspects(self, nodes: Sequence[Node]) -> bool:
        """False when nothing in ``nodes`` is a secret. All texts are scanned at once, which is faster."""
        texts: list[str] = []
        named: list[tuple[str, str]] = []
        for node in nodes:
            _collect_texts(node, texts, named)
        return bool(find_secrets("\n".join(texts), self._own)) or any(is_secret_item(*each) for each in named)

    def text(self, text: str) -> str:
        if len(text) < SHORTEST_OWN:
            return text
        # The text after a secret may be one itself, found only without it.
        for _ in range(_MOST_PASSES):
            if (clean := self._pass(text)) == text:
                break
            text = clean
        return text

    def _pass(self, text: str) -> str:
        parts: list[str] = []
        at = 0
        for start, end in find_secrets(text, self._own):
            if start >= at:
                parts += (text[at:start], REDACTED)
            at = max(at, end)
        return "".join((*parts, text[at:])) if parts else text

    def table(self, table: JsonObject) -> JsonObject:
        clean = {self.text(name): self._item(name, item) for name, item in table.items()}
        same = len(clean) == len(table) and all(clean.get(name) is item for name, item in table.items())
        return table if same else clean

    def value[Value: Frozen](self, value: Value) -> Value:
        changes = {
            name: clean for name, field in value if name not in _KEPT and (clean := self._field(field)) is not field
        }
        return value.model_copy(update=changes) if changes else value

    def _field(self, field: object) -> object:
        match field:
            case str():
                return self.text(field)
            case Tokens():
                return field
            case Frozen():
                return self.value(field)
            case dict():
                return self.table(field)
            case tuple():
                clean = tuple(self._field(each) for each in field)
                return field if all(new is old for new, old in zip(clean, field, strict=True)) else clean
            case _:
                return field

    def _item(self, name: str, item: JsonValue) -> JsonValue:
        match item:
            case str():
                return REDACTED if is_secret_item(name, item) else self.text(item)
            case dict():
                return self.table(item)
            case list():
                clean = [self._item(name, each) for each in item]
                return item if all(new is old for new, old in zip(clean, item, strict=True)) else clean
            case _:
                return item


def _own() -> tuple[str, ...]:
    return tuple(secret for secret in own_secrets() if secret not in REDACTED)


def _collect_texts(node: Node, texts: list[str], named: list[tuple[str, str]]) -> None:
    message = node.message
    texts += (message.content or "", message.name or "", node.finish_reason or "")
    for call in message.tool_calls:
        texts += (call.name, call.arguments)
    if node.metadata:
        _collect(node.metadata, texts, named)
    if node.policy is not None or node.sampling is not None:
        texts += _few_texts(node)


def _collect(table: JsonObject, texts: list[str], named: list[tuple[str, str]]) -> None:
    """Every text and name of ``table``; a text that a name may give away also with that name."""
    for name, item in table.items():
        texts.append(name)
        _collect_item(name, item, texts, named)


def _collect_item(name: str, item: JsonValue, texts: list[str], named: list[tuple[str, str]]) -> None:
    match item:
        case str():
            texts.append(item)
            if names_anything(name):
                named.append((name, item))
        case dict():
            _collect(item, texts, named)
        case list():
            for each in item:
                _collect_item(name, each, texts, named)


def _few_texts(node: Node) -> list[str]:
    """The texts that say who was asked, and how."""
    texts = list(node.sampling.stop) if node.sampling is not None else []
    if node.policy is not None:
        texts += (node.policy.base_model, node.policy.adapter or "")
    return texts

"""Token ids as text: compared and kept without an object for each number.

The response to a prompt of 35,000 tokens has a quarter of a megabyte, nearly all of it prompt ids that the gateway
already has. So the arrays stay text, which is compared with that of earlier prompts, and only the new part is parsed.
The canonical text of ids is ``"17,4,256,"``: no spaces, a comma after each, so that the text of an extended prompt
starts with the text of the earlier one, and a prefix never ends inside a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Tokens

PROMPT_IDS, SAMPLED_IDS = IDS = ("prompt_token_ids", "token_ids")

# A quote inside of a JSON text has a backslash before it, so this is always the end of a field's name.
_NAME = b'token_ids"'
_OPENING = re.compile(rb"\s*:\s*\[")
_NUMBERS = TypeAdapter(list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]])


def arrays_as_texts(body: bytes) -> tuple[bytes, int]:
    """JSON with the text ``"1,2"`` for every array ``[1,2]`` of ids, and how many arrays these are."""
    parts: list[bytes] = []
    done = at = 0
    while (at := body.find(_NAME, at) + len(_NAME)) >= len(_NAME):
        if (opened := _OPENING.match(body, at)) is None:
            continue
        start = opened.end()
        end = body.find(b"]", start, body.find(b'"', start))
        if end >= 0 and body.find(b"[", start, end) < 0:
            inside = body[start:end]
            if b" " in inside or b"\n" in inside:
                inside = inside.translate(None, b" \t\r\n")
            parts += body[done : start - 1], b'"%s"' % inside
            done = at = end + 1
    return (b"".join((*parts, body[done:])), len(parts) // 2) if parts else (body, 0)


def text_of_ids(array: object) -> str | None:
    """The canonical text of an array of ids, or of one that is a text; ``None`` for another value."""
    inside = str(array)[1:-1].replace(" ", "") if isinstance(array, list | tuple) else array
    return None if not isinstance(inside, str) else f"{inside}," if inside else ""


def ids_in(text: str) -> list[int] | None:
    """The ids in canonical text, or ``None`` when it contains anything but ids of up to 31 bits."""
    try:
        return _NUMBERS.validate_json(f"[{text[:-1]}]")
    except ValidationError:
        return None


class NodeTokens:
    """Token ids by node, as text: about seven bytes per token, each token once.

    A gateway's tree drops the ids of a node once they are stored, and has them here only.
    """

    def __init__(self, tree: EpisodeTree) -> None:
        self._tree = tree
        # Of each node with tokens: whether they extend those before, and the text of its prompt delta and sampled ids.
        self._kept: dict[int, tuple[bool, str]] = {}

    def forget(self, nodes: Sequence[int]) -> None:
        """Keep the ids of these nodes as text alone."""
        for index in nodes:
            self._segment(index)
            self._tree.nodes[index].tokens = None

    def read(self, parent: int | None, prompt: str, sampled: Sequence[int], logprobs: Sequence[float]) -> Tokens | None:
        """The tokens of an answer to ``prompt`` (canonical text) below ``parent``.

        They extend those before when the prompt starts with them; ``None`` when it contains anything but token ids.
        """
        texts: list[str] = []
        extends = True
        while parent is not None and extends:
            extends, text = self._segment(parent)
            texts.append(text)
            parent = self._tree.nodes[parent].parent
        before = "".join(reversed(texts))
        extends = bool(before) and prompt.startswith(before)
        ids = ids_in(prompt[len(before) :] if extends else prompt)
        if ids is None:
            return None
        # No second validation: the arrays contain only numbers.
        return Tokens.model_construct(
            extends=extends, prompt_ids=tuple(ids), sampled_ids=tuple(sampled), logprobs=tuple(logprobs)
        )

    def _segment(self, node: int) -> tuple[bool, str]:
        tokens = self._tree.nodes[node].tokens
        if node not in self._kept and tokens is not None:
            ids = (text_of_ids(each) or "" for each in (tokens.prompt_ids, tokens.sampled_ids))
            self._kept[node] = tokens.extends, "".join(ids)
        return self._kept.get(node, (True, ""))

"""The context of each sampled node, so that only the new tokens of each prompt are stored."""

from __future__ import annotations

from dataclasses import dataclass

from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Tokens
from openhands_rl_plugin.models.gateway.token_id_text import TokenIds, ids_of, text_of


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """The canonical text of a sampled node's prompt delta and sampled ids; ``extends`` as in ``Tokens``."""

    extends: bool
    text: bytes


class NodeTokens:
    """Token ids by node, as text: about seven bytes per token, each token once.

    It replaces the ids in the tree, whose nodes drop them once they are stored.
    """

    def __init__(self, tree: EpisodeTree) -> None:
        self._tree = tree
        self._pieces: dict[int, TokenSegment] = {}
        for index, node in enumerate(tree.nodes):
            if (tokens := node.tokens) is not None:
                text = text_of(tokens.prompt_ids + tokens.sampled_ids)
                self._pieces[index] = TokenSegment(tokens.extends, text)
                node.tokens = None

    def read(
        self, parent: int | None, prompt: bytes, sampled: TokenIds, logprobs: list[float]
    ) -> tuple[Tokens, TokenSegment] | None:
        """The tokens of an answer to ``prompt`` (canonical text) below ``parent``, and the segment to ``note``.

        ``None`` when the prompt contains anything but token ids.
        """
        chain = self._chain(parent)
        at = 0
        for piece in chain:
            if not prompt.startswith(piece.text, at):
                chain, at = [], 0
                break
            at += len(piece.text)
        new = prompt[at:]
        ids = ids_of(new)
        if ids is None:
            return None
        extends = bool(chain)
        # No second validation: the arrays contain only numbers.
        tokens = Tokens.model_construct(
            extends=extends, prompt_ids=tuple(ids), sampled_ids=tuple(sampled.numbers), logprobs=tuple(logprobs)
        )
        return tokens, TokenSegment(extends, new + sampled.text)

    def note(self, node: int, piece: TokenSegment) -> None:
        """Remember the segment that ``read`` returned for this node."""
        self._pieces[node] = piece

    def _chain(self, node: int | None) -> list[TokenSegment]:
        """The segments of the nearest sampled node at or above ``node``, from the start of its segment."""
        chain: list[TokenSegment] = []
        while node is not None:
            piece = self._pieces.get(node)
            if piece is not None:
                chain.append(piece)
                if not piece.extends:
                    break
            node = self._tree.nodes[node].parent
        return chain[::-1]

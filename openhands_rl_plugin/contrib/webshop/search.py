"""BM25 search over titles, attributes and categories, with an inverted index."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from openhands_rl_plugin.contrib.webshop.catalogue import Product, words

_K1 = 1.2
_B = 0.75
MAX_QUERY_WORDS = 32


class SearchIndex:
    """An immutable index; products of equal score come in catalogue order."""

    def __init__(self, products: Sequence[Product]) -> None:
        documents = [_document(product) for product in products]
        mean_length = sum(map(len, documents)) / max(1, len(documents))
        counts: dict[str, list[tuple[int, int]]] = {}
        for number, document in enumerate(documents):
            for word, count in Counter(document).items():
                counts.setdefault(word, []).append((number, count))
        self._products = tuple(products)
        self._postings = {
            word: tuple(
                (number, _weight(len(documents), len(entries), count, len(documents[number]) / mean_length))
                for number, count in entries
            )
            for word, entries in counts.items()
        }

    def search(self, query: str, limit: int = 50) -> tuple[Product, ...]:
        """The best `limit` products that share a word with `query`; only its first 32 words count."""
        scores: dict[int, float] = {}
        for word in words(query)[:MAX_QUERY_WORDS]:
            for number, weight in self._postings.get(word, ()):
                scores[number] = scores.get(number, 0.0) + weight
        # Rounded, so that the order in which floats are summed cannot decide between equals.
        ranked = sorted(scores, key=lambda number: (-round(scores[number], 9), number))
        return tuple(self._products[number] for number in ranked[:limit])


def _document(product: Product) -> tuple[str, ...]:
    return words(" ".join((product.title, *product.attributes, *product.category)))


def _weight(documents: int, matching: int, count: int, relative_length: float) -> float:
    rarity = math.log(1 + (documents - matching + 0.5) / (matching + 0.5))
    return rarity * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * relative_length))

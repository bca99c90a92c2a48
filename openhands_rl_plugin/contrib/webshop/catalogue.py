"""The generated catalogue: the same products for the same seed, on every machine."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from openhands_rl_plugin.contrib.webshop.vocabulary import BRANDS, PRODUCT_TYPES, ProductType

_ASIN_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ASIN_LETTERS = 4
_TITLE_ATTRIBUTES = 2
_HIDDEN_ATTRIBUTE_SHARE = 0.4
_SOLD_OUT_SHARE = 0.5
MAX_PRODUCTS = 100_000
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")


def words(text: str) -> tuple[str, ...]:
    """The lower-case words of `text`, in order."""
    return tuple(_WORD.findall(text.lower()))


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """A choice the buyer makes, for example `color` among `red` and `blue`."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """One listing. `category` goes from the department to the type; `price` is in whole dollars.

    `attributes` holds every attribute, of which the title shows the first two.
    """

    asin: str
    title: str
    query: str
    category: tuple[str, ...]
    attributes: tuple[str, ...]
    options: tuple[OptionGroup, ...]
    price: int

    @property
    def description(self) -> str:
        """One sentence on what the listing is."""
        return f"{self.title} from our {self.category[0].lower()} department."

    def option_group_of(self, value: str) -> str | None:
        """The name of the group that offers `value` (lower case), or None."""
        for group in self.options:
            if value in group.values:
                return group.name
        return None


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All products, in a fixed order."""

    seed: int
    products: tuple[Product, ...]

    def by_asin(self) -> dict[str, Product]:
        """A new mapping from ASIN to product."""
        return {product.asin: product for product in self.products}


def generate_catalogue(num_products: int = 1000, seed: int = 0) -> Catalogue:
    """Make `num_products` products from `seed`; a shorter catalogue is not a prefix of a longer one.

    Raises:
        ValueError: `num_products` is not between 1 and 100,000.
    """
    if not 1 <= num_products <= MAX_PRODUCTS:
        raise ValueError(f"num_products must be between 1 and {MAX_PRODUCTS}, not {num_products}")
    rng = random.Random(f"webshop catalogue {seed} {num_products}")
    asins = _unique_asins(rng, num_products)
    kinds = [PRODUCT_TYPES[index % len(PRODUCT_TYPES)] for index in range(num_products)]
    rng.shuffle(kinds)
    products = tuple(_product(rng, asin, kind) for asin, kind in zip(asins, kinds, strict=True))
    return Catalogue(seed=seed, products=products)


def _unique_asins(rng: random.Random, count: int) -> list[str]:
    numbers = rng.sample(range(len(_ASIN_ALPHABET) ** _ASIN_LETTERS), count)
    return [_asin(number) for number in numbers]


def _asin(number: int) -> str:
    letters = []
    for _ in range(_ASIN_LETTERS):
        number, digit = divmod(number, len(_ASIN_ALPHABET))
        letters.append(_ASIN_ALPHABET[digit])
    return "B0" + "".join(letters)


def _product(rng: random.Random, asin: str, kind: ProductType) -> Product:
    hidden = 1 if rng.random() < _HIDDEN_ATTRIBUTE_SHARE else 0
    attributes = tuple(rng.sample(kind.attributes, _TITLE_ATTRIBUTES + hidden))
    shown = attributes[:_TITLE_ATTRIBUTES]
    return Product(
        asin=asin,
        title=" ".join((rng.choice(BRANDS), *shown, kind.name)),
        query=kind.name,
        category=(kind.department, kind.name.title()),
        attributes=attributes,
        options=tuple(_option_group(rng, name, values) for name, values in kind.options),
        price=rng.randint(*kind.prices),
    )


def _option_group(rng: random.Random, name: str, values: tuple[str, ...]) -> OptionGroup:
    """The type's values, sometimes without one of them, so that a listing may lack the wanted value."""
    sold_out = set(rng.sample(values, 1 if rng.random() < _SOLD_OUT_SHARE else 0))
    return OptionGroup(name=name, values=tuple(value for value in values if value not in sold_out))

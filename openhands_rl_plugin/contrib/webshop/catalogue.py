"""The shop's catalogue, its search, its goals and WebShop's reward."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

_KNOWN = json.loads(files(__package__).joinpath("products.json").read_text(encoding="utf-8"))
BRANDS: tuple[str, ...] = tuple(_KNOWN["brands"])
"""Common short words: a brand distinguishes two listings at the cost of one token."""

_ASIN_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ASIN_LETTERS = 4
_TITLE_ATTRIBUTES = 2
_HIDDEN_ATTRIBUTE_SHARE = 0.4
_SOLD_OUT_SHARE = 0.5
_PRODUCTS, _GOALS = 1000, 1500
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

    def option_group_of(self, value: str) -> str | None:
        """The name of the group that offers `value` (lower case), or None."""
        return next((group.name for group in self.options if value in group.values), None)


@cache
def generate_catalogue() -> tuple[Product, ...]:
    """The products of the shop."""
    rng = random.Random(f"webshop catalogue 0 {_PRODUCTS}")
    asins = map(_asin, rng.sample(range(len(_ASIN_ALPHABET) ** _ASIN_LETTERS), _PRODUCTS))
    kinds = [_KNOWN["types"][index % len(_KNOWN["types"])] for index in range(_PRODUCTS)]
    rng.shuffle(kinds)
    return tuple(_product(rng, asin, kind) for asin, kind in zip(asins, kinds, strict=True))


def _asin(number: int) -> str:
    letters = []
    for _ in range(_ASIN_LETTERS):
        number, digit = divmod(number, len(_ASIN_ALPHABET))
        letters.append(_ASIN_ALPHABET[digit])
    return "B0" + "".join(letters)


def _product(rng: random.Random, asin: str, kind: dict[str, Any]) -> Product:
    hidden = 1 if rng.random() < _HIDDEN_ATTRIBUTE_SHARE else 0
    attributes = tuple(rng.sample(kind["attributes"], _TITLE_ATTRIBUTES + hidden))
    shown = attributes[:_TITLE_ATTRIBUTES]
    return Product(
        asin=asin,
        title=" ".join((rng.choice(BRANDS), *shown, kind["name"])),
        query=kind["name"],
        category=(kind["department"], kind["name"].title()),
        attributes=attributes,
        options=tuple(_option_group(rng, name, values) for name, values in kind["options"].items()),
        price=rng.randint(*kind["prices"]),
    )


def _option_group(rng: random.Random, name: str, values: list[str]) -> OptionGroup:
    """The type's values, sometimes without one of them, so that a listing may lack the wanted value."""
    sold_out = set(rng.sample(values, 1 if rng.random() < _SOLD_OUT_SHARE else 0))
    return OptionGroup(name=name, values=tuple(value for value in values if value not in sold_out))


_K1 = 1.2
_B = 0.75
_MAX_QUERY_WORDS, _MAX_RESULTS = 32, 50


class SearchIndex:
    """An immutable index; products of equal score come in catalogue order."""

    def __init__(self, products: Sequence[Product]) -> None:
        documents = [words(" ".join((each.title, *each.attributes, *each.category))) for each in products]
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

    def search(self, query: str) -> tuple[Product, ...]:
        """The best 50 products that share a word with `query`; only its first 32 words count."""
        scores: dict[int, float] = {}
        for word in words(query)[:_MAX_QUERY_WORDS]:
            for number, weight in self._postings.get(word, ()):
                scores[number] = scores.get(number, 0.0) + weight
        # Rounded, so that the order in which floats are summed cannot decide between equals.
        ranked = sorted(scores, key=lambda number: (-round(scores[number], 9), number))
        return tuple(self._products[number] for number in ranked[:_MAX_RESULTS])


def _weight(documents: int, matching: int, count: int, relative_length: float) -> float:
    rarity = math.log(1 + (documents - matching + 0.5) / (matching + 0.5))
    return rarity * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * relative_length))


Split = Literal["train", "heldout"]

_HELDOUT_SHARE = 0.2
_PRICE_STEP = 5
_ATTEMPTS_PER_GOAL = 20


@dataclass(frozen=True, slots=True)
class Goal:
    """One shopping request. Prices are in whole dollars; `options` are (group, value) pairs.

    `asin` is the product the request was made from; any product that meets it earns the full reward.
    """

    index: int
    split: Split
    asin: str
    query: str
    category: tuple[str, ...]
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    price_upper: int

    @property
    def instruction(self) -> str:
        """The instruction text."""
        options = ", and ".join(f"{name}: {value}" for name, value in self.options)
        with_options = f" with {options}" if options else ""
        wanted = f"{', '.join(self.attributes)} {self.query}"
        return f"Find me {wanted}{with_options}, and price lower than {self.price_upper} dollars"


@cache
def generate_goals(catalogue: tuple[Product, ...]) -> tuple[Goal, ...]:
    """Goals with different instructions: first those to train on, then the held-out ones.

    A fifth of the products is kept for the held-out goals, so no target product serves both splits.
    """
    rng = random.Random(f"webshop goals 0 {len(catalogue)} {_GOALS}")
    products = _bargains(catalogue)
    rng.shuffle(products)
    held_out_products, held_out = round(len(products) * _HELDOUT_SHARE), round(_GOALS * _HELDOUT_SHARE)
    taken: set[str] = set()
    heldout = _goals_for(rng, products[:held_out_products], "heldout", held_out, taken)
    train = _goals_for(rng, products[held_out_products:], "train", _GOALS - held_out, taken)
    return tuple(replace(goal, index=index) for index, goal in enumerate([*train, *heldout]))


def _bargains(products: Sequence[Product]) -> list[Product]:
    """The cheaper half of each group of listings with the same type and title attributes.

    A goal made from one of them has a price limit that rules out look-alikes, so that the first listing with
    the right words is often the wrong one to buy.
    """
    groups: dict[tuple[str, frozenset[str]], list[Product]] = {}
    for product in products:
        groups.setdefault((product.query, frozenset(product.attributes[:2])), []).append(product)
    return [
        product
        for group in groups.values()
        for product in sorted(group, key=lambda member: (member.price, member.asin))[: (len(group) + 1) // 2]
    ]


def _goals_for(rng: random.Random, products: list[Product], split: Split, count: int, taken: set[str]) -> list[Goal]:
    """Up to `count` goals over `products` in turn, with instructions that are not in `taken`, which grows."""
    goals: list[Goal] = []
    for attempt in range(_ATTEMPTS_PER_GOAL * count):
        if len(goals) == count:
            break
        goal = _goal(rng, products[attempt % len(products)], split)
        if goal.instruction not in taken:
            taken.add(goal.instruction)
            goals.append(goal)
    return goals


def _goal(rng: random.Random, product: Product, split: Split) -> Goal:
    wanted_groups = [group for group in product.options if rng.random() < 0.75] or list(product.options[:1])
    price_limit = (product.price // _PRICE_STEP + 1) * _PRICE_STEP
    return Goal(
        index=-1,
        split=split,
        asin=product.asin,
        query=product.query,
        category=product.category,
        attributes=_wanted_attributes(rng, product),
        options=tuple((group.name, rng.choice(group.values)) for group in wanted_groups),
        price_upper=price_limit,
    )


def _wanted_attributes(rng: random.Random, product: Product) -> tuple[str, ...]:
    """Mostly attributes that the title shows; sometimes one that only the product's own pages show."""
    shown, hidden = product.attributes[:2], product.attributes[2:]
    if hidden and rng.random() < 0.25:
        return (rng.choice(shown), *hidden)
    if rng.random() < 0.1:
        return (rng.choice(shown),)
    return shown


@dataclass(frozen=True, slots=True)
class RewardBreakdown:
    """The parts of one reward, each between 0 and 1.

    `r_att`, `r_option` and `r_price` are the shares of wanted attributes, options and price limit that were met;
    `r_option` is None where the goal asks for no option. `reward` is their weighted mean times `r_type`.
    """

    r_type: float
    r_att: float
    r_option: float | None
    r_price: float
    reward: float


def purchase_reward(product: Product, options: Iterable[tuple[str, str]], goal: Goal) -> RewardBreakdown:
    """Judge buying `product` with the selected (group, value) `options` for `goal`."""
    attributes_met = len(_normalised(goal.attributes) & _normalised(product.attributes))
    options_met = len(_normalised_pairs(goal.options) & _normalised_pairs(options))
    price_met = float(product.price <= goal.price_upper)
    # The paper compares the nouns of both titles; here the type's own words are those nouns, since brand and
    # attributes, the rest of a title, do not identify the kind. All types are too short for its lesser resemblances.
    r_type = float(bool(set(words(goal.query)) & set(words(product.query))))
    wanted = len(goal.attributes) + len(goal.options) + 1
    return RewardBreakdown(
        r_type=r_type,
        r_att=attributes_met / len(goal.attributes) if goal.attributes else 1.0,
        r_option=options_met / len(goal.options) if goal.options else None,
        r_price=price_met,
        reward=r_type * (attributes_met + options_met + price_met) / wanted,
    )


def _normalised(values: Iterable[str]) -> set[str]:
    return {" ".join(words(value)) for value in values}


def _normalised_pairs(pairs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(name.casefold(), value.casefold()) for name, value in pairs}

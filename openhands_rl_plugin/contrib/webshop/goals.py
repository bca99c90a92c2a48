"""The goals of the shop, with the split that is held out for evaluation."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from openhands_rl_plugin.contrib.webshop.catalogue import Catalogue, Product

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")

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


def generate_goals(catalogue: Catalogue, num_goals: int = 1500) -> tuple[Goal, ...]:
    """Make up to `num_goals` goals with different instructions: first those to train on, then the held-out ones.

    A fifth of the products is kept for the held-out goals, so no target product serves both splits. A small
    catalogue may yield fewer goals than asked for.

    Raises:
        ValueError: `num_goals` is less than 2 or the catalogue has fewer than 4 products.
    """
    if num_goals < 2 or len(catalogue.products) < 4:
        raise ValueError("two goals over four products are the least that can be split")
    rng = random.Random(f"webshop goals {catalogue.seed} {len(catalogue.products)} {num_goals}")
    products = _bargains(catalogue.products)
    rng.shuffle(products)
    heldout_products = max(1, round(len(products) * _HELDOUT_SHARE))
    heldout_goals = max(1, round(num_goals * _HELDOUT_SHARE))
    taken: set[str] = set()
    heldout = _goals_for(rng, products[:heldout_products], "heldout", heldout_goals, taken)
    train = _goals_for(rng, products[heldout_products:], "train", num_goals - heldout_goals, taken)
    return tuple(_numbered([*train, *heldout]))


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


def _numbered(goals: Iterable[Goal]) -> Iterable[Goal]:
    return (replace(goal, index=index) for index, goal in enumerate(goals))


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

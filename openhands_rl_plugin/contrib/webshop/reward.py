"""WebShop's reward (Yao et al. 2022, equation 1): how much of the request the purchase meets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from openhands_rl_plugin.contrib.webshop.catalogue import Product, words
from openhands_rl_plugin.contrib.webshop.goals import Goal


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
    r_type = type_reward(product, goal)
    wanted = len(goal.attributes) + len(goal.options) + 1
    return RewardBreakdown(
        r_type=r_type,
        r_att=attributes_met / len(goal.attributes) if goal.attributes else 1.0,
        r_option=options_met / len(goal.options) if goal.options else None,
        r_price=price_met,
        reward=r_type * (attributes_met + options_met + price_met) / wanted,
    )


def type_reward(product: Product, goal: Goal) -> float:
    """The type factor: 0 without a shared noun, 0.1 or 0.5 for a slight resemblance, else 1.

    The paper compares the nouns of both titles; here the type's own words are those nouns, since brand and
    attributes, the rest of a title, do not identify the kind of product.
    """
    wanted = set(words(goal.query))
    resemblance = len(wanted & set(words(product.query))) / len(wanted) if wanted else 0.2
    if resemblance == 0.0:
        return 0.0
    if resemblance < 0.1:
        return 0.1
    same_query = product.query == goal.query
    same_category = len(set(product.category) & set(goal.category)) >= 2
    return 1.0 if same_query or same_category or resemblance > 0.2 else 0.5


def _normalised(values: Iterable[str]) -> set[str]:
    return {" ".join(words(value)) for value in values}


def _normalised_pairs(pairs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(name.casefold(), value.casefold()) for name, value in pairs}

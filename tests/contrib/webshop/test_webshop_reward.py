"""The reward against WebShop's formula, computed a second time and naively."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openhands_rl_plugin.contrib.webshop import WebShop
from openhands_rl_plugin.contrib.webshop.catalogue import Goal, Product, purchase_reward

WORLD = WebShop()


def naive_reward(bought: Product, options: list[tuple[str, str]], goal: Goal) -> float:
    points = 0
    for attribute in goal.attributes:
        points += 1 if attribute in list(bought.attributes) else 0
    for name, value in goal.options:
        points += 1 if any(name == n and value == v for n, v in options) else 0
    points += 1 if bought.price <= goal.price_upper else 0
    shared = sum(1 for word in goal.query.split() if word in bought.query.split())
    factor = 0.0 if shared == 0 else 1.0
    return factor * points / (len(goal.attributes) + len(goal.options) + 1)


@given(st.data())
def test_the_reward_is_webshops_formula(data: st.DataObject) -> None:
    goal = data.draw(st.sampled_from(WORLD.goals))
    same_type = [product for product in WORLD.products if product.query == goal.query]
    bought = data.draw(st.sampled_from(same_type) | st.sampled_from(WORLD.products))
    options = [
        (group.name, data.draw(st.sampled_from(group.values))) for group in bought.options if data.draw(st.booleans())
    ]
    judged = purchase_reward(bought, options, goal)
    assert judged.reward == pytest.approx(naive_reward(bought, options, goal))
    parts = (judged.r_type, judged.r_att, judged.r_option or 0.0, judged.r_price, judged.reward)
    assert all(0.0 <= part <= 1.0 for part in parts)
    met_all = judged.r_type == judged.r_att == judged.r_price == 1.0 and judged.r_option in (None, 1.0)
    assert (judged.reward == 1.0) == met_all

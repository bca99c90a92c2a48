"""The generated shop: the same everywhere, worth choosing in, and every goal can be met."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest

from openhands_rl_plugin.contrib.webshop import WebShop, oracle_actions
from openhands_rl_plugin.contrib.webshop.catalogue import PRODUCT_TYPES
from openhands_rl_plugin.contrib.webshop.engine import Listing, listings

CATALOGUE_SHA256 = "80b98b7d1127683b3c0a3dca32d085d47a405a53596fa7b65aba71ee04a10848"
GOALS_SHA256 = "593db8cfcd43f55d1055947030a4a8ac5effec7d2568e375525b7a207b4dc4d6"


@pytest.fixture(scope="module")
def world() -> WebShop:
    return WebShop(results_per_page=5)


def sha256(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def test_the_default_catalogue_and_goals_never_change(world: WebShop) -> None:
    assert sha256(world.catalogue.products) == CATALOGUE_SHA256
    assert sha256(world.goals) == GOALS_SHA256


def test_another_process_with_another_hash_seed_makes_the_same_shop() -> None:
    code = (
        "import hashlib; from openhands_rl_plugin.contrib.webshop import WebShop;"
        "print(hashlib.sha256(repr(WebShop().goals).encode()).hexdigest())"
    )
    made = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.strip() == GOALS_SHA256


def test_another_seed_makes_another_shop(world: WebShop) -> None:
    other = WebShop(seed=1)
    assert {p.asin for p in other.catalogue.products} != {p.asin for p in world.catalogue.products}
    assert {g.instruction for g in other.goals} != {g.instruction for g in world.goals}


def test_products_are_unique_compact_and_of_every_type(world: WebShop) -> None:
    products = world.catalogue.products
    assert len(products) == len({p.asin for p in products}) == 1000
    assert all(len(p.asin) == 6 and p.asin.startswith("B0") and not set(p.asin) & set("ILOU") for p in products)
    assert all(3 <= len(p.title.split()) <= 8 for p in products)
    assert Counter(p.query for p in products) == {kind.name: 50 for kind in PRODUCT_TYPES}
    for product in products:
        values = [value for group in product.options for value in group.values]
        assert len(values) == len(set(values))
        assert all(attribute in product.title for attribute in product.attributes[:2])


def test_splits_share_neither_goals_nor_targets(world: WebShop) -> None:
    train = [world.goals[index] for index in world.goal_indices("train")]
    heldout = [world.goals[index] for index in world.goal_indices("heldout")]
    assert (len(train), len(heldout)) == (1200, 300)
    assert [goal.index for goal in (*train, *heldout)] == list(range(1500))
    assert not {g.asin for g in train} & {g.asin for g in heldout}
    assert len({g.instruction for g in world.goals}) == 1500


def test_an_instruction_reads_like_webshops(world: WebShop) -> None:
    goal = next(goal for goal in world.goals if len(goal.options) == 2 and len(goal.attributes) == 2)
    (name_1, value_1), (name_2, value_2) = goal.options
    assert goal.instruction == (
        f"Find me {goal.attributes[0]}, {goal.attributes[1]} {goal.query} with {name_1}: {value_1}, and "
        f"{name_2}: {value_2}, and price lower than {goal.price_upper} dollars"
    )


@pytest.mark.parametrize("results_per_page", [3, 5, 10])
def test_the_oracle_meets_every_goal(results_per_page: int) -> None:
    world = WebShop(results_per_page=results_per_page)
    for goal in world.goals:
        session = world.session(goal.index)
        results = [session.step(action) for action in oracle_actions(world, goal.index)]
        assert results[-1].reward == 1.0 and results[-1].done and not results[-1].truncated, goal
        assert [result.reward for result in results[:-1]] == [0.0] * (len(results) - 1)


@pytest.mark.parametrize(("num_products", "seed"), [(4, 0), (60, 3), (400, 9), (3000, 2)])
def test_the_oracle_meets_the_goals_of_other_shops(num_products: int, seed: int) -> None:
    world = WebShop(num_products, seed, num_goals=200, separator="\n")
    assert world.goal_indices("train") and world.goal_indices("heldout")
    for goal in world.goals:
        session = world.session(goal.index)
        assert [session.step(action) for action in oracle_actions(world, goal.index)][-1].reward == 1.0


def test_the_oracle_does_not_know_the_target(world: WebShop) -> None:
    bought_another = 0
    for goal in world.goals[:200]:
        session = world.session(goal.index)
        purchase = [session.step(action) for action in oracle_actions(world, goal.index)][-1].info
        assert purchase is not None
        bought_another += purchase.asin != goal.asin
    assert bought_another > 0


def test_buying_the_first_result_is_not_enough(world: WebShop) -> None:
    def rewards_of(choose_first_affordable: bool) -> float:
        met = 0
        for goal in world.goals:
            session = world.session(goal.index)
            session.step(f"search[{' '.join((*goal.attributes, goal.query))}]")
            found = listings(session.observation, world.separator)
            affordable = [entry for entry in found if entry.price <= goal.price_upper] or found
            met += _buy(session, (affordable if choose_first_affordable else found)[0], goal.options) == 1.0
        return met / len(world.goals)

    careless, careful = rewards_of(False), rewards_of(True)
    assert 0.3 < careless < 0.6
    assert careless + 0.2 < careful < 0.95


def _buy(session, listing: Listing, options: tuple[tuple[str, str], ...]) -> float:
    session.step(f"click[{listing.asin}]")
    for _, value in options:
        session.step(f"click[{value}]")
    return session.step("click[Buy Now]").reward


def test_search_ranks_matching_products_first(world: WebShop) -> None:
    target = world.catalogue.products[17]
    found = world.index.search(" ".join((*target.attributes, target.query)))
    assert found[0].query == target.query and set(target.attributes) <= set(found[0].attributes)
    assert world.index.search("zzz ???") == ()
    assert world.index.search("WATERPROOF Backpack!") == world.index.search("waterproof backpack")
    assert len(world.index.search("waterproof backpack", limit=7)) == 7


def test_words_past_the_limit_of_a_query_do_not_count(world: WebShop) -> None:
    assert world.index.search("zzz " * 32 + "backpack") == ()


def test_making_the_shop_and_searching_it_are_fast() -> None:
    started = time.perf_counter()
    world = WebShop()
    built = time.perf_counter() - started
    queries = [" ".join((*goal.attributes, goal.query)) for goal in world.goals[:300]]
    started = time.perf_counter()
    for query in queries:
        world.index.search(query)
    assert built < 1.5
    assert (time.perf_counter() - started) / len(queries) < 0.003


@pytest.mark.parametrize(
    "wrong",
    [{"num_products": 0}, {"num_products": 3}, {"num_goals": 1}, {"results_per_page": 0}, {"max_steps": 0}],
)
def test_impossible_shops_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        WebShop(**wrong)


@pytest.mark.parametrize("index", [-1, 1500])
def test_a_goal_that_does_not_exist_is_refused(world: WebShop, index: int) -> None:
    with pytest.raises(IndexError, match="between 0 and 1499"):
        world.session(index)

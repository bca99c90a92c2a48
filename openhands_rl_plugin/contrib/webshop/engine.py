"""The shop: its pages and actions, a session in it, and the actions that reach a goal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from openhands_rl_plugin.contrib.webshop.catalogue import (
    Goal,
    Product,
    RewardBreakdown,
    SearchIndex,
    generate_catalogue,
    generate_goals,
    purchase_reward,
)

RESULTS_PER_PAGE, MAX_STEPS, SEPARATOR = 4, 15, "\n"
"""A page has few results, and a newline between its texts: WebShop's own " [SEP] " costs more tokens."""


class Button(StrEnum):
    """The fixed buttons, as they are shown."""

    SEARCH = "Search"
    BACK_TO_SEARCH = "Back to Search"
    NEXT = "Next >"
    PREVIOUS = "< Prev"
    DESCRIPTION = "Description"
    FEATURES = "Features"
    REVIEWS = "Reviews"
    ATTRIBUTES = "Attributes"
    BUY_NOW = "Buy Now"


DETAIL_BUTTONS = (Button.DESCRIPTION, Button.FEATURES, Button.REVIEWS, Button.ATTRIBUTES)


class Page(NamedTuple):
    """The parts of a page, and the texts that can be clicked."""

    parts: tuple[str, ...]
    clickables: tuple[str, ...] = ()


def results_page(head: tuple[str, ...], found: Sequence[Product], page: int) -> Page:
    """Page `page` of the search results, counted from 1."""
    steps = [Button.PREVIOUS] * (page > 1) + [Button.NEXT] * (page * RESULTS_PER_PAGE < len(found))
    shown = found[(page - 1) * RESULTS_PER_PAGE : page * RESULTS_PER_PAGE]
    parts = (*head, Button.BACK_TO_SEARCH, f"Page {page} (Total results: {len(found)})", *steps)
    listed = (part for product in shown for part in (product.asin, product.title, f"${product.price}"))
    return Page((*parts, *listed), (Button.BACK_TO_SEARCH, *steps, *(product.asin for product in shown)))


def item_page(head: tuple[str, ...], product: Product, selected: Sequence[tuple[str, str]]) -> Page:
    """A product with its options; `selected` are the (group, value) pairs clicked so far."""
    options = [part for group in product.options for part in (group.name, *group.values)]
    chosen = [f"Selected: {', '.join(f'{name}={value}' for name, value in selected)}"] if selected else []
    back, buy = (Button.BACK_TO_SEARCH, Button.PREVIOUS), (*DETAIL_BUTTONS, Button.BUY_NOW)
    about = (product.title, f"Price: ${product.price}", "Rating: N.A.")
    values = (value for group in product.options for value in group.values)
    return Page((*head, *back, *options, *chosen, *about, *buy), (*back, *buy, *values))


def detail_page(head: tuple[str, ...], product: Product, detail: Button) -> Page:
    """The page that one of `DETAIL_BUTTONS` opens."""
    about = f"{product.title} from our {product.category[0].lower()} department."
    content = {Button.DESCRIPTION: (about,), Button.REVIEWS: ("No reviews yet.",)}
    back = (Button.BACK_TO_SEARCH, Button.PREVIOUS)
    return Page((*head, *back, *content.get(detail, product.attributes)), back)


_ECHOED_CHARACTERS = 60
_ACTION = re.compile(r"(search|click)\s*\[(.*)\]", re.IGNORECASE | re.DOTALL)


class Purchase(NamedTuple):
    """The purchase that ended an episode: the product, its (group, value) options, and the parts of the reward."""

    asin: str
    options: tuple[tuple[str, str], ...]
    breakdown: RewardBreakdown


class StepResult(NamedTuple):
    """The result of one step. `truncated`: the step limit, not a purchase, ended the episode.

    `info` is set by the step that buys.
    """

    state: str
    reward: float
    done: bool
    truncated: bool
    info: Purchase | None


@dataclass(frozen=True, slots=True)
class _Place:
    """The state of an episode. Without `searched` it is the front page; with `product`, that product's page."""

    searched: bool = False
    found: tuple[Product, ...] = ()
    page: int = 1
    product: Product | None = None
    detail: Button | None = None
    selected: tuple[tuple[str, str], ...] = ()
    steps: int = 0
    truncated: bool = False
    purchase: Purchase | None = None

    @property
    def done(self) -> bool:
        return self.truncated or self.purchase is not None


class _Refused(Exception):
    """The action is malformed or impossible here; the message is the reason."""


class WebShop:
    """A shop that any number of sessions can share: catalogue, goals and search index, none of which changes."""

    def __init__(self) -> None:
        self.products = generate_catalogue()
        self.goals = generate_goals(self.products)
        self.index = SearchIndex(self.products)
        self.by_asin = {product.asin: product for product in self.products}

    def session(self, goal_index: int) -> WebShopSession:
        """Start an episode; raises IndexError for an index outside `goals`."""
        return WebShopSession(self, self.goals[goal_index])


class WebShopSession:
    """One episode. Its whole state is one immutable value."""

    __slots__ = ("_place", "goal", "world")

    def __init__(self, world: WebShop, goal: Goal) -> None:
        self.world = world
        self.goal = goal
        self._place = _Place()

    @property
    def observation(self) -> str:
        """The text of the current page."""
        return SEPARATOR.join(self.page.parts)

    @property
    def done(self) -> bool:
        """Whether the episode has ended, by a purchase or by the step limit."""
        return self._place.done

    @property
    def steps(self) -> int:
        """The number of steps, those with invalid actions included."""
        return self._place.steps

    @property
    def purchase(self) -> Purchase | None:
        """The purchase; `None` before it."""
        return self._place.purchase

    @property
    def page(self) -> Page:
        """The current page."""
        place, head = self._place, ("Instruction:", self.goal.instruction)
        if place.purchase is not None:
            score = f"Your score (min 0.0, max 1.0): {round(place.purchase.breakdown.reward, 4)}"
            return Page(("Thank you for shopping with us!", score))
        if place.product is not None and place.detail is not None:
            return detail_page(head, place.product, place.detail)
        if place.product is not None:
            return item_page(head, place.product, place.selected)
        if place.searched:
            return results_page(head, place.found, place.page)
        return Page(("WebShop", *head, Button.SEARCH), (Button.SEARCH,))

    def step(self, action: str) -> StepResult:
        """Execute one action, `search[...]` or `click[...]`; the observation of an invalid one lists the valid actions.

        As in WebShop's text environment, every page can be searched from. A step after the end of the episode changes
        nothing and has reward 0.
        """
        if self.done:
            state = SEPARATOR.join(("The episode is over.", self.observation))
            return StepResult(state, 0.0, True, self._place.truncated, None)
        problem, place = "", self._place
        try:
            place = self._after(action)
        except _Refused as refusal:
            problem = str(refusal)
        steps = place.steps + 1
        out_of_steps = place.purchase is None and steps >= MAX_STEPS
        self._place = place = replace(place, steps=steps, truncated=out_of_steps)
        state = self.observation
        if problem:
            clickables = ", ".join(text for text in self.page.clickables if text != Button.SEARCH)
            clicks = f" or click[...] one of: {clickables}" if clickables else ""
            state = f"Invalid action: {problem} You can search[keywords]{clicks}"
        reward = place.purchase.breakdown.reward if place.purchase is not None else 0.0
        return StepResult(state, reward, place.done, place.truncated, place.purchase)

    def _after(self, action: str) -> _Place:
        # As in the original shop, whose pattern ends with the line: what a model says below its action is ignored.
        lines = action.strip().splitlines() or [""]
        match = _ACTION.fullmatch(action.strip()) or _ACTION.fullmatch(lines[0].strip())
        if match is None:
            raise _Refused(f"'{_shortened(action)}' is neither search[keywords] nor click[value].")
        verb, argument = match.group(1).lower(), match.group(2).strip()
        if not argument:
            raise _Refused(f"{verb}[] is empty.")
        if verb == "search":
            found = self.world.index.search(argument)
            return _Place(searched=True, found=found, steps=self._place.steps)
        target = next((text for text in self.page.clickables if text.lower() == argument.lower()), None)
        if target is None:
            raise _Refused(f"there is no '{_shortened(argument)}' to click here.")
        return self._after_click(self._place, target)

    def _after_click(self, place: _Place, target: str) -> _Place:
        product = place.product
        if target == Button.SEARCH:
            raise _Refused("a search needs keywords.")
        if target == Button.BACK_TO_SEARCH:
            return _Place(steps=place.steps)
        if target == Button.PREVIOUS and place.detail is not None:
            return replace(place, detail=None)
        if target == Button.PREVIOUS and product is not None:
            return replace(place, product=None, selected=())
        if product is None:
            turns = {str(Button.PREVIOUS): -1, str(Button.NEXT): 1}.get(target)
            if turns is not None:
                return replace(place, page=place.page + turns)
            return replace(place, product=self.world.by_asin[target])
        if target == Button.BUY_NOW:
            bought = Purchase(product.asin, place.selected, purchase_reward(product, place.selected, self.goal))
            return replace(place, purchase=bought)
        if target in DETAIL_BUTTONS:
            return replace(place, detail=Button(target))
        chosen = {**dict(place.selected), product.option_group_of(target): target}
        in_order = tuple((g.name, chosen[g.name]) for g in product.options if g.name in chosen)
        return replace(place, selected=in_order)


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _ECHOED_CHARACTERS else flat[: _ECHOED_CHARACTERS - 3] + "..."


def oracle_actions(world: WebShop, goal_index: int) -> list[str]:
    """The actions that earn reward 1.0 for that goal, which each of them has."""
    return list(_shop(world.session(goal_index)))


def _shop(session: WebShopSession) -> Iterator[str]:
    """Run `session` to its end and yield each action after its step."""

    def take(action: str) -> str:
        session.step(action)
        return action

    goal, world = session.goal, session.world
    yield take(f"search[{' '.join((*goal.attributes, goal.query))}]")
    while not session.done:
        shown = [world.by_asin[each] for each in session.page.clickables if each in world.by_asin]
        fitting = [each for each in shown if each.title.endswith(goal.query) and each.price <= goal.price_upper]
        # First those whose titles show all wanted attributes.
        for product in sorted(fitting, key=lambda each: any(name not in each.title for name in goal.attributes)):
            yield take(f"click[{product.asin}]")
            if all(value in session.page.clickables for _, value in goal.options):
                unseen = [name for name in goal.attributes if name not in product.title]
                if unseen:
                    yield take(f"click[{Button.ATTRIBUTES}]")
                    unseen = [name for name in unseen if name not in session.page.parts]
                    yield take(f"click[{Button.PREVIOUS}]")
                if not unseen:
                    for value in (*(value for _, value in goal.options), Button.BUY_NOW):
                        yield take(f"click[{value}]")
                    return
            yield take(f"click[{Button.PREVIOUS}]")
        yield take(f"click[{Button.NEXT}]")

"""The shop: its pages and actions, a session in it, and the actions that reach a goal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from openhands_rl_plugin.contrib.webshop.catalogue import (
    Goal,
    Product,
    RewardBreakdown,
    SearchIndex,
    Split,
    generate_catalogue,
    generate_goals,
    purchase_reward,
)
from openhands_rl_plugin.core.errors import RLError

DEFAULT_SEPARATOR = " [SEP] "


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


@dataclass(frozen=True, slots=True)
class Page:
    """What is shown, part by part, and which texts can be clicked. `path` names the page as its URL would."""

    path: str
    parts: tuple[str, ...]
    clickables: tuple[str, ...]


def search_page(instruction: str) -> Page:
    """The front page with the search bar."""
    return Page(
        path="",
        parts=("WebShop", *_header(instruction), Button.SEARCH),
        clickables=(Button.SEARCH,),
    )


def results_page(instruction: str, products: Sequence[Product], *, page: int, per_page: int, total: int) -> Page:
    """One page of search results: `products` are those of page `page`, counted from 1."""
    buttons: list[str] = [Button.BACK_TO_SEARCH]
    parts: list[str] = [*_header(instruction), Button.BACK_TO_SEARCH, f"Page {page} (Total results: {total})"]
    if page > 1:
        buttons.append(Button.PREVIOUS)
        parts.append(Button.PREVIOUS)
    if page * per_page < total:
        buttons.append(Button.NEXT)
        parts.append(Button.NEXT)
    for product in products:
        parts += (product.asin, product.title, f"${product.price}")
    return Page(
        path=f"search_results/{page}",
        parts=tuple(parts),
        clickables=(*buttons, *(product.asin for product in products)),
    )


def item_page(instruction: str, product: Product, selected: Sequence[tuple[str, str]]) -> Page:
    """A product with its options; `selected` are the (group, value) pairs clicked so far."""
    options = [part for group in product.options for part in (group.name, *group.values)]
    chosen = [f"Selected: {', '.join(f'{name}={value}' for name, value in selected)}"] if selected else []
    parts = (
        *_header(instruction),
        Button.BACK_TO_SEARCH,
        Button.PREVIOUS,
        *options,
        *chosen,
        product.title,
        f"Price: ${product.price}",
        "Rating: N.A.",
        *DETAIL_BUTTONS,
        Button.BUY_NOW,
    )
    values = (value for group in product.options for value in group.values)
    return Page(
        path=f"item_page/{product.asin}",
        parts=parts,
        clickables=(Button.BACK_TO_SEARCH, Button.PREVIOUS, *DETAIL_BUTTONS, Button.BUY_NOW, *values),
    )


def detail_page(instruction: str, product: Product, detail: Button) -> Page:
    """One of the pages behind `DETAIL_BUTTONS`."""
    match detail:
        case Button.DESCRIPTION:
            content: tuple[str, ...] = (product.description,)
        case Button.FEATURES | Button.ATTRIBUTES:
            content = product.attributes
        case _:
            content = ("No reviews yet.",)
    return Page(
        path=f"item_sub_page/{product.asin}/{detail}",
        parts=(*_header(instruction), Button.BACK_TO_SEARCH, Button.PREVIOUS, *content),
        clickables=(Button.BACK_TO_SEARCH, Button.PREVIOUS),
    )


def final_page(breakdown: RewardBreakdown) -> Page:
    """The page after a purchase."""
    score = f"Your score (min 0.0, max 1.0): {round(breakdown.reward, 4)}"
    return Page(path="done", parts=("Thank you for shopping with us!", score), clickables=())


def _header(instruction: str) -> tuple[str, str]:
    return ("Instruction:", instruction)


MAX_RESULTS = 50
_ECHOED_CHARACTERS = 60
_ACTION = re.compile(r"(search|click)\s*\[(.*)\]", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Purchase:
    """The purchase that ended an episode: the product, its (group, value) options, and the parts of the reward."""

    asin: str
    options: tuple[tuple[str, str], ...]
    breakdown: RewardBreakdown


@dataclass(frozen=True, slots=True)
class StepResult:
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
    """A shop that any number of sessions can share: catalogue, goals and search index, none of which changes.

    Args:
        num_products: size of the generated catalogue.
        seed: the same seed gives the same shop.
        num_goals: how many goals to make; a fifth of them is held out.
        results_per_page: products on a results page.
        max_steps: an episode that has not bought by then is truncated.
        separator: the text between the parts of a page; `"\\n"` needs fewer tokens than WebShop's own.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        num_products: int = 1000,
        seed: int = 0,
        *,
        num_goals: int = 1500,
        results_per_page: int = 10,
        max_steps: int = 15,
        separator: str = DEFAULT_SEPARATOR,
    ) -> None:
        if results_per_page < 1 or max_steps < 1:
            raise ValueError("results_per_page and max_steps must be at least 1")
        self.products = generate_catalogue(num_products, seed)
        self.goals = generate_goals(self.products, seed, num_goals)
        self.results_per_page = results_per_page
        self.max_steps = max_steps
        self.separator = separator
        self.options = {
            **{"num_products": num_products, "seed": seed, "num_goals": num_goals},
            **{"results_per_page": results_per_page, "max_steps": max_steps, "separator": separator},
        }
        """The arguments that make the same shop."""
        self.index = SearchIndex(self.products)
        self.by_asin = {product.asin: product for product in self.products}

    def goal_indices(self, split: Split) -> tuple[int, ...]:
        """The indices into `goals` that belong to `split`."""
        return tuple(goal.index for goal in self.goals if goal.split == split)

    def session(self, goal_index: int) -> WebShopSession:
        """Start an episode; raises IndexError for an index outside `goals`."""
        if not 0 <= goal_index < len(self.goals):
            raise IndexError(f"goal index {goal_index} is not between 0 and {len(self.goals) - 1}")
        return WebShopSession(self, self.goals[goal_index])


class WebShopSession:
    """One episode. Its whole state is one immutable value, so `fork` copies a reference."""

    __slots__ = ("_place", "goal", "world")

    def __init__(self, world: WebShop, goal: Goal) -> None:
        self.world = world
        self.goal = goal
        self._place = _Place()

    def fork(self) -> WebShopSession:
        """An independent session in the same state."""
        twin = WebShopSession(self.world, self.goal)
        twin._place = self._place
        return twin

    @property
    def observation(self) -> str:
        """The text of the current page."""
        return self.world.separator.join(self.page.parts)

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
        place, instruction = self._place, self.goal.instruction
        if place.purchase is not None:
            return final_page(place.purchase.breakdown)
        if place.product is not None and place.detail is not None:
            return detail_page(instruction, place.product, place.detail)
        if place.product is not None:
            return item_page(instruction, place.product, place.selected)
        if place.searched:
            per_page = self.world.results_per_page
            shown = place.found[(place.page - 1) * per_page : place.page * per_page]
            return results_page(instruction, shown, page=place.page, per_page=per_page, total=len(place.found))
        return search_page(instruction)

    def step(self, action: str) -> StepResult:
        """Execute one action, `search[...]` or `click[...]`; the observation of an invalid one lists the valid actions.

        As in WebShop's text environment, every page can be searched from. A step after the end of the episode changes
        nothing and has reward 0.
        """
        if self.done:
            state = self.world.separator.join(("The episode is over.", self.observation))
            return StepResult(state, 0.0, True, self._place.truncated, None)
        problem = None
        place = self._place
        try:
            place = self._after(action)
        except _Refused as refusal:
            problem = str(refusal)
        steps = place.steps + 1
        out_of_steps = place.purchase is None and steps >= self.world.max_steps
        self._place = place = replace(place, steps=steps, truncated=out_of_steps)
        state = self.observation if problem is None else self._refusal(problem)
        reward = place.purchase.breakdown.reward if place.purchase is not None else 0.0
        return StepResult(state, reward, place.done, place.truncated, place.purchase)

    def _refusal(self, problem: str) -> str:
        clickables = ", ".join(text for text in self.page.clickables if text != Button.SEARCH)
        clicks = f" or click[...] one of: {clickables}" if clickables else ""
        return f"Invalid action: {problem} You can search[keywords]{clicks}"

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
            return self._after_search(argument)
        return self._after_click(argument)

    def _after_search(self, keywords: str) -> _Place:
        found = self.world.index.search(keywords, limit=MAX_RESULTS)
        return _Place(searched=True, found=found, steps=self._place.steps)

    def _after_click(self, value: str) -> _Place:
        wanted = value.lower()
        target = next((text for text in self.page.clickables if text.lower() == wanted), None)
        if target is None:
            raise _Refused(f"there is no '{_shortened(value)}' to click here.")
        if target == Button.SEARCH:
            raise _Refused("a search needs keywords.")
        place = self._place
        if target == Button.BACK_TO_SEARCH:
            return _Place(steps=place.steps)
        if target == Button.PREVIOUS:
            return self._after_previous()
        if place.product is None:
            return self._after_results_click(target)
        return self._after_item_click(place.product, target)

    def _after_previous(self) -> _Place:
        place = self._place
        if place.detail is not None:
            return replace(place, detail=None)
        if place.product is not None:
            return replace(place, product=None, selected=())
        return replace(place, page=place.page - 1)

    def _after_results_click(self, target: str) -> _Place:
        if target == Button.NEXT:
            return replace(self._place, page=self._place.page + 1)
        return replace(self._place, product=self.world.by_asin[target])

    def _after_item_click(self, product: Product, target: str) -> _Place:
        place = self._place
        if target == Button.BUY_NOW:
            breakdown = purchase_reward(product, place.selected, self.goal)
            purchase = Purchase(product.asin, place.selected, breakdown)
            return replace(place, purchase=purchase)
        if target in DETAIL_BUTTONS:
            return replace(place, detail=Button(target))
        group = product.option_group_of(target)
        if group is None:
            raise _Refused(f"there is no '{_shortened(target)}' to click here.")
        others = {name: value for name, value in place.selected if name != group}
        chosen = {**others, group: target}
        in_order = tuple((g.name, chosen[g.name]) for g in product.options if g.name in chosen)
        return replace(place, selected=in_order)


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _ECHOED_CHARACTERS else flat[: _ECHOED_CHARACTERS - 3] + "..."


class OracleFailedError(RLError):
    """No product that the search found meets the goal."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One entry of a results page; `price` in dollars."""

    asin: str
    title: str
    price: float


def oracle_actions(world: WebShop, goal_index: int) -> list[str]:
    """The actions that earn reward 1.0 for that goal.

    Raises:
        IndexError: there is no such goal.
        OracleFailedError: no listing meets the goal; every generated goal has one that does.
    """
    session = world.session(goal_index)
    return list(_shop(session))


def listings(observation: str, separator: str) -> list[Listing]:
    """The entries of a results page, read from its text."""
    parts = observation.split(separator)
    return [
        Listing(asin=parts[at - 2], title=parts[at - 1], price=float(part[1:]))
        for at, part in enumerate(parts)
        if at >= 2 and part.startswith("$")
    ]


def _shop(session: WebShopSession) -> Iterator[str]:
    """Run `session` to its end and yield each action after its step."""
    goal, separator = session.goal, session.world.separator
    yield _take(session, f"search[{' '.join((*goal.attributes, goal.query))}]")
    while not session.done:
        for listing in _promising(listings(session.observation, separator), goal):
            yield _take(session, f"click[{listing.asin}]")
            if _offers(session, goal):
                unseen = _unseen_attributes(listing, goal)
                if unseen:
                    yield _take(session, f"click[{Button.ATTRIBUTES}]")
                    unseen = [attribute for attribute in unseen if attribute not in session.page.parts]
                    yield _take(session, f"click[{Button.PREVIOUS}]")
                if not unseen:
                    yield from _buy(session)
                    return
            yield _take(session, f"click[{Button.PREVIOUS}]")
        if session.done or Button.NEXT not in session.page.clickables:
            break
        yield _take(session, f"click[{Button.NEXT}]")
    raise OracleFailedError(f"nothing found within the step limit for goal {goal.index}: {goal.instruction}")


def _take(session: WebShopSession, action: str) -> str:
    session.step(action)
    return action


def _promising(found: Sequence[Listing], goal: Goal) -> list[Listing]:
    """Listings of the right type and price, first those whose titles show all wanted attributes."""
    affordable = [entry for entry in found if entry.title.endswith(goal.query) and entry.price <= goal.price_upper]
    return sorted(affordable, key=lambda entry: bool(_unseen_attributes(entry, goal)))


def _unseen_attributes(listing: Listing, goal: Goal) -> list[str]:
    return [attribute for attribute in goal.attributes if attribute not in listing.title]


def _offers(session: WebShopSession, goal: Goal) -> bool:
    return all(value in session.page.clickables for _, value in goal.options)


def _buy(session: WebShopSession) -> Iterator[str]:
    for _, value in session.goal.options:
        yield _take(session, f"click[{value}]")
    yield _take(session, f"click[{Button.BUY_NOW}]")

"""The shop without a network: an immutable world, and sessions that are cheap to fork."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from openhands_rl_plugin.contrib.webshop.catalogue import Catalogue, Product, generate_catalogue
from openhands_rl_plugin.contrib.webshop.goals import Goal, Split, generate_goals
from openhands_rl_plugin.contrib.webshop.pages import (
    DEFAULT_SEPARATOR,
    DETAIL_BUTTONS,
    Button,
    Page,
    detail_page,
    final_page,
    item_page,
    results_page,
    search_page,
)
from openhands_rl_plugin.contrib.webshop.reward import RewardBreakdown, purchase_reward
from openhands_rl_plugin.contrib.webshop.search import SearchIndex

MAX_RESULTS = 50
_ECHOED_CHARACTERS = 60
_ACTION = re.compile(r"(search|click)\s*\[(.*)\]", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Purchase:
    """The purchase that ended an episode: the product, its (group, value) options, and the parts of the reward."""

    goal_index: int
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
        self.catalogue: Catalogue = generate_catalogue(num_products, seed)
        self.goals: tuple[Goal, ...] = generate_goals(self.catalogue, num_goals)
        self.results_per_page = results_per_page
        self.max_steps = max_steps
        self.separator = separator
        self.index = SearchIndex(self.catalogue.products)
        self._by_asin = self.catalogue.by_asin()

    def goal_indices(self, split: Split) -> tuple[int, ...]:
        """The indices into `goals` that belong to `split`."""
        return tuple(goal.index for goal in self.goals if goal.split == split)

    def product(self, asin: str) -> Product:
        """The product with that ASIN; raises KeyError where there is none."""
        return self._by_asin[asin]

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
        return self.page.text(self.world.separator)

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
        return replace(self._place, product=self.world.product(target))

    def _after_item_click(self, product: Product, target: str) -> _Place:
        place = self._place
        if target == Button.BUY_NOW:
            breakdown = purchase_reward(product, place.selected, self.goal)
            purchase = Purchase(self.goal.index, product.asin, place.selected, breakdown)
            return replace(place, purchase=purchase)
        for detail in DETAIL_BUTTONS:
            if target == detail:
                return replace(place, detail=detail)
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

"""The texts of the shop's pages, in the form WebShop's text observations have.

A page is a sequence of parts; some of them can be clicked. The separator is WebShop's ` [SEP] ` unless the
world was made with a shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape

from openhands_rl_plugin.contrib.webshop.catalogue import Product
from openhands_rl_plugin.contrib.webshop.reward import RewardBreakdown

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
    has_search_bar: bool = False

    def text(self, separator: str = DEFAULT_SEPARATOR) -> str:
        """The observation."""
        return separator.join(self.parts)


def search_page(instruction: str) -> Page:
    """The front page with the search bar."""
    return Page(
        path="",
        parts=("WebShop", *_header(instruction), Button.SEARCH),
        clickables=(Button.SEARCH,),
        has_search_bar=True,
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


def page_html(page: Page) -> str:
    """A page as HTML, with a button for all that can be clicked."""
    clickable = set(page.clickables)
    rows = (
        f"<button>{escape(part)}</button>" if part in clickable else f"<p>{escape(part)}</p>" for part in page.parts
    )
    return f"<html><body>{''.join(rows)}</body></html>"


def _header(instruction: str) -> tuple[str, str]:
    return ("Instruction:", instruction)

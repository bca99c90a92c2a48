"""A scripted policy that meets every goal, using only the pages and the instruction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.contrib.webshop.engine import WebShop, WebShopSession
from openhands_rl_plugin.contrib.webshop.goals import Goal
from openhands_rl_plugin.contrib.webshop.pages import Button
from openhands_rl_plugin.core.errors import RLError


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

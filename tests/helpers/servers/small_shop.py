"""A shop of twenty lamps and tables over HTTP, by WebShop's actions and both forms of its requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from openhands_rl_plugin.core.servers import listening, serving

_NAMES = itertools.product(
    ("desk lamp", "floor lamp", "coffee table", "bench"), ["red", "blue", "green", "oak", "steel"]
)
PRODUCTS = {f"B{number:03}": f"{colour} {thing}" for number, (thing, colour) in enumerate(_NAMES)}


@dataclass(frozen=True)
class Goal:
    index: int

    @property
    def product(self) -> str:
        return f"B{self.index % len(PRODUCTS):03}"

    @property
    def instruction(self) -> str:
        return f"Find me a large {PRODUCTS[self.product]}, number {self.index}"


GOALS = tuple(map(Goal, range(100)))

GOAL = 1
INSTRUCTION = "Buy what the page asks for."
_SEARCH = "search[blue desk lamp]"
GOOD = (_SEARCH, "click[B001]", "click[Buy Now]")
"""Earns 0.75 for ``GOAL``."""
ORACLE = (*GOOD[:2], "click[Large]", GOOD[2])
"""Earns 1."""
BAD = (_SEARCH, "click[B000]", "click[Buy Now]")
"""Earns nothing."""


@dataclass(frozen=True)
class Step:
    state: str
    reward: float = 0.0
    done: bool = False


@dataclass
class ShopSession:
    """One episode: what was found, the page of results, and the product whose page is shown."""

    goal: Goal
    found: tuple[str, ...] | None = None
    page: int = 0
    product: str = ""
    large: bool = False
    done: bool = False

    @property
    def observation(self) -> str:
        shown = [f"{text}\n{PRODUCTS[text]}" if text in PRODUCTS else text for text in self.clickable()]
        return "Bought" if self.done else "\n".join(["Instruction:", self.goal.instruction, *shown])

    def clickable(self) -> list[str]:
        if self.product:
            return ["Back to Search", "< Prev", "Large", "Buy Now"]
        if self.found is None:
            return ["Search"]
        shown = self.found[2 * self.page : 2 * self.page + 2]
        turns = [*["< Prev"][: self.page], *["Next >"][: len(self.found) > 2 * self.page + 2]]
        return ["Back to Search", *turns, *shown]

    def step(self, action: str) -> Step:
        """Earns 1 for a large one of the right product, 0.75 for another one of it."""
        verb, _, argument = action.strip().removesuffix("]").partition("[")
        if verb == "search" and argument:
            words = set(argument.split())
            found = sorted(PRODUCTS, key=lambda asin: -len(words & set(PRODUCTS[asin].split())))
            self.found, self.product, self.page = tuple(found), "", 0
        elif verb != "click" or argument not in self.clickable() or argument == "Search":
            return Step(f"Invalid action: You can search[keywords] or click[...] one of: {self.clickable()}")
        elif argument == "Back to Search":
            self.found, self.product, self.page = None, "", 0
        elif argument in PRODUCTS or (self.product and argument == "< Prev"):
            self.product, self.large = argument if argument in PRODUCTS else "", False
        elif argument in ("Large", "Buy Now"):
            self.large, self.done = self.large or argument == "Large", argument == "Buy Now"
        else:
            self.page += 1 if argument == "Next >" else -1
        bought = self.done and self.product == self.goal.product
        return Step(self.observation, 0.75 * bought + 0.25 * (bought and self.large), self.done)


def create_shop() -> Starlette:
    """The shop with sessions of its own."""
    sessions: dict[int, ShopSession] = {}

    def opened(session: ShopSession) -> int:
        sessions[len(sessions)] = session
        return len(sessions) - 1

    async def answered(request: Request) -> JSONResponse:
        body: dict[str, Any] = await request.json() if request.url.path != "/create" else {}
        key = body.get("session", body.get("env_idx", -1))
        match request.url.path:
            case "/create":
                return JSONResponse(opened(ShopSession(GOALS[0])))
            case "/reset" if "env_idx" in body:
                sessions[key] = ShopSession(GOALS[body["session_id"]])
                return JSONResponse([sessions[key].observation, None])
            case "/reset":
                key = opened(ShopSession(GOALS[body["idx"]]))
                return JSONResponse({"state": sessions[key].observation, "session": key})
            case "/step":
                return JSONResponse(asdict(sessions[key].step(body["action"])))
            case _:
                return JSONResponse(True)

    paths = ("/create", "/reset", "/step", "/close")
    return Starlette(routes=[Route(path, answered, methods=["POST"]) for path in paths])


@contextmanager
def running_shop() -> Iterator[str]:
    """The URL of a shop on a free loopback port."""
    with listening("127.0.0.1", 0) as listener, serving(create_shop(), listener, lifespan="off") as url:
        yield url

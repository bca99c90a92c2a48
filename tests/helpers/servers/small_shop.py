"""A shop of twenty lamps and tables over HTTP, by WebShop's actions and both forms of its requests."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from openhands_rl_plugin.core.servers import AccessRules, listening, serving

PRODUCTS = {
    f"B{number:03}": f"{colour} {thing}"
    for number, (thing, colour) in enumerate(
        itertools.product(
            ("desk lamp", "floor lamp", "coffee table", "bench"), ("red", "blue", "green", "oak", "steel")
        )
    )
}


@dataclass(frozen=True)
class Goal:
    index: int
    product: str

    @property
    def instruction(self) -> str:
        return f"Find me a large {PRODUCTS[self.product]}, number {self.index}"


GOALS = tuple(Goal(number, f"B{number % len(PRODUCTS):03}") for number in range(100))


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
        lines = ["Instruction:", self.goal.instruction]
        for text in self.clickable():
            lines += [text, PRODUCTS[text]] if text in PRODUCTS else [text]
        return "\n".join(["Bought"] if self.done else [*lines, PRODUCTS[self.product]] if self.product else lines)

    def clickable(self) -> list[str]:
        if self.product:
            return ["Back to Search", "< Prev", "Large", "Buy Now"]
        if self.found is None:
            return ["Search"]
        shown = self.found[2 * self.page : 2 * self.page + 2]
        turns = [*["< Prev"][: self.page], *["Next >"][: len(self.found) > 2 * self.page + 2]]
        return ["Back to Search", *turns, *shown]

    def step(self, action: str) -> Step:
        verb, _, argument = action.strip().removesuffix("]").partition("[")
        if verb == "search" and argument:
            words = set(argument.split())
            self.product, self.page = "", 0
            self.found = tuple(sorted(PRODUCTS, key=lambda asin: -len(words & set(PRODUCTS[asin].split()))))
        elif verb != "click" or argument not in self.clickable() or argument == "Search":
            return Step(f"Invalid action: You can search[keywords] or click[...] one of: {self.clickable()}")
        elif argument == "Back to Search":
            self.found, self.product, self.page = None, "", 0
        elif argument == "Large":
            self.large = True
        elif argument == "Buy Now":
            self.done = True
        elif argument == "< Prev" and self.product:
            self.product = ""
        elif argument in PRODUCTS:
            self.product, self.large = argument, False
        else:
            self.page += 1 if argument == "Next >" else -1
        bought = self.done and self.product == self.goal.product
        return Step(self.observation, 0.75 * bought + 0.25 * (bought and self.large), self.done)


def create_shop() -> Starlette:
    """The shop with sessions of its own."""
    sessions: dict[int, ShopSession] = {}
    numbers = itertools.count()

    def opened(session: ShopSession) -> int:
        number = next(numbers)
        sessions[number] = session
        return number

    def named(body: dict[str, Any]) -> ShopSession:
        return sessions[body["env_idx" if "env_idx" in body else "session"]]

    async def create(request: Request) -> JSONResponse:
        return JSONResponse(opened(ShopSession(GOALS[0])))

    async def reset(request: Request) -> JSONResponse:
        body = await request.json()
        agentgym = "env_idx" in body
        session = ShopSession(GOALS[body["session_id" if agentgym else "idx"]])
        if agentgym:
            sessions[body["env_idx"]] = session
            return JSONResponse([session.observation, None])
        return JSONResponse({"state": session.observation, "session": opened(session)})

    async def step(request: Request) -> JSONResponse:
        body = await request.json()
        return JSONResponse(asdict(named(body).step(body["action"])))

    async def fork(request: Request) -> JSONResponse:
        return JSONResponse({"session": opened(copy.copy(named(await request.json())))})

    async def close(request: Request) -> JSONResponse:
        body = await request.json()
        return JSONResponse(sessions.pop(body.get("session", body.get("env_idx")), None) is not None)

    posted = (create, reset, step, fork, close)
    return Starlette(routes=[Route(f"/{each.__name__}", each, methods=["POST"]) for each in posted])


@contextmanager
def running_shop() -> Iterator[str]:
    """The URL of a shop on a free loopback port."""
    app = create_shop()
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    with (
        listening("127.0.0.1", 0) as listener,
        serving(app, listener, access=AccessRules(""), routes=paths, lifespan="off") as url,
    ):
        yield url

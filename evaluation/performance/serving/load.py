"""Clients that keep a model server busy while adapters change, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

Request = Callable[[str], dict[str, object]]


@dataclass
class Load:
    """The version that clients request, and the results. Clients end after ``wanted`` requests, or when ``stopped``."""

    model: str
    wanted: int | None = None
    stopped: bool = False
    answers: int = 0
    failures: list[str] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)

    @property
    def done(self) -> bool:
        """Whether no client asks again."""
        return self.stopped or (self.wanted is not None and self.answers + len(self.failures) >= self.wanted)


async def keep_asking(client: httpx.AsyncClient, load: Load, path: str, request: Request, tokens: int) -> None:
    """One client: a request after the other. An answer has to have exactly ``tokens`` tokens."""
    while not load.done:
        asked = load.model
        try:
            response = await client.post(path, json=request(asked))
        except httpx.HTTPError as error:
            load.failures.append(f"{asked}: {type(error).__name__}: {error}")
            continue
        if response.status_code == 200 and response.json()["usage"]["completion_tokens"] == tokens:
            load.answers += 1
            load.versions.add(response.json()["model"])
        else:
            load.failures.append(f"{asked}: {response.status_code} {response.text[:200]}")

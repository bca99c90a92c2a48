"""The stages of an episode (set up, play, grade), and how many episodes may be in each at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum

from openhands_rl_plugin.core.errors import InfrastructureError


class Stage(StrEnum):
    """``READY``: set up, and waiting for a place among those that are played; ``PLAYED``: waiting to be graded."""

    SET_UP = "set_up"
    READY = "ready"
    PLAY = "play"
    PLAYED = "played"
    GRADE = "grade"
    GRADED = "graded"


class Stages:
    """Bounds that many runners share.

    ``playing`` and ``grading``: episodes at a time; ``prepared``: workspaces that may be made or be ready beside those
    that are played in. With 0 a workspace is made where its episode has a place already. ``setup_timeout``: seconds
    that one may take.
    """

    def __init__(
        self,
        *,
        playing: int,
        grading: int,
        prepared: int = 0,
        setup_timeout: float | None = None,
    ) -> None:
        self.setup_timeout = setup_timeout
        self._places = asyncio.Semaphore(playing + prepared)
        self._play = asyncio.Semaphore(playing)
        self._grade = asyncio.Semaphore(grading)
        self._told: Callable[[Stage], None] = lambda stage: None

    def telling(self, told: Callable[[Stage], None]) -> Stages:
        """The same bounds for one episode; ``told`` hears when a stage begins."""
        own = Stages.__new__(Stages)
        own.__dict__ |= self.__dict__ | {"_told": told}
        return own

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Around set up and play: the workspace is there."""
        async with self._places:
            yield

    @asynccontextmanager
    async def set_up(self) -> AsyncIterator[None]:
        """Make the workspace. Raises ``InfrastructureError`` after ``setup_timeout`` seconds."""
        self._told(Stage.SET_UP)
        deadline = asyncio.timeout(self.setup_timeout)
        try:
            async with deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise InfrastructureError(f"the workspace was not there after {self.setup_timeout:g} s") from error
        self._told(Stage.READY)

    @asynccontextmanager
    async def play(self) -> AsyncIterator[None]:
        """Play in it."""
        async with self._play:
            self._told(Stage.PLAY)
            yield
        self._told(Stage.PLAYED)

    @asynccontextmanager
    async def grade(self) -> AsyncIterator[None]:
        """Test what came out."""
        async with self._grade:
            self._told(Stage.GRADE)
            yield
        self._told(Stage.GRADED)

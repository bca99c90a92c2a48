"""TextArena's games in this process: games for one player, or for several with an opponent that you name."""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import Field

from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError, describe
from openhands_rl_plugin.core.types import JsonObject, Message, Task
from openhands_rl_plugin.environments.gyms import (
    GymEpisode,
    GymOptions,
    number,
    plain,
    plain_object,
    seen,
)
from openhands_rl_plugin.environments.http.client import ServerAnswer, episode_index
from openhands_rl_plugin.environments.tools.environment import load_object

Opponent = Callable[[str], str]
_MOST_MOVES_OF_OTHERS = 64
_GLOBAL_GENERATORS = threading.Lock()


class PrivateRandom:
    """Python's and NumPy's global random generators, as one episode sees them: its own, from its own seed.

    Code that draws from ``random`` would otherwise disturb, and be disturbed by, the other episodes of the process.
    """

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None
        self._seed = seed

    def copy(self) -> PrivateRandom:
        """An independent one in the same state."""
        twin = PrivateRandom(self._seed)
        twin._python, twin._numpy = self._python, self._numpy
        return twin

    @contextmanager
    def active(self) -> Iterator[None]:
        """For the block, the global generators are this episode's; one block of the process runs at a time."""
        with _GLOBAL_GENERATORS:
            numpy = getattr(sys.modules.get("numpy"), "random", None)
            others = random.getstate(), numpy.get_state() if numpy else None
            random.setstate(self._python)
            if numpy:
                numpy.seed(self._seed % 2**32) if self._numpy is None else numpy.set_state(self._numpy)
            try:
                yield
            finally:
                self._python = random.getstate()
                random.setstate(others[0])
                if numpy:
                    self._numpy = numpy.get_state()
                    numpy.set_state(others[1])


class TextArenaOptions(GymOptions):
    """``id`` is one of ``textarena.make``; a task's number is the seed.

    ``opponent`` is ``"module:function"`` of your own, from what its player sees to its action, and moves for all other
    ``players`` of a game; the model is player ``seat``.
    """

    players: int = Field(default=1, ge=1, le=15)
    seat: int = Field(default=0, ge=0)
    opponent: str = ""


class TextArenaEnvironment(GymEpisode):
    """``reset(num_players, seed)``, ``step`` and ``get_observation`` of one game.

    The first observation is shown whole, later ones as far as they are new. The reward of the last step is the player's
    own of ``close``; TextArena gives none before. Games draw from Python's global random generator: each
    episode has its own (``PrivateRandom``).
    """

    Options: ClassVar[type[GymOptions]] = TextArenaOptions
    library = "textarena"

    def __init__(self, options: TextArenaOptions | None = None) -> None:
        super().__init__(options)
        self._settings = options or TextArenaOptions()
        if self._settings.players > 1 and not self._settings.opponent:
            raise ConfigError(
                'textarena: a game of several players needs an opponent: set opponent = "module:function"'
            )
        self._opponent: Opponent | None = (
            load_object("opponent", self._settings.opponent) if self._settings.opponent else None
        )
        self._random = PrivateRandom(0)
        self._game: Any = None
        self._shown = ""

    def open(self, name: str, task: Task) -> ServerAnswer:
        """``make`` and ``reset``; moves of players before the model are made too."""
        import textarena

        seed, options = episode_index(task), self._settings
        self._random = PrivateRandom(seed)
        with self._random.active():
            try:
                self._game = textarena.make(name, **self.options.arguments)
                self._game.reset(num_players=options.players, seed=seed)
            except (AssertionError, ValueError, ImportError, TypeError, KeyError) as error:
                if self._game is None:
                    raise BadEnvironmentError(f"{self.name} cannot be made: {describe(error)}") from error
                raise BadEnvironmentError(
                    f"{self.name} is not a game of {options.players} players ({describe(error)}): set players and "
                    'opponent = "module:function" in [rl.environment], or choose another game'
                ) from error
            except LookupError as error:
                raise BadEnvironmentError(
                    f"{self.name} needs data of NLTK that is not here ({describe(error)}): fetch it with "
                    "`python -m nltk.downloader words averaged_perceptron_tagger_eng`"
                ) from error
            done = self._others_move()
        messages = self.opening(task, self._new_text())
        return self._ended(messages) if done else seen(messages)

    def execute(self, action: str) -> ServerAnswer:
        """``step``, then the other players' moves."""
        with self._random.active():
            done, info = self._game.step(action)
            done = bool(done) or self._others_move()
            if done:
                return self._ended((), info)
            return seen((Message(role="user", content=self._new_text() or "(no observation)"),), info=plain(info))

    def shut(self) -> None:
        """Nothing is held."""
        self._game = None

    def actions(self, task: Task) -> str:
        """None: the game's first text has the rules."""
        return ""

    @property
    def copies_safely(self) -> bool:
        """Games keep their state in attributes; an opponent of your own may not."""
        return self._opponent is None

    def copied(self) -> dict[str, Any]:
        """A deep copy, and the random generators in the same state."""
        return {"_game": copy.deepcopy(self._game), "_random": self._random.copy(), "_shown": self._shown}

    def final(self) -> JsonObject:
        """The game and the arguments."""
        return {"environment": {"id": self.name, "arguments": plain_object(self.options.arguments)}}

    def _others_move(self) -> bool:
        """Whether the game ended while the other players moved. Raises ``BadEnvironmentError``."""
        state = self._game.state
        for _ in range(_MOST_MOVES_OF_OTHERS):
            if state.done or state.current_player_id == self._settings.seat:
                return bool(state.done)
            assert self._opponent is not None
            _, shown = self._game.get_observation()
            action = self._opponent(_text(shown))
            if not isinstance(action, str):
                raise BadEnvironmentError(f"the opponent {self._settings.opponent} returned no text")
            self._game.step(action)
        raise BadEnvironmentError(f"{self.name}: the others moved {_MOST_MOVES_OF_OTHERS} times without a turn of ours")

    def _new_text(self) -> str:
        _, shown = self._game.get_observation()
        text = _text(shown)
        new = text.removeprefix(self._shown) if self._shown else text
        self._shown = text
        return new.strip("\n")

    def _ended(self, messages: tuple[Message, ...], info: object = None) -> ServerAnswer:
        found: Any = self._game.close()
        rewards, details = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        seat = self._settings.seat
        reward = number(rewards.get(seat) if isinstance(rewards, dict) else None, self.name)
        own = details.get(seat, {}) if isinstance(details, dict) else {}
        reason = str(own.get("reason") or "The game is over.") if isinstance(own, dict) else "The game is over."
        shown = messages or (Message(role="user", content=reason),)
        return seen(shown, reward, terminated=True, info={"game": plain(own), "step": plain(info)})


def _text(seen: object) -> str:
    """An observation as text: that of the default wrappers is one, a raw one holds ``(sender, message, type)``."""
    if isinstance(seen, list):
        return "\n".join(str(each[1]) if isinstance(each, tuple) and len(each) > 1 else str(each) for each in seen)
    return str(seen)

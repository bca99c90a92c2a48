"""TextArena's own games, played in this process."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from openhands_rl_plugin.contrib.environments.textarena import TextArenaEnvironment, TextArenaOptions
from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.core.types import Message, Observation, Task
from openhands_rl_plugin.testing import check_environment

GUESS = "textarena/GuessTheNumber-v0"


def task(environment: str = GUESS, idx: int = 0) -> Task:
    return Task(id="t", environment=environment, data={"idx": idx})


def arena(**options: Any) -> TextArenaEnvironment:
    return TextArenaEnvironment(TextArenaOptions.model_validate(options))


def said(action: str) -> Message:
    return Message(role="assistant", content=f"Thought: hm\nAction: {action}")


def text(found: Observation) -> str:
    return found.messages[-1].content or ""


async def guess(idx: int) -> tuple[list[str], list[int]]:
    """Play by halves, as the game's hints allow; what was seen, and the guesses."""
    player, low, high = arena(), 1, 20
    seen, guesses = [text(await player.reset(task(idx=idx)))], []
    while True:
        guesses.append((low + high) // 2)
        found = await player.step(said(f"[{guesses[-1]}]"))
        seen.append(text(found))
        if found.terminated:
            await player.close()
            assert found.reward == 1.0
            return seen, guesses
        assert found.reward == 0.0
        low, high = (guesses[-1] + 1, high) if "higher" in text(found) else (low, guesses[-1] - 1)


async def test_a_game_is_won_with_the_number_that_textarena_itself_has_for_the_seed():
    for idx in range(4):
        seen, guesses = await guess(idx)
        assert "Guess The Number" in seen[0] and "Guess The Number" not in "".join(seen[1:]), (
            "only what is new is shown"
        )
        import textarena  # takes seconds

        game = textarena.make("GuessTheNumber-v0")
        game.reset(num_players=1, seed=idx)
        assert game.state.game_state["game_number"] == guesses[-1]


async def test_games_at_once_do_not_disturb_each_other_nor_the_process():
    random.seed(5)
    expected = [random.random() for _ in range(3)]
    random.seed(5)
    alone = [await guess(idx) for idx in range(6)]
    together = await asyncio.gather(*(guess(idx) for idx in range(6)))
    assert list(together) == alone
    assert [random.random() for _ in range(3)] == expected, "the process's own generator was moved"


@pytest.mark.parametrize("fork", ["copy", "replay"])
async def test_it_conforms_and_forks(fork: str):
    actions = ["Action: [3]", "Action: 4", "Action: [5]"]
    await check_environment(lambda: arena(fork=fork), task(idx=1), actions=actions)


async def test_a_game_of_two_is_refused_by_name_or_played_against_an_opponent(monkeypatch: pytest.MonkeyPatch):
    player = arena()
    with pytest.raises(BadEnvironmentError, match=r"textarena/TicTacToe-v0 is not a game of 1 players.*opponent ="):
        await player.reset(task("textarena/TicTacToe-v0"))
    with pytest.raises(ConfigError, match="needs an opponent"):
        arena(players=2)
    import opponents_of_tests

    options = {"players": 2, "opponent": "opponents_of_tests:last_free_cell"}
    player = arena(**options)
    await player.reset(task("textarena/TicTacToe-v0"))
    rewards = [(await player.step(said(f"[{cell}]"))) for cell in (0, 1, 2)]
    assert [(each.reward, each.terminated) for each in rewards] == [(0.0, False), (0.0, False), (1.0, True)]
    assert opponents_of_tests.asked == 2
    second = arena(**options, seat=1)
    assert "[8]" in text(await second.reset(task("textarena/TicTacToe-v0"))), "the opponent moved first"
    await second.close()

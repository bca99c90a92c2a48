"""What popular environments of Gymnasium want, call their actions, and say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openhands_rl_plugin.core.judgements import SuccessRule
from openhands_rl_plugin.environments.gyms.episode import plain


@dataclass(frozen=True, slots=True)
class GymnasiumPreset:
    """``goal`` is the task for the model, ``actions`` are the names of a ``Discrete`` space in its order, and ``words``
    says what an observation and its info mean. ``success`` is when an episode is one."""

    goal: str = ""
    actions: tuple[str, ...] = ()
    words: Callable[[Any, dict[str, Any]], str] | None = None
    success: SuccessRule = field(default_factory=SuccessRule)


def preset_of(name: str) -> GymnasiumPreset:
    """The preset of an environment's id, whatever its version and module; an empty one for others."""
    bare = name.rpartition(":")[2].rpartition("/")[2]
    found = next((preset for prefix, preset in PRESETS.items() if bare.startswith(prefix)), None)
    return found or GymnasiumPreset()


def _blackjack(observation: Any, info: dict[str, Any]) -> str:
    hand, dealer, ace = (int(each) for each in observation)
    return f"Your hand counts {hand}{' with an ace counted as 11' if ace else ''}. The dealer shows {dealer}."


def _cell(observation: Any, info: dict[str, Any]) -> str:
    return f"You are in cell {int(observation)} (cells are numbered row by row from the upper left, from 0)."


_OBJECTS = ("", "", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
_COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
_STATES = ("open", "closed", "locked")
_FACING = ("right", "down", "left", "up")


def _minigrid(observation: Any, info: dict[str, Any]) -> str:
    """The mission, and what is in view: the picture holds an object, a colour and a state for each cell, the agent
    stands at the middle of its lower edge and looks up."""
    picture = observation["image"]
    width, height = len(picture), len(picture[0])
    seen = []
    for x in range(width):
        for y in range(height):
            kind, colour, state = (int(part) for part in picture[x][y])
            ahead, aside = height - 1 - y, x - width // 2
            if kind >= len(_OBJECTS) or _OBJECTS[kind] in ("", "floor", "agent") or not (ahead or aside):
                continue
            if kind == 2 and not (aside == 0 and ahead == 1):
                continue  # of the walls, only the one in the way matters
            what = f"{_COLOURS[colour]} {_OBJECTS[kind]}" if kind in (4, 5, 6, 7) else _OBJECTS[kind]
            what = f"{_STATES[state]} {what}" if kind == 4 else what
            side = f"{abs(aside)} {'right' if aside > 0 else 'left'}" if aside else ""
            seen.append(
                (ahead + abs(aside), f"{what}: {', '.join(p for p in (f'{ahead} ahead' * bool(ahead), side) if p)}")
            )
    facing = _FACING[int(observation["direction"])]
    view = "\n".join(line for _, line in sorted(seen)) or "nothing"
    return f"Mission: {plain(observation['mission'])}\nYou face {facing}. You see, in cells from you:\n{view}"


# Each move costs; only the goal ends these.
_AT_THE_GOAL = SuccessRule(at=None, ended=True)
# 1 - 0.9 x steps / limit at the goal, else 0 or less.
_MINIGRID_GOAL = SuccessRule(at=0.1)

PRESETS: dict[str, GymnasiumPreset] = {
    "FrozenLake": GymnasiumPreset(
        "Walk from the start S to the goal G over frozen cells F. A hole H ends the episode. The cell in brackets is "
        "yours. Where the ice is slippery you may slide to a side.",
        ("left", "down", "right", "up"),
        _cell,
    ),
    "CliffWalking": GymnasiumPreset(
        "Walk to the cell T in as few moves as you can: each costs 1. A step onto the cliff C costs 100 and puts you "
        "back to the start. x is you.",
        ("up", "right", "down", "left"),
        _cell,
        _AT_THE_GOAL,
    ),
    "Taxi": GymnasiumPreset(
        "Drive to the passenger, pick them up, drive to their destination and drop them off. R, G, Y and B are the "
        "stops, | is a wall; the taxi, the passenger and the destination are in brackets.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        lambda observation, info: f"State {int(observation)}.",
        _AT_THE_GOAL,
    ),
    "Blackjack": GymnasiumPreset(
        "Beat the dealer: come closer to 21 without going over it.",
        ("stick", "hit"),
        _blackjack,
    ),
    "MiniGrid": GymnasiumPreset("Do what the mission says.", words=_minigrid, success=_MINIGRID_GOAL),
    "BabyAI": GymnasiumPreset("Do what the mission says.", words=_minigrid, success=_MINIGRID_GOAL),
}

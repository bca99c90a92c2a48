"""A server made with the openenv package, run by a Python that has it: ``python serve_openenv.py PORT``."""

import sys
from enum import Enum

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Move(str, Enum):  # noqa: UP042 - as published environments write it
    LEFT = "LEFT"
    RIGHT = "RIGHT"


class Walk(Action):
    move: Move
    by: int = 1


class Where(Observation):
    at: int
    message: str


class Corridor(Environment):
    """From 0 to 5; starts at ``seed``. Walking by 0 breaks the environment."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._at = 0
        self._state = State(episode_id="corridor", step_count=0)

    def reset(self, seed=None, episode_id=None):
        self._at = seed or 0
        self._state = State(episode_id="corridor", step_count=0)
        return Where(at=self._at, message="You are in a corridor.")

    def step(self, action):
        if action.by == 0:
            raise RuntimeError("division by zero")
        self._state.step_count += 1
        self._at += action.by if action.move is Move.RIGHT else -action.by
        arrived = self._at >= 5
        return Where(at=self._at, message="on", done=arrived, reward=float(arrived))

    @property
    def state(self):
        return self._state


app = create_app(Corridor, Walk, Where, env_name="corridor", max_concurrent_envs=int(sys.argv[2]))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", ws_ping_interval=1, ws_ping_timeout=1)

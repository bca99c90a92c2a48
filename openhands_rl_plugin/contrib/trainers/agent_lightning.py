"""OpenHands as the agent of agent-lightning 1.0: what ``agentlightning.local.agent_class`` names.

agent-lightning starts a process a rollout, answers its calls through a proxy that records ids and logprobs, and merges
what was recorded into sequences itself. So an episode here asks for no token ids, and only its reward is sent.
"""

from __future__ import annotations

import asyncio
import math
import os
import shlex

import httpx

from openhands_rl_plugin.apps.rollout.episode_program import checked_interpreter, rollout_command, run_program
from openhands_rl_plugin.core.errors import ConfigError

TASK = "OPENHANDS_RL_TASK"
"""The environment variable with the task, by ``env_map``: an id, or a row as JSON."""
OPTIONS = "OPENHANDS_RL_OPTIONS"
"""The environment variable with further options of ``cli.rollout``, such as ``--max-turns 20``."""

_MODEL = "policy"  # the proxy puts its own name of the model, and its temperature, into every request
_TRIES, _SECONDS = 3, 60.0


class OpenHandsAgent:
    """Plays the task of one rollout by ``cli.rollout``, in the Python that ``OPENHANDS_RL_PYTHON`` names.

    A failed episode ends the process with its reason, in one line, and without a reward.
    """

    def run(self) -> None:
        """Raises ``SystemExit`` where there is no episode that may be trained on."""
        endpoint, task = _given("AGL_OPENAI_BASE_URL"), _given(TASK)
        row = task.lstrip().startswith("{")
        try:
            python = checked_interpreter()
        except ConfigError as error:
            raise SystemExit(f"configuration: {error}") from error
        words = rollout_command(python, ("--task", "-" if row else task), endpoint, _MODEL, {})
        words += shlex.split(os.environ.get(OPTIONS, ""))
        # No key is a key like another to an endpoint that wants none. The runner has a limit of its own.
        key = os.environ.get("AGL_KEY") or "none"
        rollout = asyncio.run(run_program(words, task if row else "", key=key, seconds=math.inf))
        if isinstance(rollout, str) or rollout.reward is None:
            raise SystemExit(rollout if isinstance(rollout, str) else "grader: the episode has no reward")
        if rollout.off_policy and "/mode/train/" in endpoint:
            raise SystemExit(f"configuration: this episode is not to be trained on: {rollout.off_policy}")
        _send(_given("AGL_EVENT_URL"), rollout.reward)


def _send(url: str, reward: float) -> None:
    key = os.environ.get("AGL_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(transport=httpx.HTTPTransport(retries=_TRIES), timeout=_SECONDS, headers=headers) as client:
        try:
            client.post(url, json={"event_type": "reward", "data": {"value": reward}}).raise_for_status()
        except httpx.HTTPError as error:
            raise SystemExit(f"infrastructure: the reward could not be sent to {url}: {error}") from error


def _given(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        of = f"agentlightning.local.env_map, such as {name}: input.task" if name == TASK else "agent-lightning's runner"
        raise SystemExit(f"configuration: the environment variable {name} is not set; it is of {of}")
    return value

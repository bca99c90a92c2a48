"""OpenHands as the agent of agent-lightning 1.0: what ``agentlightning.local.agent_class`` names.

agent-lightning starts a process a rollout, answers its calls through a proxy that records ids and logprobs, and merges
what was recorded into sequences itself. So an episode here asks for no token ids, and only its reward is sent.
"""

from __future__ import annotations

import asyncio
import os
import shlex

import httpx

from openhands_rl_plugin.apps.rollout.rollout import roll_out

TASK = "OPENHANDS_RL_TASK"
"""The environment variable with the task, by ``env_map``: an id, or a row as JSON."""
OPTIONS = "OPENHANDS_RL_OPTIONS"
"""The environment variable with further options of the rollout, such as ``--max-turns 20``."""

_TRIES, _SECONDS = 3, 60.0


class OpenHandsAgent:
    """Rolls out the task of one rollout, in the Python that ``OPENHANDS_RL_PYTHON`` names.

    A failed episode ends the process with its reason, in one line, and without a reward.
    """

    def run(self) -> None:
        """Raises ``SystemExit`` where there is no episode that may be trained on."""
        try:
            endpoint, task, url = (os.environ[name] for name in ("AGL_OPENAI_BASE_URL", TASK, "AGL_EVENT_URL"))
        except KeyError as error:
            raise SystemExit(
                f"configuration: the environment variable {error} is not set, by env_map or the runner"
            ) from error
        words = shlex.split(os.environ.get(OPTIONS, ""))
        own = {
            name.removeprefix("--").replace("-", "_"): text for name, text in zip(words[::2], words[1::2], strict=True)
        }
        # The proxy puts its own name of the model, and its temperature, into every request.
        asked = {"base_url": endpoint, "model": "policy", "token_ids": False, **own}
        key = os.environ.get("AGL_KEY", "")
        rollout = asyncio.run(roll_out(task, asked, key=key or "none"))
        if isinstance(rollout, str):
            raise SystemExit(rollout)
        if rollout.off_policy and "/mode/train/" in endpoint:
            raise SystemExit(f"configuration: this episode is not to be trained on: {rollout.off_policy}")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"event_type": "reward", "data": {"value": rollout.reward}}
        with httpx.Client(transport=httpx.HTTPTransport(retries=_TRIES), timeout=_SECONDS, headers=headers) as client:
            client.post(url, json=body).raise_for_status()

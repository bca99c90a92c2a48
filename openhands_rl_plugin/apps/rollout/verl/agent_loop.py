"""Episodes of OpenHands for verl's V1 trainer. Imported by the Python that has verl."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

from openhands_rl_plugin.apps.rollout.program import SECRET, VARIABLE, read_episode, rollout_command
from openhands_rl_plugin.apps.rollout.verl.endpoint import MODEL, PolicyEndpoint
from openhands_rl_plugin.config.rollout import options_from_trainer
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout
from openhands_rl_plugin.trajectories.exchange.trainers.verl import agent_loop_rows

FITS = "0.9"
if not f"{metadata.version('verl')}.".startswith(f"{FITS}."):
    raise ConfigError(f"this agent loop needs verl {FITS}, and this Python has {metadata.version('verl')}")

from verl.experimental.agent_loop.agent_loop import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    AgentLoopBase,
    AgentLoopOutput,
)

TASK = "task"
"""The column of the data set with the task: an id of a suite, or a whole row as JSON."""

_ENDPOINT = PolicyEndpoint()
_GRACE = 60.0
"""Seconds that the program has beyond the episode's own limit, to say why it ended."""


class OpenHandsAgentLoop(AgentLoopBase):
    """Plays the task of a row by ``openhands-rl rollout``, in the Python that ``OPENHANDS_RL_PYTHON`` names.

    ``options``: those of the command, with underscores. ``tries``: how often an episode is played that failed of the
    infrastructure. Raises ``ConfigError`` for what would be trained wrongly.
    """

    def __init__(self, *args: Any, options: Mapping[str, Any] | None = None, tries: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        checked = options_from_trainer(options or {}, "options", "verl", {"temperature"})
        self._options, self._tries = {name: getattr(checked, name) for name in options or {}}, tries
        self._seconds = checked.timeout + _GRACE
        if tries < 1:
            raise ConfigError("tries has to be 1 or more")
        if not self.config.trainer.get("use_v1", False):
            raise ConfigError("set trainer.use_v1=True: the other trainer has no place for an episode that failed")
        for name, neutral in (("top_p", (1,)), ("top_k", (-1, 0))):
            if (said := self.rollout_config.get(name, neutral[0])) not in neutral:
                raise ConfigError(
                    f"actor_rollout_ref.rollout.{name}={said}: logprobs are then not the policy's; leave it out"
                )

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        """One ``AgentLoopOutput`` a segment. Raises ``InfrastructureError`` for a failed episode: verl then drops the
        prompt, and nothing is trained on a reward that nobody gave."""
        task = row.get(TASK) or (row.get("extra_info") or {}).get(TASK)
        if not isinstance(task, str) or not task:
            raise ConfigError(f"the data set needs a column {TASK!r}, with an id of a suite or a row as JSON")
        sizes = self.rollout_config
        longest = sizes.get("max_model_len") or sizes.prompt_length + sizes.response_length
        temperature = float(sampling_params.get("temperature", 1.0))
        name = uuid.uuid4().hex  # the same server for all turns, which has their prefix

        async def sample(ids: tuple[int, ...], most: int) -> Any:
            asked = {**sampling_params, "logprobs": True, "max_tokens": most}
            return await self.server_manager.generate(name, prompt_ids=list(ids), sampling_params=asked)

        with _ENDPOINT.open(sample, self.tokenizer, longest) as (url, key):
            played = await self._played(task, url, key, temperature)
        rows = agent_loop_rows(
            played,
            longest_prompt=sizes.prompt_length,
            longest_response=sizes.response_length,
            temperature=temperature,
        )
        # Copied from the last to the others, and expected there.
        told = {"reward_extra_info": {}}
        return [AgentLoopOutput(**{**each, "extra_fields": {**each["extra_fields"], **told}}) for each in rows]

    async def _played(self, task: str, url: str, key: str, temperature: float) -> PlayedRollout:
        why = ""
        for _ in range(self._tries):
            played = await self._once(task, url, key, temperature)
            if not isinstance(played, str):
                if played.reward is None or not played.segments:
                    raise InfrastructureError(f"{task[:80]}: the episode has no reward or no token ids")
                if played.off_policy:
                    raise ConfigError(
                        f"answers that are no samples of the policy cannot be trained: {played.off_policy}"
                    )
                return played
            why = played
            if not why.startswith("infrastructure: "):
                break
        raise InfrastructureError(f"{task[:80]}: {why}")

    async def _once(self, task: str, url: str, key: str, temperature: float) -> PlayedRollout | str:
        row = task.lstrip().startswith("{")
        python = os.environ.get(VARIABLE) or sys.executable
        options = {**self._options, "temperature": temperature}
        words = rollout_command(python, ("--task", "-" if row else task), url, MODEL, options, token_ids=True)
        with tempfile.TemporaryDirectory() as folder:
            process = await asyncio.create_subprocess_exec(
                *words,
                env={**os.environ, SECRET: key},
                cwd=folder,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            try:
                said = await asyncio.wait_for(process.communicate(task.encode() if row else b""), self._seconds)
            except TimeoutError:
                return f"infrastructure: openhands-rl rollout did not end within {self._seconds:g} s"
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            return read_episode(process.returncode or 0, *(each.decode(errors="replace") for each in said))

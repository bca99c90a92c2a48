"""OpenHands as an agent of Harbor: what ``agent.import_path`` names. Harbor's Python imports it without OpenHands.

OpenHands V1 runs beside Harbor, not in the task's image, which needs bash and coreutils; it asks the model from there,
too, so that a trainer's endpoint need not be reached from the sandbox. Its tools work in the environment of the trial.

The episode runs in another Python (``harbor_episode``), whose commands are run by Harbor's ``exec``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import uuid
from pathlib import Path
from typing import Any

from harbor.agents.agent_auth_resolution import (  # pyright: ignore[reportMissingImports]  (pins another openai)
    ModelConnectionSpec,
)
from harbor.agents.base import BaseAgent  # pyright: ignore[reportMissingImports]
from harbor.agents.capabilities import AgentCapabilities  # pyright: ignore[reportMissingImports]
from harbor.environments.base import BaseEnvironment  # pyright: ignore[reportMissingImports]
from harbor.models.agent.context import AgentContext  # pyright: ignore[reportMissingImports]

import openhands_rl_plugin
from openhands_rl_plugin.apps.rollout.episode_program import (
    GRACE,
    SECRET,
    checked_interpreter,
    facts_of,
    run_program,
)
from openhands_rl_plugin.apps.rollout.rollout import PlayedRollout
from openhands_rl_plugin.config.rollout import options_from_trainer
from openhands_rl_plugin.contrib.trainers.harbor_episode import served
from openhands_rl_plugin.contrib.trainers.rows import rollout_details
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.environments import container
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError

FACTS = "openhands_rl"
"""The key of a trial's metadata under which the result of the episode stands."""

_PROGRAM = "openhands_rl_plugin.contrib.trainers.harbor_episode"
# Of suites, of their grading and of our own sandbox: Harbor's task, verifier and environment are in their place.
_SET_BY_HARBOR = frozenset({"suite", "backend", "mirror", "cache", "network", "test_timeout"})
_OF_HARBOR = inspect.signature(BaseAgent.__init__).parameters.keys() | {"override_setup_timeout_sec"}
_SECONDS = 60


class EpisodeFailedError(RuntimeError):
    """There is no episode that may be trained on; the trial has no reward. Not worth a retry."""


class EpisodeInfrastructureError(RuntimeError):
    """A server or an environment was away: worth a retry."""


class OpenHandsHarborAgent(BaseAgent):
    """Attempts a task with OpenHands V1, in the Python that ``OPENHANDS_RL_PYTHON`` names.

    ``model_name`` is ``PROVIDER/NAME``, of an endpoint with OpenAI's protocol at Harbor's ``base_url`` or ``api_base``.
    ``collect_rollout_details``: for training. Ids and logprobs are requested, and an episode fails without them, or
    where its completions are not samples of the policy. ``store``: a folder that keeps the episodes, in which
    ``session_id`` names the run. The other arguments are options of ``cli.rollout``, with underscores.
    """

    capabilities = AgentCapabilities(atif=True, base_url=True)
    MODEL_CONNECTION = ModelConnectionSpec(base_url_destination_names={"default": None})

    def __init__(
        self,
        logs_dir: Path,
        model_name: str | None = None,
        *args: Any,
        api_base: str = "",
        collect_rollout_details: bool = False,
        session_id: str = "",
        store: str = "",
        **given: Any,
    ) -> None:
        """Raises ``ValueError`` for options with which no episode can be rolled out."""
        ours = {name: given.pop(name) for name in [*given] if name not in _OF_HARBOR}
        super().__init__(logs_dir, model_name, *args, **given)
        try:
            options = options_from_trainer(ours, "agent.kwargs", "Harbor", _SET_BY_HARBOR)
        except ConfigError as error:
            raise _Refused(str(error)) from error
        connection = self.model_connection
        endpoint = api_base or connection.execution_base_url
        if not (model_name and endpoint):
            raise _Refused("which endpoint? give Harbor agent.model_name (--model) and agent.base_url (--base-url)")
        self._temperature = 1.0 if options.temperature is None else options.temperature
        self._seconds = options.timeout + GRACE
        self._details = collect_rollout_details
        self._key = connection.api_key or "none"
        self._store = str(Path(store).expanduser().absolute()) if store else None
        name = model_name if self.skip_model_parsing else model_name.partition("/")[2] or model_name
        self._options = {
            **options.model_dump(mode="json", include={*ours}),
            **{"base_url": endpoint, "model": name, "api_key_env": SECRET},
            **{"token_ids": collect_rollout_details, "run_id": session_id},
        }

    @staticmethod
    def name() -> str:
        """As Harbor's lists show it."""
        return "openhands-rl"

    def version(self) -> str | None:
        """That of this package; OpenHands' is in the trajectory."""
        return openhands_rl_plugin.__version__

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed in the environment. Raises ``ConfigError`` for a Python without OpenHands."""
        self._python = await asyncio.to_thread(checked_interpreter)

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Raises ``EpisodeInfrastructureError`` or ``EpisodeFailedError``, in one line."""
        folder = f"/tmp/.{uuid.uuid4().hex}"
        try:
            async with served(environment) as socket:
                place = {"socket": str(socket), "folder": folder}
                rollout = await self._roll_out(environment.environment_name, instruction, place)
        except BaseException:
            # The command that runs would write on while the verifier looks.
            ending = environment.exec(container.end(folder), timeout_sec=_SECONDS)
            await asyncio.gather(ending, return_exceptions=True)
            raise
        self._fill(context, rollout)

    async def _roll_out(self, name: str, instruction: str, place: dict[str, str]) -> PlayedRollout:
        asked = {
            **{"name": name, "instruction": instruction, "place": place, "options": self._options},
            **{"store": self._store, "documents": str(self.logs_dir.absolute())},
        }
        command = [self._python, "-P", "-m", _PROGRAM]
        rollout = await run_program(command, json.dumps(asked), key=self._key, seconds=self._seconds)
        if isinstance(rollout, str):
            kind = EpisodeInfrastructureError if rollout.startswith("infrastructure: ") else EpisodeFailedError
            raise kind(rollout)
        if self._details and rollout.off_policy:
            raise EpisodeFailedError(f"configuration: this episode is not to be trained on: {rollout.off_policy}")
        return rollout

    def _fill(self, context: AgentContext, rollout: PlayedRollout) -> None:
        usage = rollout.usage
        context.n_input_tokens, context.n_cache_tokens = usage.prompt_tokens, usage.cached_tokens
        context.n_output_tokens = usage.completion_tokens
        # The first three are Terminus' names, which trainers read.
        context.metadata = {
            "n_episodes": rollout.turns,
            "summarization_count": max(0, len(rollout.segments) - 1),
            "all_messages": [each.model_dump(mode="json", exclude_none=True) for each in rollout.messages],
            FACTS: facts_of(rollout),
        }
        if self._details:
            try:
                context.rollout_details = [*rollout_details(rollout.segments, temperature=self._temperature)]
            except ExchangeError as error:
                raise EpisodeFailedError(f"model: {error}") from error


class _Refused(ConfigError, ValueError):
    """A ``ValueError`` too: Harbor's commands show those in one line."""

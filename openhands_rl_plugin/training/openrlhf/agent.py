"""The agent that OpenRLHF 0.11 loads: ``--train.agent_func_path .../openhands_rl_plugin/training/openrlhf/agent.py``.

    export OPENHANDS_RL_CONFIG=/path/to/config.toml

OpenRLHF looks for ``AgentExecutor``. It runs an episode like every other runner of this package, and differs from the
stock multi-turn executor: every answer counts against ``max_turns``, an episode ended by a limit is flagged as
truncated, the sampling parameters are not changed, and a first prompt that is too long is an error instead of being
truncated.
"""

from __future__ import annotations

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.training.openrlhf.rollouts import Rollouts

try:
    from openrlhf.utils.agent import AgentExecutorBase  # it brings its own vLLM and torch
except ModuleNotFoundError as error:
    raise ConfigError(
        f"{error.name} is not installed; OpenRLHF pins its own torch and vLLM, so it needs a separate environment: "
        "pip install openrlhf[vllm]==0.11.2 .[train] in a clone of the package"
    ) from error


class AgentExecutor(Rollouts, AgentExecutorBase):
    """Runs whole episodes on token ids. Errors in the configuration are raised before the first rollout."""

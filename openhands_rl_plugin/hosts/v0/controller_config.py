"""OpenHands' configuration for sessions that a driver plays: nothing from files or environment variables."""

from __future__ import annotations

from openhands.core.config import AgentConfig, LLMConfig, OpenHandsConfig, SandboxConfig
from openhands.core.config.condenser_config import NoOpCondenserConfig
from pydantic import SecretStr

from openhands_rl_plugin.settings import RLSettings
from openhands_rl_plugin.types import Limits

AGENT = "RLAgent"
# A turn takes one iteration, several with several tool calls, and an answer that does not parse takes one too.
_ITERATIONS_A_TURN = 4


def controller_config(
    settings: RLSettings,
    *,
    runtime: str,
    model: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    limits: Limits | None = None,
    workspace_base: str | None = None,
    native_tool_calling: bool = True,
    command_timeout: int = 60,
) -> OpenHandsConfig:
    """A configuration for one policy server and one runtime (a class path).

    ``model``, ``base_url`` and ``api_key`` default to those of ``[rl.serving]``; ``command_timeout`` is in seconds.
    The iteration limit is a net below the episode's own limit of turns. Prompts keep being prefixes of later ones (no
    condenser), answers are asked for with token ids and logprobs, and a failed request is repeated once.
    """
    serving = settings.serving
    turns = (limits or settings.limits()).max_turns
    key = api_key or serving.api_key() or "none"
    llm = LLMConfig(
        model=f"openai/{model or serving.model}",
        base_url=base_url or serving.base_url,
        api_key=SecretStr(key),
        native_tool_calling=native_tool_calling,
        temperature=settings.sampling.temperature,
        top_p=settings.sampling.top_p,
        max_output_tokens=settings.max_response_length,
        timeout=max(1, round(serving.request_timeout)),
        num_retries=2,
        retry_min_wait=1,
        retry_max_wait=2,
        caching_prompt=False,
        disable_vision=True,
        modify_params=False,
        completion_kwargs={"logprobs": True, "extra_body": {"return_token_ids": True}},
    )
    agent = AgentConfig(
        enable_browsing=False,
        enable_jupyter=False,
        enable_mcp=False,
        enable_plan_mode=False,
        enable_stuck_detection=False,
        enable_history_truncation=False,
        condenser=NoOpCondenserConfig(),
    )
    return OpenHandsConfig(
        llms={"llm": llm},
        agents={"agent": agent, AGENT: agent.model_copy(deep=True)},
        default_agent=AGENT,
        runtime=runtime,
        workspace_base=workspace_base,
        file_store="memory",
        enable_browser=False,
        max_iterations=turns * _ITERATIONS_A_TURN + 2,
        sandbox=SandboxConfig(timeout=command_timeout),
    )

"""OpenHands' configuration for sessions that a driver plays: nothing from files or environment variables."""

from __future__ import annotations

from openhands.core.config import AgentConfig, LLMConfig, OpenHandsConfig, SandboxConfig
from openhands.core.config.condenser_config import NoOpCondenserConfig
from pydantic import SecretStr

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.types import Limits, SamplingParams

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
    agent: str = AGENT,
    sampling: SamplingParams | None = None,
    token_ids: bool = True,
    stuck_detection: bool = False,
    num_retries: int = 2,
) -> OpenHandsConfig:
    """A configuration for one policy server and one runtime (a class path).

    ``model``, ``base_url`` and ``api_key`` default to those of ``[rl.serving]``; ``command_timeout`` is in seconds.
    The iteration limit is a net below the episode's own limit of turns; a stock ``agent`` has no other. Prompts keep
    being prefixes of later ones (no condenser), and answers are asked for with token ids and logprobs if ``token_ids``.
    ``sampling`` is for stock agents: ``RLAgent`` samples every call as its episode says.
    """
    serving = settings.serving
    limits = limits or settings.limits()
    turns = limits.max_turns
    sampling = sampling or settings.sampling_params()
    key = api_key or serving.api_key() or "none"
    llm = LLMConfig(
        model=f"openai/{model or serving.model}",
        base_url=base_url or serving.base_url,
        api_key=SecretStr(key),
        native_tool_calling=native_tool_calling,
        temperature=settings.sampling.temperature if sampling.temperature is None else sampling.temperature,
        top_p=sampling.top_p or settings.sampling.top_p,
        seed=sampling.seed,
        max_output_tokens=limits.max_response_length,
        timeout=max(1, round(serving.request_timeout)),
        num_retries=num_retries,
        retry_min_wait=1,
        retry_max_wait=2,
        caching_prompt=False,
        disable_vision=True,
        modify_params=False,
        completion_kwargs={"logprobs": True, "extra_body": {"return_token_ids": True}} if token_ids else None,
    )
    config = AgentConfig(
        enable_browsing=False,
        enable_jupyter=False,
        enable_mcp=False,
        enable_plan_mode=False,
        enable_stuck_detection=stuck_detection,
        enable_history_truncation=False,
        condenser=NoOpCondenserConfig(),
    )
    return OpenHandsConfig(
        llms={"llm": llm},
        agents={"agent": config, agent: config.model_copy(deep=True)},
        default_agent=agent,
        runtime=runtime,
        workspace_base=workspace_base,
        file_store="memory",
        enable_browser=False,
        max_iterations=turns * _ITERATIONS_A_TURN + 2 if agent == AGENT else turns,
        sandbox=SandboxConfig(timeout=command_timeout),
    )

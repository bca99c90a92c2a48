"""OpenHands' configuration for the sessions of a runner, without configuration files or environment variables."""

from __future__ import annotations

from typing import Any

from openhands.core.config import AgentConfig, LLMConfig, OpenHandsConfig, SandboxConfig
from openhands.core.config.condenser_config import CondenserConfig, create_condenser_config
from pydantic import SecretStr

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError, describe
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, altering_parameters
from openhands_rl_plugin.core.types import Limits, SamplingParams
from openhands_rl_plugin.hosts.shared.episode import overlay
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions

_RUNTIMES = {None: "WorkspaceRuntime", "bubblewrap": "BubblewrapRuntime", "none": "SubprocessRuntime"}
# Condensers that ask a model.
_ASKING = frozenset({"llm", "llm_attention", "structured"})
# A turn takes one iteration, or several with several tool calls; an answer that does not parse takes one, too.
_ITERATIONS_A_TURN = 4


def controller_config(
    settings: RLSettings,
    options: HostOptions,
    *,
    model: str | None = None,
    limits: Limits | None = None,
    sampling: SamplingParams | None = None,
) -> OpenHandsConfig:
    """A configuration for the model server of ``[rl.serving]`` and the runtime that ``options`` ask for.

    ``model`` is the served name, ``[rl.serving] model`` by default. OpenHands' iteration limit only backs up the
    episode's own turn limit; an agent other than ``RLAgent`` has no other limit. ``sampling`` is for other agents:
    ``RLAgent`` sets the parameters of each call. Raises ``ConfigError`` for a condenser that OpenHands does not know.
    """
    serving = settings.serving
    limits = limits or settings.limits()
    turns = limits.max_turns
    sampling = sampling or settings.sampling_params()
    llm = LLMConfig(
        model=f"openai/{model or serving.model}",
        base_url=serving.base_url,
        api_key=SecretStr(serving.api_key() or "none"),
        native_tool_calling=options.native_tool_calling,
        temperature=settings.sampling.temperature if sampling.temperature is None else sampling.temperature,
        top_p=sampling.top_p or settings.sampling.top_p,
        seed=sampling.seed,
        max_output_tokens=limits.max_response_length,
        timeout=max(1, round(serving.request_timeout)),
        num_retries=options.llm_retries,
        retry_min_wait=1,
        retry_max_wait=2,
        caching_prompt=False,
        disable_vision=True,
        modify_params=False,
        completion_kwargs=_completion_kwargs(settings, options, sampling),
    )
    config = AgentConfig(
        enable_browsing=False,
        enable_jupyter=False,
        enable_mcp=False,
        enable_plan_mode=False,
        enable_stuck_detection=options.stuck_detection,
        enable_history_truncation=False,
        condenser=_condenser(options, llm),
    )
    return OpenHandsConfig(
        llms={"llm": llm},
        agents={"agent": config, options.agent: config.model_copy(deep=True)},
        default_agent=options.agent,
        runtime=runtime_path(options),
        file_store="memory",
        enable_browser=False,
        max_iterations=turns * _ITERATIONS_A_TURN + 2 if options.agent == RL_AGENT else turns,
        sandbox=SandboxConfig(timeout=options.command_timeout),
    )


def _completion_kwargs(settings: RLSettings, options: HostOptions, sampling: SamplingParams) -> dict[str, Any] | None:
    """What OpenHands sends with every call: it drops an ``extra_body`` that a call has of its own. Token ids and
    logprobs are the recorder's to ask for, which knows what a server refuses."""
    chosen = overlay(settings.sampling_params(), sampling)
    extra = altering_parameters({name: getattr(chosen, name) for name in NEUTRAL_PARAMETERS})
    return {"extra_body": extra} if extra else None


def _condenser(options: HostOptions, llm: LLMConfig) -> CondenserConfig:
    kind = str(options.condenser.get("type", "noop"))
    asks = {"llm_config": llm} if kind in _ASKING else {}
    try:
        return create_condenser_config(kind, {**options.condenser, **asks})
    except ValueError as error:
        raise ConfigError(f"condenser {options.condenser}: {describe(error)}") from error


def runtime_path(options: HostOptions) -> str:
    """The class path of the OpenHands runtime for these options."""
    if options.environment_mode:
        return "openhands_rl_plugin.hosts.v0.environment_runtime.EnvironmentRuntime"
    return f"openhands_rl_plugin.hosts.v0.runtime.{_RUNTIMES[options.isolation]}"

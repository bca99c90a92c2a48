"""Options of the agent endpoint and of the chat."""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.config.rl import HttpUrl, VariableName
from openhands_rl_plugin.core.servers.door import API_KEY, Door, required_key
from openhands_rl_plugin.core.types import Frozen, Limits, SamplingParams
from openhands_rl_plugin.environments.tools.environment import ToolOptions

MIB = 1024**2


class PolicyConfig(Frozen):
    """The policy, its tools and its limits."""

    base_url: HttpUrl = Field(min_length=1, description="model server, up to and including /v1")
    model: str = Field(min_length=1, description="served model name, such as policy-v000007")
    base_model: str = Field(default="", description="name of the adapter's base model; unset: the model itself")
    upstream_key_env: VariableName = Field(default="", description="environment variable with the model server's key")
    tools: tuple[str, ...] = Field(default=(), description="think, final or module:Class; none: a plain conversation")
    template: str = Field(
        default="",
        description="family whose calls stand in the text (qwen3, ...); unset: the server reads them",
    )
    opens_thought: bool = Field(
        default=False,
        description="true for a model whose prompt ends with <think>, behind a server that leaves thoughts in answers",
    )
    system_prompt: str | None = Field(default=None, description="system message in place of the built-in one")
    max_turns: int = Field(default=32, ge=1, description="model responses per request")
    max_tokens: int = Field(default=2048, ge=1, description="tokens of one model response")
    timeout: float = Field(default=600.0, gt=0, description="seconds for one request")
    temperature: float | None = Field(default=None, ge=0, le=10, description="unset: the server's own")
    record: str = Field(default="", description="folder of a file store in which every conversation is recorded")
    run_id: str = Field(default="agent", min_length=1, max_length=200, description="run that the records belong to")

    def options(self) -> ToolOptions:
        """Of the environment. A conversation without tools has no system message of its own."""
        return ToolOptions(
            tools=self.tools,
            template=self.template,
            opens_thought=self.opens_thought,
            system_prompt=self.system_prompt,
        )

    def limits(self) -> Limits:
        """Of one request."""
        return Limits(max_turns=self.max_turns, max_response_length=self.max_tokens, timeout=self.timeout)

    def sampling(self) -> SamplingParams:
        """Defaults for parameters that a request does not set."""
        return SamplingParams(temperature=self.temperature)


class AgentConfig(PolicyConfig):
    """The endpoint: its address and its limits."""

    host: str = Field(default="127.0.0.1", description="address to listen on; any but loopback needs a key")
    port: int = Field(default=8300, ge=0, le=65535, description="0 takes a free port")
    api_key_env: VariableName = Field(
        default=API_KEY,
        description="environment variable with the API key that clients must send; unset: no key is required",
    )
    max_running: int = Field(default=16, ge=1, le=4096, description="concurrent requests")
    max_waiting: int = Field(default=64, ge=0, description="requests that may wait; one more gets status 503")
    max_body_bytes: int = Field(default=4 * MIB, ge=1024, description="maximum size of a request in bytes")

    def door(self) -> Door:
        """Who is let in. Raises ``ConfigError`` when a network address has no key."""
        return Door(required_key(self.host, self.api_key_env, protects="the agent and its tools"))

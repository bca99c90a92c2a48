"""The options of ``cli.rollout`` and ``play``: an endpoint, and how one episode is rolled out against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from openhands_rl_plugin.config.rl import HttpUrl, RLSettings, Settings, VariableName
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError

OF_EPISODE = ("seed", "token_ids", "run_id", "group_id", "sample")
"""The options that differ from episode to episode."""
# Options -> the keys of [rl] that they set.
_KEYS = {
    **{name: f"serving.{name}" for name in ("base_url", "model", "api_key_env")},
    **{name: f"sampling.{name}" for name in ("temperature", "seed")},
    **{name: name for name in ("max_turns", "max_prompt_length", "max_response_length", "max_obs_length", "host")},
    "strategy": "rollout_strategy",
}


class PlayOptions(Settings):
    """The server that an episode is rolled out against, and how. What is not set is as ``[rl]`` of ``config`` has it,
    or has its default.

    ``run_id``, ``group_id`` and ``sample`` name the episode: one that is stored under the same names is returned
    instead of being rolled out again. By default every episode is a new one.
    """

    base_url: HttpUrl = Field(default="", description="OpenAI-compatible endpoint, up to and including /v1")
    model: str = Field(default="", description="name of the policy on the endpoint, of a base model or an adapter")
    base_model: str = Field(default="", description="base model of the policy, where the endpoint does not say it")
    api_key_env: VariableName = Field(
        default="", description="NAME of the environment variable with the endpoint's key"
    )
    config: Path | None = Field(default=None, description="configuration file with [rl]")
    host: Literal["auto", "v0", "v1"] = Field(default="auto", description="OpenHands to run; auto: as [rl] host says")
    suite: str = Field(
        default="", description="suite of the task, or a file of rows; by default [rl] env_name, or swe-local"
    )
    strategy: str = Field(default="", description="rollout strategy; its options are in [rl.strategy] of the file")
    temperature: float | None = Field(default=None, ge=0, le=10, description="sampling temperature of the policy")
    max_turns: int | None = Field(default=None, ge=1, description="completions of the episode")
    max_prompt_length: int | None = Field(default=None, ge=1, description="tokens of the longest prompt")
    max_response_length: int | None = Field(default=None, ge=1, description="tokens of one completion")
    max_obs_length: int | None = Field(default=None, ge=1, description="tokens of an observation")
    native_tool_calling: bool = Field(default=True, description="tool calls by the endpoint's API; false: in the text")
    timeout: float = Field(default=7200.0, gt=0, description="seconds of the episode")
    test_timeout: float = Field(default=1800.0, gt=0, description="seconds of a patch's tests")
    backend: Literal["local", "docker"] = Field(default="local", description="where repository tasks run")
    mirror: Path | None = Field(default=None, description="folder of git repositories as owner/name.git")
    cache: Path | None = Field(default=None, description="folder of the local back end's Python environments")
    network: bool = Field(default=False, description="let tests use the network")
    seed: int | None = Field(default=None, ge=0, description="sampling seed; by default another one each time")
    token_ids: bool = Field(
        default=True, description="ask for token ids and logprobs; false: the endpoint records them itself"
    )
    run_id: str = Field(default="", max_length=200, description="name of the run in the store")
    group_id: str = Field(default="", max_length=200, description="name of the group of episodes that are compared")
    sample: int = Field(default=0, ge=0, description="number of the episode in its group")

    def settings(self) -> RLSettings:
        """``[rl]`` with these options over it; ``[rl.serving]`` names the endpoint. Raises ``ConfigError``."""
        given = {key: getattr(self, name) for name, key in _KEYS.items()}
        changes = [f"{key}={json.dumps(value)}" for key, value in given.items() if value not in ("", "auto", None)]
        settings = load_settings(self.config, changes=changes)
        if not (settings.serving.base_url and settings.serving.model):
            raise ConfigError("which endpoint? give --base-url URL and --model NAME, or [rl.serving] of a --config")
        return settings


def with_absolute_paths[S: PlayOptions](options: S) -> S:
    """The options with absolute paths, for a process with another working folder."""
    paths = {name: value for name, value in options if isinstance(value, Path)}
    return options.model_copy(update={name: path.expanduser().absolute() for name, path in paths.items()})

"""The model under evaluation: ``[llm.NAME]`` of OpenHands' config.toml, or options of the command."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.core.validation import problems, unknown_name

KEY_VARIABLE = "OPENHANDS_RL_LLM_API_KEY"
"""The environment variable for a key from config.toml: keys are passed by variable name and never written."""

OPENAI_URL = "https://api.openai.com/v1"
_OPENAI_COMPATIBLE = ("openai/", "hosted_vllm/", "litellm_proxy/", "custom_openai/")


class EvaluatedModel(Frozen):
    """An OpenAI-compatible model. ``timeout`` is in seconds, prices are for one token, lengths of answers in tokens.

    ``api_key_env`` names the variable that holds the key; empty for a server without keys. ``token_ids``: request
    token ids and logprobs, which training needs and which hosted APIs do not return; ``None``: of
    ``RLAgent``.
    """

    name: str = Field(min_length=1)
    base_url: str = Field(min_length=1)
    api_key_env: str = ""
    temperature: float | None = Field(default=None, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_output_tokens: int = Field(default=4096, ge=1)
    max_message_chars: int = Field(default=30_000, ge=1)
    timeout: float = Field(default=300.0, gt=0)
    num_retries: int = Field(default=4, ge=1)
    native_tool_calling: bool = True
    token_ids: bool | None = None
    input_cost_per_token: float | None = Field(default=None, ge=0)
    output_cost_per_token: float | None = Field(default=None, ge=0)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float | None:
        """The cost of the tokens; ``None`` without prices."""
        if self.input_cost_per_token is None and self.output_cost_per_token is None:
            return None
        return prompt_tokens * (self.input_cost_per_token or 0) + completion_tokens * (self.output_cost_per_token or 0)

    def as_llm_config(self) -> JsonObject:
        """As OpenHands writes it into ``metadata.json``: with a placeholder for the key."""
        return {
            "model": f"openai/{self.name}",
            "base_url": self.base_url,
            "api_key": "******" if self.api_key_env else None,
            **self.model_dump(mode="json", exclude={"name", "base_url", "api_key_env"}),
        }


def evaluated_model(
    options: Mapping[str, object], config: Path | None = None, section: str | None = None
) -> EvaluatedModel:
    """The model that ``[llm.<section>]`` over ``[llm]`` of ``config`` describes, ``options`` over both.

    ``section`` may begin with ``llm.``, as in OpenHands' own commands. A key in the file is moved to the
    environment variable ``KEY_VARIABLE`` of this process. Raises ``ConfigError``.
    """
    table = _section(config, section) if config is not None else {}
    if section and config is None:
        raise ConfigError(f"--llm {section}: give the config.toml that has [llm.{_short(section)}] with --config")
    own = {key: value for key, value in table.items() if key in EvaluatedModel.model_fields}
    given = {**own, **options}
    model = given.pop("model", None) or table.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError("no model is named: give --model NAME, or --llm NAME and a config.toml with [llm.NAME]")
    url = given.get("base_url") or table.get("base_url") or _default_url(model)
    if "api_key_env" not in options:
        given["api_key_env"] = _key_variable(table, str(url))
    given = {key: value for key, value in given.items() if value is not None}
    try:
        found = EvaluatedModel.model_validate({**given, "name": _served_name(model), "base_url": url})
    except ValidationError as error:
        where = f"[llm.{_short(section)}] " if section else ""
        lines = (f"{where}{'.'.join(at)}: {what}" for at, what in problems(error, EvaluatedModel))
        raise ConfigError("\n".join(lines)) from error
    if found.api_key_env and not os.environ.get(found.api_key_env):
        raise ConfigError(f"the environment variable {found.api_key_env} is not set; export {found.api_key_env}=...")
    return found


def _section(config: Path, section: str | None) -> dict[str, object]:
    try:
        document = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{config}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config}: is not valid TOML: {error}") from error
    table = document.get("llm")
    table = table if isinstance(table, dict) else {}
    common = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if section is None:
        return common
    named = {key: value for key, value in table.items() if isinstance(value, dict)}
    if _short(section) not in named:
        raise ConfigError(f"{config}: {unknown_name('[llm] section', _short(section), named)}")
    return {**common, **named[_short(section)]}


def _short(section: str | None) -> str:
    return (section or "").removeprefix("llm.")


def _served_name(model: str) -> str:
    prefix = next((prefix for prefix in _OPENAI_COMPATIBLE if model.startswith(prefix)), "")
    return model.removeprefix(prefix)


def _default_url(model: str) -> str:
    if model.startswith("openai/") or "/" not in model:
        return OPENAI_URL
    raise ConfigError(f"the model {model!r} needs the address of an OpenAI-compatible server: give --base-url")


def _key_variable(table: Mapping[str, object], url: str) -> str:
    if isinstance(key := table.get("api_key"), str) and key:
        os.environ[KEY_VARIABLE] = key
        return KEY_VARIABLE
    if os.environ.get("LLM_API_KEY"):
        return "LLM_API_KEY"
    return "OPENAI_API_KEY" if url.startswith(OPENAI_URL) else ""

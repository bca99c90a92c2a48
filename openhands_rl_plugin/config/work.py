"""What a run on a folder of one's own needs: the model of ``[llm]`` and the settings of ``[rl]``, options over both.

OpenHands V1 has no ``config.toml``; its model is read from the ``[llm]`` section that V0 has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from openhands_rl_plugin.config.fields import HttpUrl, Settings, VariableName
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import read_document, settings_from_sections, table_of
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen, JsonObject

DEFAULT_FILE = Path("config.toml")
NO_KEY = "none"
"""Given to a server that asks for no key, because clients refuse an empty one."""

# For work on a repository, where no file says anything else.
LIMITS: JsonObject = {"max_turns": 50, "max_response_length": 4096, "max_obs_length": 8192}
_PROVIDERS = ("openai/", "hosted_vllm/", "litellm_proxy/", "ollama/", "anthropic/", "gemini/", "openrouter/")


class WorkOptions(Settings):
    """Options of ``run`` over ``[rl]`` and ``[llm]``. ``None`` and ``""``: what the file has, or the default."""

    config: Path | None = Field(
        default=None, description="configuration file; by default ./config.toml, if there is one"
    )
    strategy: str = Field(default="", description="rollout strategy, without its options in the file")
    max_turns: int | None = Field(default=None, ge=1, description="completions per episode")
    store: str = Field(default="", description="directory of the file storage")

    model: str = Field(default="", description="the model's name on its server; over [llm] and [rl.serving]")
    base_url: HttpUrl = Field(default="", description="OpenAI-compatible server of the model, up to and including /v1")
    api_key_env: VariableName = Field(default="", description="NAME of the environment variable with the server's key")


class OwnWork(Frozen):
    """``llm``: the keys of ``[llm]``. ``rl``: the settings that are set, as ``[rl]`` would have them."""

    file: Path | None
    llm: JsonObject
    rl: JsonObject
    settings: RLSettings


def work_of(options: WorkOptions, environ: Mapping[str, str] | None = None, *, needs_model: bool = True) -> OwnWork:
    """Read the file and put the options over it. Raises ``ConfigError``, also without a model where it is needed."""
    file = options.config or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    try:
        document = read_document(file) if file else {"rl": {**LIMITS}}
        settings = settings_from_sections(document)
        section: Any = table_of(document, ("llm",)) or {}
    except ConfigError as error:
        raise ConfigError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from error
    llm: JsonObject = {key: value for key, value in section.items() if not isinstance(value, dict)}
    rl = _rl_with(options, settings.model_dump(mode="json", exclude_unset=True))
    llm = _llm_with(options, llm, os.environ if environ is None else environ)
    if needs_model and not llm.get("model"):
        raise ConfigError(
            "which model? give --model NAME --base-url URL, or a file with an [llm] section: openhands-rl doctor --init"
        )
    given = {"model": options.model, "base_url": options.base_url, "api_key_env": options.api_key_env}
    serving = {**_table(rl, "serving"), **{key: value for key, value in given.items() if value}}
    rl = {**rl, "serving": serving} if serving else rl
    return OwnWork(file=file, llm=llm, rl=rl, settings=settings_from_sections({"rl": rl}))


def _rl_with(options: WorkOptions, rl: JsonObject) -> JsonObject:
    changed = dict(rl)
    if options.strategy:
        if options.strategy != rl.get("rollout_strategy"):
            changed.pop("strategy", None)
        changed["rollout_strategy"] = options.strategy
    if options.max_turns is not None:
        changed["max_turns"] = options.max_turns
    if options.store:
        changed["storage_backend"] = "file"
        changed["storage"] = {**_table(rl, "storage"), "path": options.store}
    return changed


def _llm_with(options: WorkOptions, llm: JsonObject, environ: Mapping[str, str]) -> JsonObject:
    changed = dict(llm)
    if options.base_url:
        changed["base_url"] = options.base_url
    if options.model:
        served = bool(changed.get("base_url")) and not options.model.startswith(_PROVIDERS)
        changed["model"] = f"openai/{options.model}" if served else options.model
    if options.api_key_env:
        if not (key := environ.get(options.api_key_env)):
            raise ConfigError(f"--api-key-env: the environment variable {options.api_key_env} is not set")
        changed["api_key"] = key
    if changed.get("base_url") and not changed.get("api_key"):
        changed["api_key"] = NO_KEY
    return changed


def _table(rl: JsonObject, name: str) -> JsonObject:
    found = rl.get(name)
    return found if isinstance(found, dict) else {}

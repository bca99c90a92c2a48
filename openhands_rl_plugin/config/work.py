"""What a run on a folder of one's own needs: the model of ``[llm]`` and the settings of ``[rl]``, options over both.

OpenHands V1 has no ``config.toml``; its model is read from the ``[llm]`` section that V0 has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


class OwnWork(Frozen):
    """``llm``: the keys of ``[llm]``. ``rl``: the settings that are set, as ``[rl]`` would have them."""

    file: Path | None
    llm: JsonObject
    rl: JsonObject
    settings: RLSettings


def work_of(
    config: Path | None = None,
    changes: Sequence[str] = (),
    *,
    model: str = "",
    base_url: str = "",
    needs_model: bool = True,
) -> OwnWork:
    """Read the file (default: ``./config.toml``, if there is one), with ``changes``, the model and its server over it.

    Raises ``ConfigError``, also without a model where it is needed.
    """
    file = config or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    served = {"model": model, "base_url": base_url}
    changes = [*changes, *(f"serving.{key}={json.dumps(value)}" for key, value in served.items() if value)]
    try:
        document = read_document(file) if file else {"rl": {**LIMITS}}
        settings = settings_from_sections(document, changes)
        section: Any = table_of(document, ("llm",)) or {}
    except ConfigError as error:
        where = f"{file}: " if file else ""
        raise ConfigError("\n".join(f"{where}{line}" for line in str(error).splitlines())) from error
    llm: JsonObject = {key: value for key, value in section.items() if not isinstance(value, dict)}
    if base_url:
        llm["base_url"] = base_url
    if model:
        prefixed = bool(llm.get("base_url")) and not model.startswith(_PROVIDERS)
        llm["model"] = f"openai/{model}" if prefixed else model
    if settings.serving.api_key_env:
        llm["api_key"] = settings.serving.api_key()
    if llm.get("base_url") and not llm.get("api_key"):
        llm["api_key"] = NO_KEY
    if needs_model and not llm.get("model"):
        raise ConfigError(
            "which model? give --model NAME --base-url URL, or a file with an [llm] section: openhands-rl doctor --init"
        )
    return OwnWork(file=file, llm=llm, rl=settings.model_dump(mode="json", exclude_unset=True), settings=settings)

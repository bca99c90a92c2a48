"""The families by name."""

from __future__ import annotations

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.templates.base import ChatTemplate
from openhands_rl_plugin.core.templates.chatml import Hermes, SmolLM2
from openhands_rl_plugin.core.templates.llama3 import Llama3, Llama31
from openhands_rl_plugin.core.templates.qwen import Qwen3, Qwen3Instruct, Qwen25
from openhands_rl_plugin.core.validation import unknown_name

TEMPLATES: dict[str, ChatTemplate] = {
    "hermes": Hermes(),
    "llama3": Llama3(),
    "llama3.1": Llama31(),
    "qwen2.5": Qwen25(),
    "qwen3": Qwen3(),
    "qwen3-no-thinking": Qwen3(thinking=False),
    "qwen3-instruct": Qwen3Instruct(),
    "smollm2": SmolLM2(),
}


def template_for(name: str) -> ChatTemplate:
    """The template of a family. Raises ConfigError for a name that no family has."""
    if (template := TEMPLATES.get(name.lower())) is None:
        raise ConfigError(unknown_name("chat template", name, TEMPLATES))
    return template

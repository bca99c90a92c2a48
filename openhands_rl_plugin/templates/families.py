"""The families by name."""

from __future__ import annotations

from openhands_rl_plugin.errors import ConfigError
from openhands_rl_plugin.validation import unknown_name

from .base import ChatTemplate
from .chatml import Hermes, SmolLM2
from .llama3 import Llama3, Llama31
from .qwen import Qwen3, Qwen3Instruct, Qwen25

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

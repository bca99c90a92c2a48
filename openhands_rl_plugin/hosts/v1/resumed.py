"""What differs in a conversation that is resumed: the SDK compares the agents' classes and tools only."""

from __future__ import annotations

import json
from collections.abc import Mapping

from openhands_rl_plugin.config.toml import settings_from_sections
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import JsonObject

_WORKSPACE = ("isolation", "prompt", "visible", "writable", "network")
_LONGEST = 60


def settings_that_changed(before: JsonObject, model_before: str, now: JsonObject, model_now: str) -> str:
    """The differences of two ``[rl]`` sections and models that make it another policy or another place, in words.

    Empty without any. Raises ``ConfigError`` for a section that is none any more.
    """
    was, is_now = _deciding(before, model_before), _deciding(now, model_now)
    told = (f"{name}: {_shown(was[name])}, now {_shown(is_now[name])}" for name in was if was[name] != is_now[name])
    return redact_text("; ".join(told))


def _deciding(rl: JsonObject, model: str) -> Mapping[str, object]:
    settings = settings_from_sections({"rl": rl})
    workspace = settings.workspace
    return {
        "model": settings.serving.model or model,
        "[rl] rollout_strategy": settings.rollout_strategy,
        "[rl.strategy]": settings.strategy,
        **{f"[rl.workspace] {name}": getattr(workspace, name) for name in _WORKSPACE},
    }


def _shown(value: object) -> str:
    return f"{json.dumps(value):.{_LONGEST}}"

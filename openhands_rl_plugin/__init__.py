"""Reinforcement learning for OpenHands agents: record, score, train, reload, serve.

Importing the package loads nothing else; a public name is imported when it is first used.
"""

from __future__ import annotations

# Every Python process of an installation imports this package (see hosts/v0/autoload.py), so not even typing is loaded.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_EXPORTS = {
    "AdapterStore": "models.adapters.store",
    "AgentRuntime": "apps.chat_endpoint",
    "AgentSession": "rollout.episode",
    "BaseEnvClient": "environments.http.client",
    "ConfigError": "core.errors",
    "EpisodeRequest": "core.types",
    "EpisodeTree": "core.tree",
    "FileTrajectoryStorage": "trajectories.sqlite.storage",
    "Frozen": "core.types",
    "Limits": "core.types",
    "MCTSStrategy": "rollout.strategies.mcts",
    "Message": "core.types",
    "MongoDBTrajectoryStorage": "trajectories.mongodb.storage",
    "Observation": "core.types",
    "OpenAIEngine": "models.engines.client",
    "PlayOptions": "config.rollout",
    "PolicyRef": "core.types",
    "RLAgent": "apps.rl_agent",
    "RLAgentConfig": "config.rl:RLSettings",
    "RLError": "core.errors",
    "RLSettings": "config.rl",
    "SamplingParams": "core.types",
    "Score": "core.types",
    "StandardReActStrategy": "rollout.strategies.base",
    "Task": "core.types",
    "ToTStrategy": "rollout.strategies.base",
    "ToolBase": "environments.tools.environment",
    "ToolEnvironment": "environments.tools.environment",
    "Trajectory": "core.types",
    "TrajectoryFilter": "core.records",
    "WebEnvClient": "environments.http.client",
    "demo_model": "apps.demo_model:ensure_model",
    "load_settings": "config.toml",
    "make_template": "core.templates:template_for",
    "play": "apps.rollout.play",
}
"""Public name -> module, ``module:name`` where the name there differs. ``__init__.pyi`` repeats this for editors."""

# pyrefly: ignore[unresolvable-dunder-all]
__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if (target := _EXPORTS.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = target.partition(":")
    value = getattr(import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

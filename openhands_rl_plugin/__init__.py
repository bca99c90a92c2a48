"""Reinforcement learning for OpenHands agents: record, score, train, reload, serve.

Importing the package loads nothing else; a public name is imported when it is first used.
"""

from __future__ import annotations

# Every Python process of an installation imports this package (see hosts/v0/autoload.py), so not even typing is loaded.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_EXPORTS = {
    "AgentRuntime": "runtime.agent",
    "AgentSession": "session",
    "ConfigError": "errors",
    "EpisodeRequest": "types",
    "EpisodeTree": "tree",
    "FileTrajectoryStorage": "storages.file",
    "Limits": "types",
    "Message": "types",
    "MongoDBTrajectoryStorage": "storages.mongodb",
    "Observation": "types",
    "RLAgent": "agent",
    "RLAgentConfig": "settings:RLSettings",
    "RLError": "errors",
    "RLSettings": "settings",
    "SamplingParams": "types",
    "Score": "types",
    "StandardReActStrategy": "strategies.react",
    "Task": "types",
    "ToolBase": "environments.tools",
    "ToolEnvironment": "environments.tools",
    "Trajectory": "types",
    "TrajectoryFilter": "records",
    "WebEnvClient": "environments.http",
    "load_settings": "config",
    "make_template": "templates.families:template_for",
}
"""Public name -> module, with ``:name`` where it is called otherwise there. ``__init__.pyi`` tells editors the same."""

# pyright: reportUnsupportedDunderAll=false
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

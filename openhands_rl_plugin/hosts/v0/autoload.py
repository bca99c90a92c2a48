"""Registers ``RLAgent`` when OpenHands' agents are imported.

A ``.pth`` file, which every Python process executes, adds a finder to ``sys.meta_path``. The finder imports this module
when ``openhands.agenthub`` is imported, and nothing before. ``OPENHANDS_RL_AUTOLOAD=0`` switches it off.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class AgentHubWatch:
    """The import hook that the finder of the same name in the ``.pth`` file calls."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """The spec of ``openhands.agenthub``, whose execution is followed by the registration. Removes the finder."""
        sys.meta_path[:] = [each for each in sys.meta_path if getattr(each, "__name__", "") != "AgentHubWatch"]
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                _register()

            # The loader object belongs to this one spec, so nothing else sees the replacement.
            spec.loader.exec_module = load_and_register
        return spec


def _register() -> None:
    try:
        import openhands_rl_plugin.hosts.v0.agent  # noqa: F401 - the module registers its class, as OpenHands' own do
    # This runs inside other programs' processes: an error here must not break them.
    except Exception as error:
        logging.getLogger("openhands").warning(
            "openhands_rl_plugin could not register RLAgent (%s: %s); OpenHands continues without it. Set "
            "OPENHANDS_RL_AUTOLOAD=0 to disable the plugin.",
            type(error).__name__,
            error,
        )

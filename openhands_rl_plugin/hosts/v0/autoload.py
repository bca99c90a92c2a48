"""Registers ``RLAgent`` when OpenHands' agents are imported.

A ``.pth`` file, which every Python process executes, adds one entry to ``sys.meta_path``. The entry imports this module
when ``openhands.agenthub`` is imported, and nothing before. ``OPENHANDS_RL_AUTOLOAD=0`` switches it off.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

AWAITED = "openhands.agenthub"
SWITCH = "OPENHANDS_RL_AUTOLOAD"


class AgentHubWatch:
    """A meta-path finder that only adds the registration after the import of OpenHands' agents."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The real spec of ``openhands.agenthub``, whose execution is followed by the registration."""
        if name != AWAITED:
            return None
        sys.meta_path[:] = [each for each in sys.meta_path if getattr(each, "__name__", "") != cls.__name__]
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
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
        import logging

        logging.getLogger("openhands").warning(
            "openhands_rl_plugin could not register RLAgent (%s: %s); OpenHands continues without it. Set %s=0 to "
            "disable the plugin.",
            type(error).__name__,
            error,
            SWITCH,
        )


def install() -> None:
    """Install the finder, unless it is disabled, already installed, or ``openhands.agenthub`` is imported."""
    if os.environ.get(SWITCH) != "0" and AgentHubWatch not in sys.meta_path and AWAITED not in sys.modules:
        sys.meta_path.insert(0, AgentHubWatch)


install()

"""Puts ``RLAgent`` into OpenHands' agent registry, as often as asked."""

from __future__ import annotations

from openhands.controller.agent import Agent

from openhands_rl_plugin.hosts.v0.agent import RLAgent

NAME = "RLAgent"

_register_once = Agent.register


def _register(name: str, agent_cls: type[Agent]) -> None:
    """``Agent.register``, except that the same class may come again under the same name.

    The ``classpath`` line of a config.toml makes OpenHands register a class that autoload registered before it, and it
    would log that as an error.
    """
    if Agent._registry.get(name) is not agent_cls:
        _register_once(name, agent_cls)


def register() -> None:
    """Register ``RLAgent``; a second call changes nothing."""
    Agent.register = staticmethod(_register)
    Agent.register(NAME, RLAgent)

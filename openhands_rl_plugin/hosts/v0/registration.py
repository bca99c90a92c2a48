"""Makes ``Agent.register`` of OpenHands idempotent.

Autoload registers ``RLAgent``, and so does OpenHands itself when a config.toml has the documented ``classpath`` line;
without this the second registration would be logged as an error.
"""

from __future__ import annotations

from openhands.controller.agent import Agent

_register_new = Agent.register


def register(name: str, agent_cls: type[Agent]) -> None:
    """``Agent.register``, except that registering the same class again changes nothing.

    Raises OpenHands' ``AgentAlreadyRegisteredError`` when another class has the name.
    """
    if Agent._registry.get(name) is not agent_cls:
        _register_new(name, agent_cls)


Agent.register = staticmethod(register)

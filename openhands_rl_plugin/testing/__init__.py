"""For tests of plugins: a scripted engine, toy environments and a conformance check for each kind of plugin.

Examples:
    >>> import asyncio
    >>> from openhands_rl_plugin import StandardReActStrategy
    >>> asyncio.run(check_strategy(StandardReActStrategy()))
"""

from openhands_rl_plugin.testing.checks import (
    GridEnvironment,
    ScriptedEngine,
    check_engine,
    check_environment,
    check_reward,
    check_strategy,
    encode,
    example_trajectory,
    prompt_ids,
)
from openhands_rl_plugin.testing.storage import check_storage

__all__ = [
    "GridEnvironment",
    "ScriptedEngine",
    "check_engine",
    "check_environment",
    "check_reward",
    "check_storage",
    "check_strategy",
    "encode",
    "example_trajectory",
    "prompt_ids",
]

"""For tests of plugins: a scripted engine, toy environments and a conformance check for each kind of plugin.

Example:
    >>> async def test_mine(tmp_path):
    ...     await check_storage(lambda: MyStorage(tmp_path))
"""

from openhands_rl_plugin.testing.checks import (
    GridEnvironment,
    ScriptedEngine,
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
    "check_environment",
    "check_reward",
    "check_storage",
    "check_strategy",
    "encode",
    "example_trajectory",
    "prompt_ids",
]

"""A small WebShop: generated catalogue, WebShop's pages, actions and reward, in process or over HTTP."""

from openhands_rl_plugin.contrib.webshop.app import create_app
from openhands_rl_plugin.contrib.webshop.engine import Purchase, StepResult, WebShop, WebShopSession
from openhands_rl_plugin.contrib.webshop.goals import Goal, Split
from openhands_rl_plugin.contrib.webshop.oracle import oracle_actions
from openhands_rl_plugin.contrib.webshop.reward import RewardBreakdown
from openhands_rl_plugin.contrib.webshop.server import running_webshop
from openhands_rl_plugin.core.servers.listening import PortUnavailableError

__all__ = [
    "Goal",
    "PortUnavailableError",
    "Purchase",
    "RewardBreakdown",
    "Split",
    "StepResult",
    "WebShop",
    "WebShopSession",
    "create_app",
    "oracle_actions",
    "running_webshop",
]

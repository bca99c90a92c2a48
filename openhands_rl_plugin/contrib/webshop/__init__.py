"""A small WebShop: generated catalogue, WebShop's pages, actions and reward, in process or over HTTP."""

from openhands_rl_plugin.contrib.webshop.catalogue import Goal, RewardBreakdown, Split
from openhands_rl_plugin.contrib.webshop.engine import Purchase, StepResult, WebShop, WebShopSession, oracle_actions
from openhands_rl_plugin.contrib.webshop.server import create_app, running_webshop
from openhands_rl_plugin.core.servers import PortUnavailableError

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

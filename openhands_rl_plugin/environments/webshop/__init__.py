"""A small WebShop: generated catalogue, WebShop's pages, actions and reward, in process or over HTTP."""

from .app import create_app
from .engine import Purchase, StepResult, WebShop, WebShopSession
from .goals import Goal, Split
from .oracle import oracle_actions
from .reward import RewardBreakdown
from .server import PortUnavailableError, running_webshop, serve

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
    "serve",
]

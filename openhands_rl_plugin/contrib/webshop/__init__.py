"""A small WebShop: generated catalogue, WebShop's pages, actions and reward, in process or over HTTP."""

from openhands_rl_plugin.contrib.webshop.engine import WebShop, WebShopSession, oracle_actions
from openhands_rl_plugin.contrib.webshop.server import running_webshop

__all__ = ["WebShop", "WebShopSession", "oracle_actions", "running_webshop"]

"""AgentGym's own WebShop server over a shop of one product: ``serve_agentenv_webshop.py PORT FOLDER``.

FOLDER is agentenv-webshop of AgentGym's repository. The products and the search engine of the real shop are not in
there, so that only what is behind the server's routes is a stand-in.
"""

import sys
from types import ModuleType

import uvicorn


class Shop:
    """What the server wants of WebShop's environment."""

    def reset(self, session=None):
        self._session = session
        return f"WebShop [SEP] Instruction: [SEP] Find me lamp {session} [SEP] Search", None

    def step(self, action):
        bought = action == "click[Buy Now]"
        return f"{self._session}: {action}", float(bought), bought, None


gym, site, envs = ModuleType("gym"), ModuleType("web_agent_site"), ModuleType("web_agent_site.envs")
gym.make = lambda *names, **options: Shop()
envs.WebAgentTextEnv = Shop
sys.modules.update({"gym": gym, "web_agent_site": site, "web_agent_site.envs": envs})
sys.path.insert(0, sys.argv[2])

from agentenv_webshop.server import app  # noqa: E402

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

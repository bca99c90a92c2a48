"""The suite ``webshop``: the goals of the embedded shop, which runs while they are rolled out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.webshop.engine import WebShop
from openhands_rl_plugin.contrib.webshop.server import running_webshop
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.runs.environment_runner import indexed_tasks
from openhands_rl_plugin.evals.runs.episodes import EvalTask
from openhands_rl_plugin.evals.runs.own_suites import OwnSuite, Suite


class WebShopSuite(OwnSuite):
    """The embedded shop."""

    suite = Suite(name="webshop", dataset="webshop", split="heldout", software=False)
    server = ("env", "webshop")

    def tasks(self, split: str) -> tuple[EvalTask, ...]:
        """As in ``OwnSuite``."""
        shop = WebShop()
        if split == "all":
            return (*self.tasks("train"), *self.tasks("heldout"))
        if split != "train" and split != "heldout":
            raise ConfigError(f"the webshop has the splits train and heldout, not {split!r}")
        return indexed_tasks("webshop", shop.goal_indices(split), split)

    @contextmanager
    def serving(self, settings: RLSettings) -> Iterator[RLSettings]:
        """As in ``OwnSuite``."""
        with running_webshop() as url:
            parts = urlsplit(url)
            base = f"{parts.scheme}://{parts.hostname}"
            here = {"env_name": "webshop", "env_server_base": base, "env_port": parts.port}
            yield settings.model_copy(update=here if settings.env_name == "webshop" else {**here, "environment": {}})


WEBSHOP = WebShopSuite()

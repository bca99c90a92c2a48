"""The shop as a suite and as a demonstrator of ``openhands-rl loop``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from openhands_rl_plugin.apps.loop.tasks import Demonstrator
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.webshop.engine import WebShop, oracle_actions
from openhands_rl_plugin.contrib.webshop.server import running_webshop
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import EpisodeRunner, Forkable, LLMEngine, TrajectoryStorage
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, Message, PolicyRef, StrategySpec
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.evals.runs.suites import EvalTask, OwnSuite, Suite, indexed_tasks
from openhands_rl_plugin.rollout.episode import SessionRunner

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.loop.run import LoopJob


ORACLE = PolicyRef(base_model="webshop-oracle")


class WebShopDemonstrator:
    """Answers turn n with the n-th action of the script; the engine is never called."""

    def __init__(self, script: Sequence[str]) -> None:
        self._script = script

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Propose the next scripted action."""
        message = Message(role="assistant", content=self._script[tree.turns])
        return tree.propose(Completion(message=message, finish_reason="stop", policy=ORACLE))


class ShopDemonstrator(Demonstrator):
    """The oracle of the embedded shop, for a loop: its world is the server's."""

    def check(self, settings: RLSettings) -> None:
        """As in ``Demonstrator``."""
        if settings.react_format:
            raise ConfigError("--demonstrations: the script writes plain actions: set react_format = false in [rl]")

    @asynccontextmanager
    async def open(self, job: LoopJob, storage: TrajectoryStorage) -> AsyncIterator[EpisodeRunner]:
        """As in ``Demonstrator``."""
        url = job.settings.environment_url
        world = WebShop()
        environment = HttpEnvironmentOptions(base_url=url, react_format=False)
        yield SessionRunner(
            make_environment=lambda request: WebEnvClient(environment),
            make_strategy=lambda request: WebShopDemonstrator(
                oracle_actions(world, int(str(request.task.data["idx"])))
            ),
            strategy_spec=StrategySpec(name="webshop-oracle"),
            base_model=ORACLE.base_model,
            limits=job.settings.limits(),
            storage=storage,
        )


SHOP = ShopDemonstrator()


class WebShopSuite(OwnSuite):
    """The embedded shop."""

    suite = Suite(name="webshop", dataset="webshop", split="heldout", software=False)
    server = ("env", "webshop")

    def tasks(self, split: str) -> tuple[EvalTask, ...]:
        """As in ``OwnSuite``."""
        if split == "all":
            return (*self.tasks("train"), *self.tasks("heldout"))
        if split != "train" and split != "heldout":
            raise ConfigError(f"the webshop has the splits train and heldout, not {split!r}")
        return indexed_tasks("webshop", tuple(goal.index for goal in WebShop().goals if goal.split == split), split)

    @contextmanager
    def serving(self, settings: RLSettings) -> Iterator[RLSettings]:
        """As in ``OwnSuite``."""
        with running_webshop() as url:
            parts = urlsplit(url)
            base = f"{parts.scheme}://{parts.hostname}"
            here = {"env_name": "webshop", "env_server_base": base, "env_port": parts.port}
            yield settings.model_copy(update=here if settings.env_name == "webshop" else {**here, "environment": {}})


WEBSHOP = WebShopSuite()

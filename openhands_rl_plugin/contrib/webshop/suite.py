"""The shop as a suite and as a demonstrator of ``openhands-rl loop``."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from openhands_rl_plugin.apps.loop.tasks import Demonstrator
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.webshop.engine import WebShop, oracle_actions
from openhands_rl_plugin.contrib.webshop.server import running_webshop
from openhands_rl_plugin.core.errors import BadEnvironmentError, ConfigError
from openhands_rl_plugin.core.protocols import EpisodeRunner, Forkable, LLMEngine, TrajectoryStorage
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, Frozen, Message, PolicyRef, StrategySpec
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.evals.runs.environment_runner import indexed_tasks
from openhands_rl_plugin.evals.runs.outcome import EvalTask
from openhands_rl_plugin.evals.runs.own_suites import OwnSuite, Suite
from openhands_rl_plugin.rollout.session import SessionRunner

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.loop.run import LoopJob


ORACLE = PolicyRef(base_model="webshop-oracle")


class DemonstratorOptions(Frozen):
    """The options that the server was started with; the oracle rebuilds that world to compute its scripts."""

    products: int = 1000
    goals: int = 1500
    seed: int = 0
    results_per_page: int = 10
    separator: str = " [SEP] "


class WebShopDemonstrator:
    """Answers turn n with the n-th action of the oracle's script; the engine is never called."""

    Options = DemonstratorOptions

    def __init__(self, options: DemonstratorOptions | None = None) -> None:
        self.options = options or DemonstratorOptions()

    @functools.cached_property
    def _world(self) -> WebShop:
        chosen = self.options
        return WebShop(
            num_products=chosen.products,
            num_goals=chosen.goals,
            seed=chosen.seed,
            results_per_page=chosen.results_per_page,
            separator=chosen.separator,
        )

    @functools.cached_property
    def _goals(self) -> dict[str, int]:
        return {goal.instruction: goal.index for goal in self._world.goals}

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Propose the next scripted action. Raises ``BadEnvironmentError`` when the goal is not one of this world."""
        script = oracle_actions(self._world, self._goal(tree))
        if tree.turns >= len(script):
            raise BadEnvironmentError("the oracle's script is over but the episode is not: is it the same world?")
        message = Message(role="assistant", content=script[tree.turns])
        return tree.propose(Completion(message=message, finish_reason="stop", policy=ORACLE))

    def _goal(self, tree: EpisodeTree) -> int:
        for message in tree.messages():
            for part in (message.content or "").split(self.options.separator) if message.role == "user" else ():
                if part in self._goals:
                    return self._goals[part]
        raise BadEnvironmentError(
            "no goal of the oracle's world is on the page: start the server with the same options"
        )


def shop_demonstrator(
    settings: RLSettings, storage: TrajectoryStorage, shop: DemonstratorOptions | None = None
) -> SessionRunner:
    """Runs episodes of the embedded shop, which was started with the options ``shop``; nothing is sampled."""
    environment = HttpEnvironmentOptions(base_url=settings.environment_url, react_format=settings.react_format)
    strategy = WebShopDemonstrator(shop)
    return SessionRunner(
        make_environment=lambda request: WebEnvClient(environment),
        make_strategy=lambda request: strategy,
        strategy_spec=StrategySpec(name="webshop-oracle", options=strategy.options.model_dump()),
        base_model=ORACLE.base_model,
        limits=settings.limits(),
        storage=storage,
    )


class ShopDemonstrator(Demonstrator):
    """The oracle of the embedded shop, for a loop."""

    def check(self, settings: RLSettings) -> None:
        """As in ``Demonstrator``."""
        if settings.react_format:
            raise ConfigError("--demonstrations: the script writes plain actions: set react_format = false in [rl]")

    @asynccontextmanager
    async def open(self, job: LoopJob, storage: TrajectoryStorage) -> AsyncIterator[EpisodeRunner]:
        """As in ``Demonstrator``."""
        yield shop_demonstrator(job.settings, storage)


SHOP = ShopDemonstrator()


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

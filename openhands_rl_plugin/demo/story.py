"""The demo, composed from the package's public parts: shop, model server, OpenHands workers, loop, report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from openhands_rl_plugin.demo.child import free_port, running_command
from openhands_rl_plugin.demo.model import NAME, ensure_model
from openhands_rl_plugin.demo.options import CONTEXT_TOKENS, SEPARATOR, DemoOptions
from openhands_rl_plugin.demo.report import comparisons, write_report
from openhands_rl_plugin.environments.http import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.environments.webshop import WebShop
from openhands_rl_plugin.environments.webshop.demonstrator import ORACLE, DemonstratorOptions, WebShopDemonstrator
from openhands_rl_plugin.errors import ConfigError, describe
from openhands_rl_plugin.hosts.v0.executors import open_pool
from openhands_rl_plugin.protocols import TrajectoryStorage
from openhands_rl_plugin.rewards.outcome import ReturnReward, SuccessBonusReward
from openhands_rl_plugin.runners import SessionRunner
from openhands_rl_plugin.serving.adapters import AdapterStore
from openhands_rl_plugin.serving.publisher import AdapterPublisher
from openhands_rl_plugin.settings import RLSettings
from openhands_rl_plugin.storages.file import FileTrajectoryStorage
from openhands_rl_plugin.testing import ScriptedEngine
from openhands_rl_plugin.training.async_loop import make_loop
from openhands_rl_plugin.training.async_router import rollout_settings
from openhands_rl_plugin.training.loop import LoopListener, LoopParts
from openhands_rl_plugin.training.make_trainer import make_trainer
from openhands_rl_plugin.training.plan import LoopState
from openhands_rl_plugin.types import Frozen, StrategySpec

CACHE_BYTES = 128 * 1024**2
PROBE = "Instruction: [SEP] Find me soft cotton socks with color: blue [SEP] Back to Search [SEP] Buy Now"


class DemoResult(Frozen):
    """The finished stages, what each kind of learning changed, and where the report on it lies."""

    state: LoopState
    comparisons: tuple[str, ...]
    report: Path


def run_demo(options: DemoOptions, listener: LoopListener | None = None) -> DemoResult:
    """Run the demo, or go on with the one that ``options.run_directory`` holds.

    Raises ``ConfigError`` when the directory holds a run with other options, and any ``RLError`` of the parts.
    """
    _claim(options)
    model = ensure_model(options.model_directory)
    adapters = AdapterStore(options.run_directory / "adapters")
    with _servers(options, model) as settings, rollout_settings(settings, adapters) as sampled:
        return asyncio.run(_play(_Stage(options, settings, sampled, model, options.shop()), listener))


@dataclass(frozen=True)
class _Stage:
    options: DemoOptions
    settings: RLSettings
    sampled: RLSettings
    """Where rollouts sample from."""
    model: Path
    shop: WebShop


async def _play(stage: _Stage, listener: LoopListener | None) -> DemoResult:
    directory = stage.options.run_directory
    tokenizer = AutoTokenizer.from_pretrained(stage.model)
    plan = stage.options.plan(stage.shop, base_model=NAME, probe_ids=tuple(tokenizer(PROBE).input_ids))
    adapters = AdapterStore(directory / "adapters")
    storage = FileTrajectoryStorage(directory / "trajectories")
    runner = open_pool(stage.sampled, workers=1, storage=storage)
    try:
        parts = LoopParts(
            runner=runner,
            demonstrator=_demonstrator(stage, storage),
            storage=storage,
            reward=ReturnReward(),
            objective=SuccessBonusReward(),
            adapters=adapters,
            publisher=AdapterPublisher(
                stage.settings.serving.base_url, adapters, keep=stage.settings.loop.kept_versions
            ),
            tokenizer=tokenizer,
            make_trainer=lambda settings, adapter: make_trainer(stage.model, settings, adapter),
            state_file=directory / "state.json",
        )
        state = await make_loop(plan, parts, stage.settings.loop, listener).run()
        report = await write_report(directory / "report.html", state, storage, adapters, plan.run_id)
        compared = await comparisons(storage, plan.run_id)
    finally:
        await runner.close()
        await storage.close()
    return DemoResult(state=state, comparisons=compared, report=report)


def _demonstrator(stage: _Stage, storage: TrajectoryStorage) -> SessionRunner:
    environment = HttpEnvironmentOptions(base_url=stage.settings.environment_url, react_format=False)
    options = DemonstratorOptions(results_per_page=stage.options.results_per_page, separator=SEPARATOR)
    strategy = WebShopDemonstrator(options)
    return SessionRunner(
        make_environment=lambda request: WebEnvClient(environment),
        make_strategy=lambda request: strategy,
        make_engine=lambda request: ScriptedEngine([]),
        strategy_spec=StrategySpec(name="webshop-oracle", options=options.model_dump()),
        base_model=ORACLE.base_model,
        limits=stage.settings.limits(),
        storage=storage,
    )


@contextlib.contextmanager
def _servers(options: DemoOptions, model: Path) -> Iterator[RLSettings]:
    logs = options.run_directory / "logs"
    shop = ["env", "webshop", "--results-per-page", str(options.results_per_page), "--separator", "newline"]
    sizes = {"max-batch": options.concurrency, "max-model-len": CONTEXT_TOKENS, "cache-bytes": CACHE_BYTES}
    policy = ["serve", "--model", str(model), "--served-model-name", NAME]
    policy += [f"--{name}={size}" for name, size in sizes.items()]
    with (
        running_command(shop, free_port(), logs / "webshop.log") as shop_url,
        running_command(policy, free_port(), logs / "serve.log") as model_url,
    ):
        yield options.settings(shop_url=shop_url, model_url=model_url, base_model=NAME)


def _claim(options: DemoOptions) -> None:
    """Bind the directory to these options, so that a run is never continued as another one."""
    try:
        options.run_directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{options.run_directory} cannot be made ({describe(error)}): choose another --run-dir"
        ) from error
    noted = options.run_directory / "options.json"
    mine = options.model_dump_json(exclude={"run_directory", "model_directory"}, indent=1)
    if not noted.exists():
        noted.write_text(mine)
    elif noted.read_text() != mine:
        raise ConfigError(
            f"{options.run_directory} holds a run with other options: give the same ones to resume it, "
            "another --run-dir, or --fresh to start over"
        )

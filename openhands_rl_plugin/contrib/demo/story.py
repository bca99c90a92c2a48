"""The demo, composed from the package's public parts: shop, model server, OpenHands workers, loop, report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.apps.demo_model import NAME, ensure_model
from openhands_rl_plugin.apps.loop.checks import claim
from openhands_rl_plugin.apps.loop.reporting import RunReport
from openhands_rl_plugin.apps.loop.run import open_parts, probe_ids
from openhands_rl_plugin.cli.options.ending import ENDING
from openhands_rl_plugin.cli.options.running import free_port, running_command
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.demo.options import CONTEXT_TOKENS, OTHER_SIZES, SEPARATOR, DemoOptions
from openhands_rl_plugin.contrib.webshop import WebShop
from openhands_rl_plugin.contrib.webshop.suite import DemonstratorOptions, shop_demonstrator
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.hosts.open import make_runner
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.rewards.outcome import ReturnReward, SuccessBonusReward
from openhands_rl_plugin.training.loop.asynchronous import make_loop
from openhands_rl_plugin.training.loop.facts import RunFacts
from openhands_rl_plugin.training.loop.plan import LoopState
from openhands_rl_plugin.training.loop.router import rollout_settings
from openhands_rl_plugin.training.loop.stages import LoopListener
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

TITLE = "A small model learns to shop"
CACHE_BYTES = 128 * 1024**2
PREFILL_TOKENS = 1024
"""Prompt tokens a step: nobody waits for a first token here, and a prompt costs a tenth less than with 256 a step."""


class DemoResult(Frozen):
    """The finished stages, the effect of SFT and RL, and the path of the report."""

    state: LoopState
    comparisons: tuple[str, ...]
    report: Path


def run_demo(options: DemoOptions, listener: LoopListener | None = None, command: str = "") -> DemoResult:
    """Run the demo, or resume the one in ``options.run_directory``. ``command``: for its report.

    Raises ``ConfigError`` when the directory holds a run with other options, and any ``RLError`` of the parts.
    """
    places = {"run_directory": True, "model_directory": True}
    claim(options.run_directory, options.model_dump(mode="json", exclude={**places, "loop": OTHER_SIZES}))
    model = ensure_model(options.model_directory)
    adapters = AdapterStore(options.run_directory / "adapters")
    with _servers(options, model) as settings, rollout_settings(settings, adapters) as sampled:
        return ENDING.run(_run(_Stage(options, settings, sampled, model, options.shop(), command), listener))


@dataclass(frozen=True)
class _Stage:
    options: DemoOptions
    settings: RLSettings
    sampled: RLSettings
    """The settings with the address that rollouts sample from."""
    model: Path
    shop: WebShop
    command: str


async def _run(stage: _Stage, listener: LoopListener | None) -> DemoResult:
    directory = stage.options.run_directory
    plan = stage.options.plan(stage.shop, base_model=NAME, probe_ids=probe_ids(stage.model))
    facts = RunFacts.begin(directory, plan, title=TITLE, stages=stage.options.stages, command=stage.command)
    storage = FileTrajectoryStorage(directory / "trajectories")
    runner = make_runner(stage.sampled, workers=1, storage=storage)
    shop = DemonstratorOptions(results_per_page=stage.options.results_per_page, separator=SEPARATOR)
    try:
        async with open_parts(
            stage.settings,
            model=stage.model,
            directory=directory,
            runner=runner,
            storage=storage,
            demonstrator=shop_demonstrator(stage.settings, storage, shop),
            reward=ReturnReward(),
            objective=SuccessBonusReward(),
        ) as parts:
            reporting = RunReport(
                listener or LoopListener(),
                facts,
                plan,
                directory=directory,
                storage=storage,
                adapters=parts.adapters.root,
                model=stage.model,
                reward_version=parts.reward.version,
            )
            state = await make_loop(plan, parts, stage.settings.loop, reporting).run()
            await reporting.write(state)
    finally:
        await runner.close()
        await storage.close()
    compared = tuple(change.sentence("goals") for change in reporting.facts.changes)
    return DemoResult(state=state, comparisons=compared, report=reporting.written)


@contextlib.contextmanager
def _servers(options: DemoOptions, model: Path) -> Iterator[RLSettings]:
    logs = options.run_directory / "logs"
    shop = ["env", "webshop", "--results-per-page", str(options.results_per_page), "--separator", "newline"]
    sizes = {"max-batch": options.concurrency, "max-model-len": CONTEXT_TOKENS, "cache-bytes": CACHE_BYTES}
    sizes |= {"prefill-tokens": PREFILL_TOKENS, "adapters": options.run_directory / "adapters"}
    policy = ["serve", "--model", str(model), "--served-model-name", NAME, "--preload=false"]
    policy += [f"--{name}={size}" for name, size in sizes.items()]
    with (
        running_command(shop, free_port(), logs / "webshop.log") as shop_url,
        running_command(policy, free_port(), logs / "serve.log") as model_url,
    ):
        yield options.settings(shop_url=shop_url, model_url=model_url, base_model=NAME)

"""The parts of a loop that do not depend on its tasks: trainer, adapters, servers, scripted demonstrator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.protocols import EpisodeRunner, Reward, TrajectoryStorage
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher, WeightsPublisher, publisher_for
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.server_models import ServedEngines
from openhands_rl_plugin.training.loop.stages import Lessons, LoopParts

STATE = "state.json"
PROBE = "Instruction: [SEP] Find me soft cotton socks with color: blue [SEP] Back to Search [SEP] Buy Now"
"""Ordinary text: trainer and server must give the same logprobs for it before a new adapter is used."""


def probe_ids(model: Path) -> tuple[int, ...]:
    """The token ids of ``PROBE`` for the model in that directory. Raises ``TrainingError``."""
    from openhands_rl_plugin.training.verifier.prompt import load_tokenizer

    return tuple(load_tokenizer(str(model))(PROBE).input_ids)


@asynccontextmanager
async def open_parts(
    settings: RLSettings,
    *,
    model: Path,
    directory: Path,
    runner: EpisodeRunner,
    storage: TrajectoryStorage,
    reward: Reward,
    objective: Reward,
    demonstrator: EpisodeRunner | None = None,
    lessons: Lessons | None = None,
    evaluator: EpisodeRunner | None = None,
) -> AsyncIterator[LoopParts]:
    """The parts of a loop; it publishes to all servers of ``[rl.serving]``.

    ``model`` is the directory of the base model; ``demonstrator``, ``lessons`` and ``evaluator``: see ``LoopParts``.
    Raises ``ConfigError`` and ``TrainingError``.
    """
    from openhands_rl_plugin.training.engines import make_trainer
    from openhands_rl_plugin.training.verifier.prompt import load_tokenizer

    serving = settings.serving
    tokenizer: Any = load_tokenizer(str(model))
    adapters = AdapterStore(serving.adapters_directory.resolve())
    whole = settings.training.method == "full"
    kind = WeightsPublisher if whole else AdapterPublisher
    publisher = publisher_for(serving, adapters, keep=settings.loop.kept_versions, kind=kind)
    engines = ServedEngines(settings)
    try:
        yield LoopParts(
            runner=runner,
            demonstrator=demonstrator,
            storage=storage,
            reward=reward,
            objective=objective,
            adapters=adapters,
            publisher=publisher,
            tokenizer=tokenizer,
            make_trainer=lambda chosen, adapter: make_trainer(model, chosen, settings, serving.model, adapter),
            state_file=directory / STATE,
            evaluator=evaluator,
            **({"lessons": lessons} if lessons is not None else {}),
        )
    finally:
        await publisher.aclose()
        await engines.close()

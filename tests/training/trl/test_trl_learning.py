"""From one SFT model in the shop: the first update by TRL is the local trainer's, and rewards go up by either.

.ci/peers trl
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_samples import adapter_of
from safetensors.torch import load_file
from shopper_model import GOAL, INSTRUCTION, SHOP, write_shopper
from shopping_loop import MODEL, ShopWorld, make_plan

from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.types import SamplingParams, Task
from openhands_rl_plugin.environments.webshop import running_webshop
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.server import running_server
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.training.engines import make_trainer
from openhands_rl_plugin.training.loop.plan import LoopState
from openhands_rl_plugin.training.loop.sync import ClosedLoop
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer

pytest.importorskip("trl", reason="TRL is not installed: .ci/peers trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TASKS = tuple(
    Task(id=f"webshop-{letter}", environment="webshop", instruction=INSTRUCTION, data={"idx": GOAL}, split="train")
    for letter in "abcdefg"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShopWorld]:
    """The shop, and a model that buys the right thing in about half of its episodes."""
    model = write_shopper(tmp_path_factory.mktemp("shopper") / "model")
    server = ServerConfig(
        model=str(model), served_model_name=MODEL, port=0, dtype="float32", max_batch=8, max_adapters=16
    )
    with running_webshop(SHOP) as shop, running_server(server) as url:
        yield ShopWorld(shop, url, model)


async def learnt(world: ShopWorld, directory: Path, engine: str) -> LoopState:
    sampled = SamplingParams(temperature=1.0, max_tokens=40)
    shape = {"dtype": "float32", "lora_rank": 4, "lora_alpha": 8, "num_epochs": 1, "batch_size": 48}
    training = TrainingSettings(engine=engine, algorithm="grpo", learning_rate=2e-3, **shape)
    plan = make_plan(
        engine,
        demonstrations=(),
        training=TASKS[:6],
        held_out=TASKS[6:],
        iterations=3,
        tasks_per_iteration=6,
        samples_per_task=8,
        reinforcement=training,
        sampling=sampled,
        evaluation=sampled,
    )
    settings = RLSettings(training=training)
    parts = replace(
        world.parts(directory),
        objective=ReturnReward(),
        make_trainer=lambda chosen, adapter: make_trainer(world.model, chosen, settings, MODEL, adapter),
    )
    try:
        return await asyncio.wait_for(ClosedLoop(plan, parts).run(), 800)
    finally:
        await parts.publisher.aclose()
        await parts.storage.close()


async def test_the_first_update_is_the_local_one_and_rewards_go_up(world: ShopWorld, tmp_path: Path) -> None:
    fresh = LoraTrainer(world.model, TrainingSettings(dtype="float32", lora_rank=4, lora_alpha=8))
    before = adapter_of(fresh, tmp_path / "fresh")
    directions = []
    for engine in ("local", "trl"):
        state = await learnt(world, tmp_path / engine, engine)
        rewards = [record.metrics["reward"] for record in state.records if record.name.startswith("iteration-")]
        print(f"{engine}: {', '.join(f'{each:.3f}' for each in rewards)}")
        after = load_file(tmp_path / engine / "adapters" / f"{engine}-v000001" / "adapter_model.safetensors")
        directions.append(torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)]))
        assert rewards[-1] > rewards[0] + 0.1
    cosine = torch.nn.functional.cosine_similarity(*directions, dim=0).item()
    print(f"cosine of the first updates: {cosine:.5f}")
    assert cosine > 0.99

"""From one SFT adapter in the shop: the first update by each engine is the local trainer's, and rewards go up by all.

.ci/peers tinker
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines_shown import FIRST_UPDATE, RISE
from safetensors.torch import load_file
from shopper_model import BAD, GOAL, GOOD, INSTRUCTION, dialogue_of, encoded, write_shopper
from shopping_loop import MODEL, ShopWorld, make_plan
from small_shop import running_shop
from tinker_server import skyrl_server
from transformers import AutoTokenizer

from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.contrib.trainers.tinker import TinkerSettings
from openhands_rl_plugin.core.types import Adapter, Sample, SamplingParams, Task
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.training.engines import make_trainer
from openhands_rl_plugin.training.learn import create_version
from openhands_rl_plugin.training.loop.plan import LoopState
from openhands_rl_plugin.training.loop.stages import ClosedLoop
from openhands_rl_plugin.training.trainer.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TASKS = tuple(
    Task(id=f"webshop-{letter}", environment="webshop", instruction=INSTRUCTION, data={"idx": GOAL}, split="train")
    for letter in "abcdefg"
)
TrainerOf = Callable[[TrainingSettings, Adapter | None], Trainer]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShopWorld]:
    """The shop, and a model that buys the right thing in about half of its episodes."""
    model = write_shopper(tmp_path_factory.mktemp("shopper") / "model")
    server = ServerConfig(
        model=str(model), served_model_name=MODEL, port=0, dtype="float32", max_batch=8, max_adapters=24, adapters="/"
    )
    with running_shop() as shop, running_server(server) as url:
        yield ShopWorld(shop, url, model)


@contextmanager
def maker(world: ShopWorld, folder: Path) -> Iterator[TrainerOf]:
    """Makes trainers of the engine that the settings name; Tinker's is SkyRL's own server."""
    pytest.importorskip("tinker", reason="the client is not installed: .ci/peers tinker")
    with skyrl_server(world.model, folder) as url:
        yield _maker(world, TinkerSettings(base_url=url, model=str(world.model), reduction="sequence-mean"))


def _maker(world: ShopWorld, tinker: TinkerSettings) -> TrainerOf:
    def made(chosen: TrainingSettings, adapter: Adapter | None) -> Trainer:
        return make_trainer(world.model, chosen, RLSettings(training=chosen, tinker=tinker), MODEL, adapter)

    return made


def settings_of(engine: str, algorithm: str = "grpo") -> TrainingSettings:
    """With the alpha that the Tinker API has; its server chooses the number format."""
    shape = {"lora_rank": 4, "lora_alpha": 32, "num_epochs": 1, "batch_size": 48}
    given = {} if engine == "tinker" else {"dtype": "float32"}
    return TrainingSettings(engine=engine, algorithm=algorithm, learning_rate=5e-4, **shape, **given)


def fine_tuned(world: ShopWorld, trainer: Trainer, store: AdapterStore) -> Adapter:
    """A version after a step of SFT on both ways to shop."""
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    lessons = []
    for name, way in (("good", GOOD), ("bad", BAD)):
        ids, labels = encoded(tokenizer, dialogue_of(GOAL, way))
        mask = tuple(label >= 0 for label in labels)
        sample = Sample(trajectory_id=name, leaf=0, input_ids=tuple(ids), mask=mask, logprobs=(0.0,) * len(ids))
        lessons.append(sample)
    trainer.sft(lessons)
    adapter, _ = create_version(
        trainer, store, "sft", base_model=MODEL, parent=None, steps=1, metrics={}, probe_ids=range(2, 40)
    )
    assert adapter is not None
    return adapter


async def learnt(
    world: ShopWorld, directory: Path, training: TrainingSettings, make: TrainerOf, store: AdapterStore, start: Adapter
) -> LoopState:
    sampled = SamplingParams(temperature=1.0, max_tokens=40)
    plan = make_plan(
        training.engine,
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
    own = world.parts(directory)
    publisher = AdapterPublisher(world.server, store, keep=3)
    parts = replace(own, objective=ReturnReward(), make_trainer=make, adapters=store, publisher=publisher)
    LoopState(start=start.name).save(parts.state_file)
    try:
        return await asyncio.wait_for(ClosedLoop(plan, parts).run(), 800)
    finally:
        await parts.publisher.aclose()
        await parts.storage.close()


def test_the_first_update_is_the_local_one_and_rewards_go_up(world: ShopWorld, tmp_path: Path) -> None:
    """The first engine makes the SFT adapter, as the Tinker API takes none from elsewhere."""
    engines = ("tinker", "local")
    store, updates = AdapterStore(tmp_path / "adapters"), dict[str, torch.Tensor]()
    with maker(world, tmp_path / "server") as make:
        start = fine_tuned(world, make(settings_of(engines[0], "sft"), None), store)
        before = load_file(Path(start.path) / "adapter_model.safetensors")
        for engine in engines:
            state = asyncio.run(learnt(world, tmp_path / engine, settings_of(engine), make, store, start))
            rewards = [record.metrics["reward"] for record in state.records if record.name.startswith("iteration-")]
            print(f"{engine}: {', '.join(f'{each:.3f}' for each in rewards)}")
            after = load_file(Path(store.get(f"{engine}-v000001").path) / "adapter_model.safetensors")
            updates[engine] = torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])
            assert rewards[-1] > rewards[0] + RISE
    for engine in engines:
        cosine = torch.nn.functional.cosine_similarity(updates[engine], updates["local"], dim=0).item()
        print(f"{engine}: cosine of the first update with that of local {cosine:.5f}")
        assert cosine > FIRST_UPDATE

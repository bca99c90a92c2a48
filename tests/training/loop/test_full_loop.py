"""A loop that trains all weights: the server's are replaced after every iteration, and a killed run goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from shopping_loop import MODEL, ShopWorld, make_plan, write_talker
from small_shop import running_shop
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.training.loop.loop import LoopListener, LoopParts, TrainingLoop
from openhands_rl_plugin.training.loop.plan import LoopState
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = pytest.mark.contract


class KilledError(Exception):
    pass


class KillWhilePublishing(LoopListener):
    """Ends the process's part after the new weights are in use, before the stage is recorded."""

    def advanced(self, stage: str, activity: str, done: int, total: int) -> None:
        if stage == "iteration-001" and activity.startswith("published"):
            raise KilledError


def whole(parts: LoopParts, url: str, model: Path) -> LoopParts:
    return replace(
        parts,
        publisher=AdapterPublisher(url, parts.adapters),
        make_trainer=lambda settings, adapter: LocalTrainer(model, settings, adapter=adapter),
    )


async def finish(parts: LoopParts) -> None:
    await parts.runner.close()
    await parts.storage.close()
    await parts.publisher.aclose()


@pytest.mark.slow
async def test_all_weights_are_trained_published_and_resumed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = write_talker(tmp_path / "model")
    full = {"method": "full", "learning_rate": 1e-3, "entropy_coefficient": 0.01}
    plan = make_plan("policy", full, iterations=2, save_total_limit=2)
    plan = plan.model_copy(update={"warm_start": plan.warm_start.model_copy(update={"method": "full"})})
    config = ServerConfig(model=str(model), served_model_name=MODEL, port=0, dtype="float32", max_batch=8, adapters="/")
    with running_shop() as shop, running_server(config) as url:
        world = ShopWorld(shop, url, model)
        first = whole(world.parts(tmp_path / "run"), url, model)
        with pytest.raises(KilledError):
            await TrainingLoop(plan, first, listener=KillWhilePublishing()).run()
        await finish(first)
        parts = whole(world.parts(tmp_path / "run"), url, model)
        state = await TrainingLoop(plan, parts).run()
        (served,) = httpx.get(f"{url}/v1/models").json()["data"]
        iterations = [record for record in state.records if record.name.startswith("iteration")]
        assert served["id"] == state.adapter == iterations[-1].adapter
        assert {name for record in iterations if (name := record.adapter)} == {"policy-v000002", "policy-v000004"}
        assert all(record.metrics["drift"] < 0.05 for record in iterations), "what is trained is what was sampled"
        sampled = {
            trajectory.policy.served_name
            async for trajectory, _ in parts.storage.find(TrajectoryFilter(run_id="shopping/iteration-001"))
        }
        assert sampled == {"policy-v000002"}
        await finish(parts)
    assert LoopState.load(tmp_path / "run" / "state.json") == state
    kept = {each.name for each in parts.adapters.versions("policy")}
    assert kept == {"policy-v000002", "policy-v000004"}, "not the warm start's, nor that of the killed stage"
    assert parts.adapters.current("policy") == parts.adapters.get("policy-v000004")
    assert {each.name for each in (tmp_path / "run" / "trainer").iterdir()} == {"policy-v000002", "policy-v000004"}
    made = parts.adapters.get("policy-v000004")
    loaded = AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32)
    begun = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    moved = [not torch.equal(a, b) for a, b in zip(loaded.parameters(), begun.parameters(), strict=True)]
    assert all(moved) and (Path(made.path) / "tokenizer.json").exists()
    assert not (Path(made.path) / "trained.json").exists()

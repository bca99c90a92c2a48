"""Adapters of other families than Llama, as they are trained here, loaded and verified by a real vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from tiny_model import write_model

from evaluation.performance.serving.vllm_server import NAME, NoVLLMError, running_vllm, vllm_python
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher, ModelServer
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IDS = tuple((7 * at) % 100 + 2 for at in range(40))
# vLLM's kernels on a processor want larger heads and experts.
LARGER = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 64, "vocab_size": 512, "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("name", "experts"),
    [("phi3", False), ("olmo3", False), ("qwen2_moe", True), ("glm4_moe", True), ("nemotron_h", True)],
)
def test_vllm_serves_what_was_trained(name: str, experts: bool, tmp_path: Path) -> None:
    try:
        python = vllm_python()
    except NoVLLMError as error:
        pytest.skip(f"NOT TESTED AGAINST A REAL vLLM: {error}")
    family = next(each for each in FAMILIES if each.model_type == name)
    changes = {**family.changes, **LARGER}
    if "moe_intermediate_size" in changes:
        changes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    model = write_model(tmp_path / "model", model_type=name, **changes)
    settings = TrainingSettings(dtype="float32", lora_rank=8, target_modules=family.targets)
    trainer = LocalTrainer(model, settings)
    torch.manual_seed(0)
    for parameter in trainer.parameters.values():
        torch.nn.init.normal_(parameter, std=0.05)
    store = AdapterStore(tmp_path / "adapters")
    adapter = store.create("live", trainer.save_adapter, base_model=NAME)
    probe = trainer.probe(IDS)

    async def load(url: str) -> float | None:
        publisher, server = AdapterPublisher(url, store), ModelServer(url)
        try:
            # On a processor vLLM loads adapters of mixtures, which checks names and shapes, but cannot compute them.
            if experts:
                return await server.load(adapter)
            return (await publisher.publish(adapter, probe)).difference
        finally:
            await server.aclose()
            await publisher.aclose()

    options = ["--max-model-len", "256", "--dtype", "float32"]
    with running_vllm(python, model, log=tmp_path / "vllm.log", options=options) as url:
        difference = asyncio.run(load(url))
    assert difference is None or difference < 0.01

"""Publishing to a real vLLM: a process of its own on this machine's processor. Skipped where vLLM cannot be had.

``make test-vllm`` installs vLLM and runs these; see ``evaluation/performance/serving/vllm_server.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from families import FAMILIES
from tiny_model import write_model

from evaluation.performance.serving.vllm_server import NAME, NoVLLMError, running_vllm, vllm_python
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.types import Adapter, Sample
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher, ModelServer
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = [pytest.mark.contract, pytest.mark.slow]

CANARY = tuple(range(2, 40))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's attention on a processor has no kernel for heads that are smaller.
    return write_model(tmp_path_factory.mktemp("vllm") / "model", head_dim=32)


def python_with_vllm() -> Path:
    try:
        return vllm_python()
    except NoVLLMError as error:
        pytest.skip(f"NOT TESTED AGAINST A REAL vLLM: {error}")


@pytest.fixture(scope="session")
def vllm(model: Path) -> Iterator[str]:
    with running_vllm(
        python_with_vllm(), model, log=model.parent / "vllm.log", options=["--max-model-len", "256"]
    ) as url:
        yield url


@pytest.fixture
def store(vllm: str, tmp_path: Path) -> Iterator[AdapterStore]:
    yield AdapterStore(tmp_path / "adapters")
    for name in served(vllm) - {NAME}:
        httpx.post(f"{vllm}/v1/unload_lora_adapter", json={"lora_name": name}, trust_env=False).raise_for_status()


def trainer(model: Path, seed: int = 0) -> LocalTrainer:
    """A trainer whose adapter has left its starting point, where it would change nothing."""
    settings = TrainingSettings(learning_rate=0.05, num_epochs=2, dtype="float32", seed=seed)
    made = LocalTrainer(model, settings)
    ids = tuple((7 * at + seed) % 200 + 2 for at in range(24))
    made.sft([Sample(trajectory_id="t", leaf=0, input_ids=ids, mask=(False,) * 4 + (True,) * 20, logprobs=(0.0,) * 24)])
    return made


def stored(store: AdapterStore, made: LocalTrainer) -> Adapter:
    return store.create("live", made.save_adapter, base_model=NAME)


def served(url: str) -> set[str]:
    return {card["id"] for card in httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]}


def sampled(url: str, name: str) -> list[int]:
    """Greedy answer of the model ``name``."""
    body = {"model": name, "prompt": list(CANARY), "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status().json()
    assert answer["model"] == name
    return answer["choices"][0]["token_ids"]


async def test_versions_are_proven_used_and_unloaded(vllm: str, model: Path, store: AdapterStore) -> None:
    async with AdapterPublisher(f"{vllm}/v1", store) as publisher:
        for seed in range(3):
            made = trainer(model, seed)
            adapter = stored(store, made)
            report = await publisher.publish(adapter, made.probe(CANARY))
            assert report.difference is not None and report.difference < 1e-3
            assert sampled(vllm, await publisher.served_model(adapter))
        assert report.unloaded == ("live-v000001",)
        assert served(vllm) == {NAME, "live-v000002", "live-v000003"}
        assert store.current("live") == adapter
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            sampled(vllm, "live-v000001")


async def test_what_is_not_the_trainers_is_refused_and_the_old_one_serves_on(
    vllm: str, model: Path, store: AdapterStore
) -> None:
    async with AdapterPublisher(vllm, store) as publisher:
        old = trainer(model, 0)
        in_use = stored(store, old)
        await publisher.publish(in_use, old.probe(CANARY))
        before = sampled(vllm, in_use.name)
        with pytest.raises(
            PublishError, match=r"differ from the trainer's by [0-9.]+ nats on average, the bound is 0.01"
        ):
            await publisher.publish(stored(store, trainer(model, 1)), old.probe(CANARY))
        assert served(vllm) == {NAME, in_use.name} and store.current("live") == in_use
        assert sampled(vllm, in_use.name) == before


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "experts"),
    [("phi3", False), ("olmo3", False), ("qwen2_moe", True), ("glm4_moe", True), ("nemotron_h", True)],
)
async def test_adapters_of_other_families_are_served_as_they_were_trained(
    name: str, experts: bool, tmp_path: Path
) -> None:
    family = next(each for each in FAMILIES if each.model_type == name)
    # vLLM's kernels on a processor want larger heads and experts.
    changes = {**family.changes, "head_dim": 32, "hidden_size": 128, "intermediate_size": 64, "vocab_size": 512}
    if "moe_intermediate_size" in changes:
        changes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    model = write_model(tmp_path / "model", model_type=name, **changes, tie_word_embeddings=False)
    settings = TrainingSettings(dtype="float32", lora_rank=8, target_modules=family.targets)
    made, store = LocalTrainer(model, settings), AdapterStore(tmp_path / "adapters")
    for parameter in made.parameters.values():
        torch.nn.init.normal_(parameter, std=0.05)
    adapter, options = stored(store, made), ["--max-model-len", "256", "--dtype", "float32"]
    with running_vllm(python_with_vllm(), model, log=tmp_path / "vllm.log", options=options) as url:
        if experts:  # on a processor vLLM checks names and shapes of a mixture's adapter, but cannot compute it
            return await ModelServer(url).load(adapter)
        async with AdapterPublisher(url, store) as publisher:
            report = await publisher.publish(adapter, made.probe(CANARY))
    assert report.difference is not None and report.difference < 0.01

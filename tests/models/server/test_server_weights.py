"""All weights of the served model are replaced in place: by the server's route and by the publisher."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import httpx
import pytest
import torch
from tiny_model import write_adapter, write_model
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.types import Adapter, Probe
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import GeneratorConfig, ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.server.app import running_server

pytestmark = pytest.mark.contract

IDS = tuple(range(5, 40))


@pytest.fixture
def served(tiny_model: Path) -> Iterator[httpx.Client]:
    config = ServerConfig(model=str(tiny_model), served_model_name="tiny", port=0, adapters="/")
    with (
        Generator(GeneratorConfig(model=str(tiny_model), dtype="float32", threads=1, max_batch=4)) as generator,
        running_server(config, generator) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    return write_model(tmp_path_factory.mktemp("models") / "other", seed=5)


def replace(http: httpx.Client, name: str, path: Path) -> httpx.Response:
    return http.post("/update_weights_from_disk", json={"weight_version": name, "model_path": str(path)})


def said(http: httpx.Client, model: str, count: int = 12) -> list[int]:
    body = {"model": model, "prompt": list(IDS), "max_tokens": count, "temperature": 0, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def listed(http: httpx.Client) -> list[tuple[str, str]]:
    return [(card["id"], card["root"]) for card in http.get("/v1/models").json()["data"]]


@cache
def greedy(model: Path, count: int = 12) -> list[int]:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = loaded.generate(torch.tensor([IDS]), max_new_tokens=count, do_sample=False, pad_token_id=1)
    return made[0, len(IDS) :].tolist()


@cache
def logprobs(model: Path) -> tuple[float, ...]:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        whole = torch.log_softmax(loaded(torch.tensor([IDS])).logits[0, :-1].float(), -1)
    return tuple(whole.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist())


def test_new_weights_answer_under_their_name_and_what_was_asked_before_ends_on_the_old_ones(
    served: httpx.Client, tiny_model: Path, other: Path
) -> None:
    old = said(served, "tiny", 60)
    assert old[:12] == greedy(tiny_model) != greedy(other)
    with ThreadPoolExecutor(8) as pool:
        before = [pool.submit(said, served, "tiny", 60) for _ in range(6)]
        while not any(each.running() for each in before):
            pass
        replaced = pool.submit(replace, served, "policy-v000001", other)
        answers = [each.result() for each in before]
        assert replaced.result().json() == {"success": True, "message": "policy-v000001 is served."}
    assert answers == [old] * 6
    assert said(served, "policy-v000001") == greedy(other), "the prefix that the old weights cached is not used"
    assert listed(served) == [("policy-v000001", str(other))]
    gone = served.post("/v1/completions", json={"model": "tiny", "prompt": "one"})
    assert gone.status_code == 404 and "`tiny` does not exist" in gone.json()["error"]["message"]
    assert replace(served, "tiny", tiny_model).status_code == 200
    assert said(served, "tiny", 60) == old


def test_what_cannot_take_their_place_is_refused_and_the_old_weights_stay(
    served: httpx.Client, tiny_model: Path, other: Path, tmp_path: Path
) -> None:
    foreign = write_model(tmp_path / "foreign", vocab_size=600)
    damaged = shutil.copytree(other, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"nothing")
    cases = [
        ("policy-v000001", tmp_path / "nowhere", 404, "There is no model in"),
        ("policy-v000001", foreign, 400, "is another model: its vocabulary or context differs"),
        ("policy-v000001", damaged, 400, "The weights cannot be served"),
    ]
    for name, path, status, told in cases:
        answer = replace(served, name, path)
        assert answer.status_code == status and told in answer.json()["error"]["message"], answer.text
    adapter = write_adapter(tmp_path / "adapter", tiny_model, seed=1)
    served.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(adapter)})
    assert "unload them first" in replace(served, "policy-v000001", other).json()["error"]["message"]
    served.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
    assert listed(served) == [("tiny", str(tiny_model))] and said(served, "tiny") == greedy(tiny_model)


def version(store: AdapterStore, model: Path) -> Adapter:
    def write(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copytree(model, directory, dirs_exist_ok=True)

    return store.create("policy", write, base_model="tiny")


async def test_a_published_version_is_probed_and_a_wrong_one_gives_way_to_what_was_there(
    served: httpx.Client, tiny_model: Path, other: Path, tmp_path: Path
) -> None:
    store = AdapterStore(tmp_path / "adapters")
    good, wrong = version(store, other), version(store, write_model(tmp_path / "third", seed=9))
    async with AdapterPublisher(str(served.base_url), store) as publisher:
        await publisher.require_weights(("tiny", str(tiny_model)))
        probe = Probe(token_ids=IDS, logprobs=logprobs(other), max_difference=0.01)
        report = await publisher.publish(good, probe)
        assert report.difference is not None and report.difference < 0.01
        assert await publisher.served_model(good) == good.name and store.current("policy") == good
        with pytest.raises(PublishError, match="policy-v000002"):
            await publisher.publish(wrong, probe)
        assert (await asyncio.to_thread(listed, served)) == [(good.name, good.path)]
        assert store.current("policy") == good
        assert (await asyncio.to_thread(said, served, good.name)) == greedy(other)
        await publisher.require_weights(("tiny", str(tiny_model)))
        assert (await asyncio.to_thread(listed, served)) == [("tiny", str(tiny_model))]


async def test_weights_that_cannot_be_put_back_are_named(
    served: httpx.Client, tiny_model: Path, other: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = AdapterStore(tmp_path / "adapters")
    begun = shutil.copytree(tiny_model, tmp_path / "begun")
    assert (await asyncio.to_thread(replace, served, "begun", begun)).status_code == 200
    shutil.rmtree(begun)
    wrong = Probe(token_ids=IDS, logprobs=logprobs(tiny_model), max_difference=0.01)
    async with AdapterPublisher(str(served.base_url), store) as publisher:
        with pytest.raises(PublishError, match="policy-v000001 was refused"):
            await publisher.publish(version(store, other), wrong)
    assert "the former weights begun could not be put back (" in caplog.text and f"no model in {begun}" in caplog.text
    assert f"restart it (`openhands-rl serve --model {begun}`)" in caplog.text
    assert store.current("policy") is None, "no rollout uses it"


async def test_a_server_that_cannot_take_a_checkpoint_is_refused_before_anything_is_computed(
    served: httpx.Client, tiny_model: Path, other: Path, tmp_path: Path
) -> None:
    store = AdapterStore(tmp_path / "adapters")
    async with AdapterPublisher(str(served.base_url), store, server="vllm") as publisher:
        for refused in (publisher.require_weights(), publisher.publish(version(store, other))):
            with pytest.raises(
                PublishError, match=r'takes adapters only: .* method = "full" .* or set method = "lora"'
            ):
                await refused
    adapter = write_adapter(tmp_path / "held", tiny_model, seed=1)
    body = {"lora_name": "held", "lora_path": str(adapter)}
    assert (await asyncio.to_thread(served.post, "/v1/load_lora_adapter", json=body)).status_code == 200
    async with AdapterPublisher(str(served.base_url), store) as publisher:
        with pytest.raises(PublishError, match=r"holds adapters \(held\)"):
            await publisher.require_weights()

"""Publishing to servers of every kind: which kind is found, what is refused before it is sent, all or none."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_double import BASE, SGLangDouble, running_sglang
from tiny_model import write_adapter, write_model
from transformers import AutoModelForCausalLM

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.types import Adapter, Probe
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE, AdapterStore
from openhands_rl_plugin.models.engines.client import ServerError
from openhands_rl_plugin.models.generator.config import GeneratorConfig, ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sequence import DecodingParams
from openhands_rl_plugin.models.server.app import running_server

pytestmark = pytest.mark.contract

CANARY = tuple(range(2, 40))
UNLIKE = 1.0
"""Nats by which a canary is moved to be somebody else's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("publish-servers") / "model")


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Generator]:
    """What the trainer would compute: the same weights in a process that no server shares."""
    with Generator(GeneratorConfig(model=str(model), dtype="float32", threads=1, max_adapters=64)) as generator:
        yield generator


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "adapters")


@pytest.fixture(scope="module")
def embedded(model: Path) -> Iterator[str]:
    config = ServerConfig(model=str(model), served_model_name="base", port=0, dtype="float32", threads=1, adapters="/")
    with running_server(config) as url:
        yield url


@pytest.fixture
def replica(model: Path) -> Iterator[str]:
    """A second server, which holds no more than one adapter."""
    config = ServerConfig(
        model=str(model), served_model_name="base", port=0, dtype="float32", threads=1, max_adapters=1, adapters="/"
    )
    with running_server(config) as url:
        yield url


@pytest.fixture
def sglang(model: Path) -> Iterator[SGLangDouble]:
    with Generator(GeneratorConfig(model=str(model), dtype="float32", threads=1)) as generator:
        yield SGLangDouble(generator)


def stored(store: AdapterStore, model: Path, seed: int, name: str = "live") -> Adapter:
    def write(path: Path) -> None:
        write_adapter(path, model, seed=seed)

    return store.create(name, write, base_model="base")


def canary(reference: Generator, adapter: Adapter, moved: float = 0.0) -> Probe:
    name = f"{adapter.name}-{adapter.sha256[:12]}"
    if name not in {each.name for each in reference.adapters}:
        reference.load_adapter(name, Path(adapter.path))
    params = DecodingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompt = reference.generate(CANARY, params, adapter=name).prompt or ()
    logprobs = tuple(each.logprob + moved for each in prompt[1:] if each is not None)
    return Probe(token_ids=CANARY, logprobs=logprobs, max_difference=0.01)


def nearly(adapter: Adapter, path: Path) -> None:
    """The adapter as one more step of training may leave it."""
    shutil.copytree(adapter.path, path, dirs_exist_ok=True)
    tensors = load_file(Path(adapter.path) / WEIGHTS_FILE)
    save_file({name: tensor * 1.02 for name, tensor in tensors.items()}, path / WEIGHTS_FILE)


def mean_distance(some: Probe, other: Probe) -> float:
    return sum(abs(a - b) for a, b in zip(some.logprobs, other.logprobs, strict=True)) / len(some.logprobs)


def served(url: str) -> set[str]:
    return {card["id"] for card in httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]}


async def clear(url: str, store: AdapterStore) -> None:
    async with AdapterPublisher(url, store) as publisher:
        for name in served(url) - {"base"}:
            await publisher.retire(name)


async def test_sglang_is_found_proven_and_asked_by_its_own_names(
    sglang: SGLangDouble, model: Path, store: AdapterStore, reference: Generator
) -> None:
    with running_sglang(sglang) as url:
        async with AdapterPublisher(f"{url}/v1", store, keep=1) as publisher:
            for seed in range(2):
                adapter = stored(store, model, seed)
                report = await publisher.publish(adapter, canary(reference, adapter))
                assert report.difference is not None and report.difference < 1e-4
            assert report.unloaded == ("live-v000001",)
            assert store.served_by(adapter) == {url: report.difference}
            assert sglang.adapters == {"live-v000002": adapter.path}
            assert await publisher.served_model(adapter) == f"{BASE}:live-v000002"
            assert await publisher.loaded() == ((url, frozenset({"live-v000002"})),)
            await publisher.retire("live-v000001")
            shutil.rmtree(store.root)
            anew = [stored(store, model, seed) for seed in (2, 3)][-1]
            assert (anew.name, anew.path) == (adapter.name, adapter.path)
            report = await publisher.publish(anew, canary(reference, anew))
            assert report.difference is not None and report.difference < 1e-4, "other weights at the same place"
            loads = sglang.loads
            await publisher.publish(anew)
            assert sglang.loads == loads, "the same weights are not loaded again"


async def test_a_server_that_goes_on_answering_as_the_version_before_is_found_out(
    sglang: SGLangDouble, model: Path, store: AdapterStore, reference: Generator
) -> None:
    bound = 0.15  # of bfloat16: more than these versions differ by
    with running_sglang(sglang) as url:
        async with AdapterPublisher(url, store) as publisher:
            first = stored(store, model, 0)
            before = canary(reference, first)
            await publisher.publish(first, before.model_copy(update={"max_difference": bound}))
            second = store.create("live", lambda path: nearly(first, path), base_model="base")
            after = canary(reference, second)
            assert 0.001 < mean_distance(before, after) < bound
            sglang.answers_as = {second.name: first.name}
            async with AdapterPublisher(url, store) as now:
                with pytest.raises(PublishError, match=f"still answers as {first.name} did"):
                    await now.publish(second, after.model_copy(update={"max_difference": bound}))
                assert store.current("live") == first and set(sglang.adapters) == {first.name}
                sglang.answers_as = {}
                report = await now.publish(second, after.model_copy(update={"max_difference": bound}))
            assert report.difference is not None and report.difference < 1e-4
            assert store.current("live") == second


async def test_replicas_all_have_it_or_none(
    embedded: str, replica: str, model: Path, store: AdapterStore, reference: Generator
) -> None:
    await clear(embedded, store)
    async with AdapterPublisher([embedded, replica], store, keep=1) as publisher:
        first = stored(store, model, 0)
        await publisher.publish(first, canary(reference, first))
        assert served(embedded) == served(replica) == {"base", first.name}
        # The second server is full, so the first one gives up what it loaded.
        second = stored(store, model, 1)
        with pytest.raises(PublishError, match=r"1 of 2 servers failed: .*refused live-v000002.*limit"):
            await publisher.publish(second, canary(reference, second))
        assert served(embedded) == served(replica) == {"base", first.name}
        assert store.current("live") == first
        async with AdapterPublisher([embedded, "http://127.0.0.1:9"], store) as away:
            with pytest.raises(PublishError, match="1 of 2 servers failed: no model server answers") as raised:
                await away.publish(second)
        assert isinstance(raised.value.__cause__, ServerError) and store.current("live") == first
        # Again with room on both, but the weights are not the trainer's.
        await publisher.retire(first.name)
        with pytest.raises(PublishError, match="2 of 2 servers failed: live-v000002 was refused"):
            await publisher.publish(second, canary(reference, second, UNLIKE))
        assert served(embedded) == served(replica) == {"base"}


async def test_the_canary_stays_with_the_version(
    embedded: str, model: Path, store: AdapterStore, reference: Generator
) -> None:
    await clear(embedded, store)
    async with AdapterPublisher(embedded, store) as publisher:
        adapter = stored(store, model, 0)
        assert (await publisher.publish(adapter)).difference is None
        await publisher.publish(adapter, canary(reference, adapter))
        again = await publisher.publish(adapter)
        assert again.difference is not None and again.difference < 1e-4
        with pytest.raises(PublishError, match="live-v000001 was refused"):
            await publisher.publish(adapter, canary(reference, adapter, UNLIKE))
        assert served(embedded) == {"base", adapter.name} and store.current("live") == adapter
        # Another run's version of the same name is served: it is replaced, and proven.
        other = AdapterStore(store.root.parent / "other")
        same_name = stored(other, model, 7)
        assert same_name.name == adapter.name
    async with AdapterPublisher(embedded, other) as publisher:
        report = await publisher.publish(same_name, canary(reference, same_name))
        assert report.difference is not None and report.difference < 1e-4


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bias": "lora_only"}, "bias = 'lora_only' cannot be served"),
        ({"target_modules": ["q_proj", "lm_head"]}, "an adapter of lm_head cannot be verified"),
        ({"r": "many"}, "adapter_config.json cannot be read"),
    ],
)
async def test_what_no_server_serves_is_not_even_sent(
    model: Path, store: AdapterStore, change: dict[str, object], problem: str
) -> None:
    adapter = stored(store, model, 0)
    config = Path(adapter.path) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    async with AdapterPublisher("http://127.0.0.1:9", store) as publisher:
        with pytest.raises(PublishError, match=problem):
            await publisher.publish(adapter)


def test_the_command_lists_publishes_and_goes_back(
    embedded: str, model: Path, store: AdapterStore, reference: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(2):
        adapter = stored(store, model, seed, name="policy")
        store.keep_probe(adapter, canary(reference, adapter))
    where, served = ["--adapters", str(store.root)], ["--set", f"serving.base_url={embedded}"]
    assert cli.main(["adapters", "publish", *where, "--version", "1"]) == 1
    assert "set [rl.serving] base_url" in capsys.readouterr().err
    assert cli.main(["adapters", "publish", *where, *served]) == 0
    printed = capsys.readouterr().out
    assert "policy-v000002 is in use" in printed and "probe within 0.0000 nats" in printed
    assert cli.main(["adapters", "rollback", *where, *served]) == 0
    assert "policy-v000001 is in use" in capsys.readouterr().out
    assert store.current("policy") == store.get("policy-v000001")
    assert cli.main(["adapters", "list", *where]) == 0
    assert re.search(r"policy-v000001 .* yes +yes +\n", capsys.readouterr().out)
    assert cli.main(["adapters", "rollback", *where, *served]) == 1
    assert "no earlier one to roll back to" in capsys.readouterr().err
    assert cli.main(["adapters", "publish", *where, "--version", "9", *served]) == 1
    assert "available: 1, 2" in capsys.readouterr().err
    merged = store.root.parent / "merged"
    assert cli.main(["adapters", "export", *where, "--version", "2", "--merged", str(merged)]) == 0
    assert "policy-v000002 is in" in capsys.readouterr().out
    logits = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(torch.tensor([CANARY])).logits[0, :-1]
    found = torch.log_softmax(logits, -1).gather(1, torch.tensor(CANARY[1:])[:, None])[:, 0]
    assert found.tolist() == pytest.approx(canary(reference, store.get("policy-v000002")).logprobs, abs=1e-3)

"""Whether a server samples from the trainer's distribution, by what it samples: simulated servers, and a real one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_double import SGLangDouble, running_sglang
from tiny_model import write_model
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.types import ExpectedShare, Probe
from openhands_rl_plugin.models.adapters.frequency_check import SAMPLES, check_sampled_shares
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import GeneratorConfig, ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sampling import DecodingParams
from openhands_rl_plugin.models.server.prompts import PromptRenderer
from openhands_rl_plugin.models.server.server import running_server
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
from openhands_rl_plugin.training.trainer.probe_shares import expected_shares

VOCABULARY, LENGTH, MARGIN = 600, 40, 0.15


class Text:
    """A model of a text like those that are probed: sharp next-token distributions over logits of up to 25, in which
    what was said before is likely again."""

    sharded = False

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(VOCABULARY, (LENGTH,), generator=draw).tolist()
        ranks = torch.arange(1, VOCABULARY + 1).float()
        rows = []
        for position in range(1, LENGTH):
            top = 18 + 7 * torch.rand(1, generator=draw)
            slope = 1.5 + 3 * torch.rand(1, generator=draw)
            row = (top - slope * ranks.log())[torch.randperm(VOCABULARY, generator=draw)]
            known = self.ids[torch.randint(position, (1,), generator=draw)]
            row[known] = top + torch.rand(1, generator=draw)
            rows.append(row)
        self.logits = torch.stack(rows)

    def next_token_logits(self, _: tuple[int, ...]) -> Iterator[Tensor]:
        yield from self.logits.split(20)

    def shares(self) -> tuple[ExpectedShare, ...]:
        return expected_shares(self, self.ids)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Server:
    """A server with sampling parameters of its own, applied in vLLM's order, and rounding (standard deviation in
    nats)."""

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    rounding: float = 0.0

    def draw(self, text: Text, share: ExpectedShare, publications: int, draw: torch.Generator) -> list[list[int]]:
        """The ids of each publication, to servers that round differently."""
        noise = torch.randn(publications, VOCABULARY, generator=draw)
        logits = text.logits[share.position - 1] + self.rounding * noise
        said = sorted(set(text.ids[: share.position]))
        own = logits[:, said]
        logits[:, said] = torch.where(own > 0, own / self.repetition_penalty, own * self.repetition_penalty)
        scaled = logits / share.temperature
        if self.top_k:
            scaled[scaled < scaled.topk(self.top_k).values[:, -1:]] = -math.inf
        if self.min_p:
            scaled[scaled < scaled.amax(-1, keepdim=True) + math.log(self.min_p)] = -math.inf
        chosen = torch.multinomial(scaled.softmax(-1), SAMPLES[share.kind], replacement=True, generator=draw)
        return chosen.tolist()


def refusal(shares: tuple[ExpectedShare, ...], drawn: tuple[list[int], ...]) -> str:
    try:
        check_sampled_shares("new", shares, drawn, MARGIN)
    except PublishError as error:
        return str(error)
    return ""


def refusals(server: Server, *, texts: int, each: int) -> list[str]:
    found = []
    for seed in range(texts):
        text, draw = Text(seed), torch.Generator().manual_seed(seed)
        shares = text.shares()
        assert {share.kind for share in shares} == {"likeliest", "repeated"} and len(shares) == 8
        drawn = zip(*(server.draw(text, share, each, draw) for share in shares), strict=True)
        found += [refusal(shares, one) for one in drawn]
    return found


def test_an_honest_server_is_never_refused() -> None:
    """1,000 publications to a server that rounds logits as bfloat16 does."""
    assert sum(map(bool, refusals(Server(rounding=0.12), texts=20, each=50))) == 0


@pytest.mark.parametrize(
    ("server", "cause"),
    [
        (Server(top_k=20, rounding=0.05), "a top_k, top_p or min_p of its own"),
        (Server(top_k=64, rounding=0.05), "a top_k, top_p or min_p of its own"),
        (Server(min_p=0.05, rounding=0.05), "a top_k, top_p or min_p of its own"),
        (Server(repetition_penalty=1.05, rounding=0.05), "a repetition_penalty of its own"),
        (Server(repetition_penalty=1.3), "a repetition_penalty of its own"),
        (Server(top_k=20, repetition_penalty=1.05), "of its own"),
    ],
)
def test_a_server_with_settings_of_its_own_is_refused(server: Server, cause: str) -> None:
    found = refusals(server, texts=10, each=5)
    assert sum(cause in each for each in found) >= 0.98 * len(found)
    assert all("--generation-config vllm" in each for each in found if each)


def test_the_cost_is_bounded() -> None:
    assert sum(SAMPLES[share.kind] for share in Text(0).shares()) == 1088


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("frequencies") / "model")


@pytest.fixture(scope="module")
def trainer(model: Path) -> LoraTrainer:
    trainer = LoraTrainer(model, TrainingSettings(dtype="float32", lora_rank=4))
    torch.manual_seed(0)
    for parameter in trainer.parameters.values():
        torch.nn.init.normal_(parameter, std=0.05)
    return trainer


def published(trainer: LoraTrainer, path: Path) -> tuple[AdapterStore, Any, Probe]:
    store = AdapterStore(path)
    adapter = store.create("live", trainer.save_adapter, base_model="base")
    probe = trainer.probe(range(2, 40), shares=True)
    # Fewer of them, to be quick on a processor.
    return store, adapter, probe.model_copy(update={"shares": probe.shares[:5]})


async def test_a_real_server_with_a_hidden_top_k_does_not_come_into_use(
    model: Path, trainer: LoraTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's protocol, spoken by the embedded server, which says that it is vLLM; then with a default of its own."""
    store, adapter, probe = published(trainer, tmp_path / "adapters")
    plain = PromptRenderer.params

    def hidden(*args: Any, **kwargs: Any) -> DecodingParams:
        found = plain(*args, **kwargs)
        return DecodingParams(**{**vars(found), "top_k": 20})

    config = ServerConfig(model=str(model), served_model_name="base", port=0, dtype="float32", threads=1)
    with running_server(config) as url:
        async with AdapterPublisher(url, store, server="vllm") as publisher:
            with monkeypatch.context() as patched:
                patched.setattr(PromptRenderer, "params", hidden)
                with pytest.raises(PublishError, match=r"100% of 64 tokens .* a top_k, top_p or min_p of its own"):
                    await publisher.publish(adapter, probe)
            assert store.current("live") is None
            await publisher.publish(adapter, probe)
        assert store.current("live") == adapter
        # The embedded server by its own name has no defaults, and is not asked.
        monkeypatch.setattr(PromptRenderer, "params", hidden)
        async with AdapterPublisher(url, store) as publisher:
            await publisher.publish(adapter)


async def test_sglang_is_asked_in_its_own_protocol(model: Path, trainer: LoraTrainer, tmp_path: Path) -> None:
    store, adapter, probe = published(trainer, tmp_path / "adapters")
    probe = probe.model_copy(update={"shares": probe.shares[:4]})
    with Generator(GeneratorConfig(model=str(model), dtype="float32", threads=1)) as generator:
        double = SGLangDouble(generator)
        with running_sglang(double) as url:
            async with AdapterPublisher(url, store) as publisher:
                await publisher.publish(adapter, probe)
                double.top_k = 20
                with pytest.raises(PublishError, match="--sampling-defaults openai"):
                    await publisher.publish(adapter, probe)

"""TRL's real ``AsyncGRPOTrainer`` on episodes of the shop, its adapter published to our server; on a processor.

.ci/peers trl
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from counted_reward import CountedReward
from shopper_model import SHOP
from shopping_loop import MODEL, write_talker
from torch import Tensor

from openhands_rl_plugin import FileTrajectoryStorage, PlayOptions
from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.contrib.trainers.trl_worker import TRLRolloutWorker
from openhands_rl_plugin.contrib.webshop import running_webshop
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, RLError, TrainingError
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.server import running_server
from openhands_rl_plugin.training.trl.published import TRLAdapterPublisher

pytest.importorskip("trl", reason="TRL is not installed: .ci/peers trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TASKS = ("webshop-1", "webshop-2")
CONFIG = f"""
[rl]
env_name = "webshop"
env_server_base = "SHOP"
react_format = false
[rl.reward]
name = "{CountedReward.__module__}:{CountedReward.__name__}"
"""


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talker(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def served(talker: Path) -> Iterator[tuple[str, str]]:
    config = ServerConfig(
        model=str(talker), served_model_name=MODEL, port=0, dtype="float32", max_batch=8, max_adapters=8, threads=1
    )
    with running_webshop(SHOP) as shop, running_server(config) as server:
        yield shop, f"{server}/v1"


@pytest.fixture
def options(served: tuple[str, str], tmp_path: Path) -> PlayOptions:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.replace("SHOP", served[0]))
    bounds = {"max_turns": 2, "max_prompt_length": 3500, "max_response_length": 8, "native_tool_calling": False}
    return PlayOptions(config=config, base_url=served[1], model=MODEL, base_model=MODEL, **bounds)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """FlashAttention-3's causal ``flash_attn_varlen_func``, which is for CUDA only; [tokens, heads, width]."""
    found = []
    for at in range(len(starts_q) - 1):
        q = query[starts_q[at] : starts_q[at + 1]].transpose(0, 1)
        k, v = (each[starts_k[at] : starts_k[at + 1]].transpose(0, 1) for each in (key, value))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        found.append(
            torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(found)


@pytest.fixture
def on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What TRL asks a GPU for: the kernel of its attention, and its peak speed."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


async def test_it_trains_on_our_episodes_and_publishes_to_our_server(
    on_a_processor: None, served: tuple[str, str], talker: Path, options: PlayOptions, tmp_path: Path
) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    storage = FileTrajectoryStorage(tmp_path / "trajectories", durable=False)
    serving = ServingSettings(
        base_url=served[1], model=MODEL, adapter="asked", adapters_path=str(tmp_path / "adapters"), max_adapters=6
    )
    publisher = TRLAdapterPublisher(serving)
    worker = TRLRolloutWorker(
        TASKS, options, storage=storage, group_size=4, groups=1, queue_rows=8, served=publisher.served
    )
    trainer = AsyncGRPOTrainer(
        model=str(talker),
        args=AsyncGRPOConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=4,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            learning_rate=1e-2,
            token_budget=0,
            max_staleness=2,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            model_init_kwargs={"dtype": torch.float32},
        ),
        train_dataset=Dataset.from_dict({"prompt": list(TASKS)}),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        rollout_worker=worker,
        weight_transfer=publisher,
    )
    publisher.attach(trainer)
    trainer.train()

    versions = AdapterStore(tmp_path / "adapters").versions("asked")
    assert [each.version for each in versions] == [1, 2, 3, 4, 5] and [each.step for each in versions] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert len({each.sha256 for each in versions}) == 5, "every step moved the weights"
    steps = [each for each in trainer.state.log_history if "loss" in each]
    assert len(steps) == 4 and all(each["grad_norm"] > 0 and 0 < each["reward"] < 1 for each in steps)
    assert steps[0]["ratio"] == pytest.approx(1, abs=1e-3), "the first policy is the one that sampled"
    played = [trajectory async for trajectory, _ in storage.find()]
    assert {each.policy.adapter for each in played} == {"asked"}, "each began on a published version"
    assert len({each.policy.version for each in played}) > 1


def test_what_cannot_go_on_is_raised_in_the_trainer(options: PlayOptions, tmp_path: Path) -> None:
    storage = FileTrajectoryStorage(tmp_path / "trajectories", durable=False)
    nobody = options.model_copy(update={"model": "nobody"})
    worker = TRLRolloutWorker(TASKS, nobody, storage=storage, group_size=2, groups=1)
    worker.start()
    try:
        failure = waited_for(worker)
    finally:
        worker.stop()
        worker.stop()
    assert "nobody" in str(failure) and len(str(failure).splitlines()) == 1


def test_a_server_that_is_away_is_waited_for_a_while(options: PlayOptions, tmp_path: Path) -> None:
    storage = FileTrajectoryStorage(tmp_path / "trajectories", durable=False)
    away = options.model_copy(update={"base_url": "http://127.0.0.1:9/v1"})
    worker = TRLRolloutWorker(TASKS, away, storage=storage, group_size=2, groups=1)
    worker.start()
    try:
        failure = waited_for(worker)
    finally:
        worker.stop()
    assert isinstance(failure, InfrastructureError) and "127.0.0.1:9" in str(failure)


def test_a_search_is_refused(options: PlayOptions, tmp_path: Path) -> None:
    storage = FileTrajectoryStorage(tmp_path / "trajectories", durable=False)
    searching = options.model_copy(update={"strategy": "BestOfN", "max_turns": 1})
    worker = TRLRolloutWorker(TASKS, searching, storage=storage, group_size=2, groups=1)
    worker.start()
    try:
        failure = waited_for(worker)
    finally:
        worker.stop()
    assert isinstance(failure, TrainingError) and "no samples of the policy cannot be reinforced" in str(failure)


def waited_for(worker: TRLRolloutWorker) -> RLError:
    """What ends the rollouts, as the trainer hears of it."""
    while True:
        try:
            worker.check_health(60.0)
        except RLError as error:
            return error
        time.sleep(0.1)


def test_what_is_not_set_up_is_said(options: PlayOptions) -> None:
    with pytest.raises(ConfigError, match="a rollout worker needs a task"):
        TRLRolloutWorker((), options)
    with pytest.raises(ConfigError, match=r"temperature is 0\.7 and that of the trainer 1:"):
        TRLRolloutWorker(TASKS, options.model_copy(update={"temperature": 0.7}))
    with pytest.raises(ConfigError, match="call attach"):
        TRLAdapterPublisher(ServingSettings(base_url=options.base_url, model=MODEL)).init_weight_transfer()
    with pytest.raises(ConfigError, match="give the trainer a peft_config"):
        TRLAdapterPublisher(ServingSettings(base_url=options.base_url, model=MODEL)).attach(SimpleNamespace(model=None))

"""OpenHands as an agent loop of the installed verl, over a server manager with verl's interface and a real model.

``.ci/peers verl`` puts verl beside this package; verl's own servers need a GPU.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_model import write_model

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sequence import DecodingParams

CONTEXT = 8192


class Servers:
    """What an agent loop has of verl's servers: token ids in, ``TokenOutput`` out."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.asked: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []
        self.fails = 0
        self.blind = False

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked.append((request_id, tuple(prompt_ids), sampling_params))
        if self.fails:
            self.fails -= 1
            return SimpleNamespace(token_ids=[], log_probs=[], stop_reason="aborted")
        params = DecodingParams(temperature=sampling_params["temperature"], max_tokens=sampling_params["max_tokens"])
        made = await asyncio.wrap_future(self.generator.submit(tuple(prompt_ids), params))
        return SimpleNamespace(
            token_ids=list(made.token_ids),
            log_probs=None if self.blind else list(made.logprobs),
            stop_reason="completed",
        )


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    path = write_model(tmp_path / "model", max_position_embeddings=CONTEXT)
    with Generator(ServerConfig(model=str(path))) as made:
        yield Servers(made)


LOOP = """
- name: openhands
  _target_: openhands_rl_plugin.contrib.trainers.verl.OpenHandsAgentLoop
  options: {max_turns: 2, native_tool_calling: false, config: CONFIG, max_response_length: 24}
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: .ci/peers verl")
@pytest.mark.timeout(600)
class TestRealAgentLoop:
    @pytest.fixture
    def rolled_out(self, servers: Servers, tmp_path: Path) -> Any:
        """Runs an agent loop as verl's worker makes one, from the registered configuration."""
        import hydra
        from omegaconf import OmegaConf
        from verl.experimental.agent_loop.agent_loop import DictConfigWrap
        from verl.utils.dataset.rl_dataset import RLHFDataset

        config = tmp_path / "config.toml"
        config.write_text("[rl]\nmax_workers = 2\n", encoding="utf-8")
        (own,) = OmegaConf.create(LOOP.replace("CONFIG", str(config)))

        async def run(
            row: dict[str, Any], *, temperature: float = 1.0, use_v1: bool = True, top_p: float = 1.0, **changes: Any
        ) -> Any:
            rollout = {"prompt_length": 6144, "response_length": 2048, "max_model_len": CONTEXT, "top_p": top_p}
            trainer = {"trainer": {"use_v1": use_v1}, "actor_rollout_ref": {"rollout": rollout}, "data": {}}
            loop = hydra.utils.instantiate(
                OmegaConf.merge(own, changes),
                trainer_config=DictConfigWrap(config=OmegaConf.create(trainer)),
                server_manager=servers,
                tokenizer=servers.generator.tokenizer,
                processor=None,
                hf_model_type="llama",
                dataset_cls=RLHFDataset,
                data_config=DictConfigWrap(OmegaConf.create({})),
                tools=None,
            )
            return await loop.run({"temperature": temperature, "top_p": 1.0, "top_k": -1, "logprobs": False}, **row)

        return run

    async def test_an_episode_is_what_verl_trains_on(self, rolled_out: Any, servers: Servers):
        from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

        rows = await asyncio.gather(*(rolled_out({"task": "webshop-3", "uid": "a"}) for _ in range(4)))
        for row in (each for episode in rows for each in episode):
            assert isinstance(row, AgentLoopOutput) and row.reward_score == 0.0
            assert len(row.response_ids) == len(row.response_mask) == len(row.response_logprobs)
            assert row.extra_fields["reward_extra_info"] == {}
        names = {name for name, _, _ in servers.asked}
        assert len(names) == 4, "the turns of an episode go to one server"
        assert all(asked["logprobs"] is True and asked["top_p"] == 1.0 for _, _, asked in servers.asked)
        # What a random model says is not always text, so that its turns may be segments of their own.
        assert all(sum(sum(row.response_mask) for row in episode) == 2 * 24 for episode in rows)
        prompts = [ids for _, ids, _ in servers.asked]
        assert all(tuple(row.prompt_ids) in prompts for episode in rows for row in episode)

    @pytest.mark.parametrize(
        ("row", "changes", "expected"),
        [
            ({}, {}, "needs a column 'task'"),
            ({"task": "webshop-3"}, {"use_v1": False}, "set trainer.use_v1=True"),
            ({"task": "webshop-3"}, {"top_p": 0.9}, "rollout.top_p=0.9: logprobs are then not the policy's"),
            ({"task": "webshop-3"}, {"options": {"strategy": "BestOfN"}}, "no samples of the policy"),
        ],
    )
    async def test_what_would_be_trained_wrongly_is_refused(
        self, rolled_out: Any, row: dict[str, Any], changes: dict[str, Any], expected: str
    ):
        with pytest.raises(Exception, match=expected) as refused:
            await rolled_out(row, **changes)
        assert isinstance(refused.value.__cause__ or refused.value, ConfigError)

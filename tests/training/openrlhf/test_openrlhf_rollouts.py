"""The agent for OpenRLHF, against the protocol that OpenRLHF 0.11 documents; its own classes: test_openrlhf_bases."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from openrlhf_world import GRID, BrokenGrid, ScriptedVllm, VllmParams, write_config
from tiny_model import write_tokenizer

from openhands_rl_plugin.core.errors import ConfigError, RLError, TrainingError
from openhands_rl_plugin.training.openrlhf.rollouts import Rollouts

pytestmark = pytest.mark.contract

WALK = ["right", "right", "down", "down"]
TASK = json.dumps({"id": "grid-1", "instruction": "Be quick.", "data": {"goal": [2, 2]}})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def rollouts(folder: Path, *lines: str, environment: str = GRID) -> Rollouts:
    config = write_config(folder / "config.toml", *lines, environment=environment)
    return Rollouts({"OPENHANDS_RL_CONFIG": str(config)})


async def play(source: Rollouts, vllm: ScriptedVllm, tokenizer: Any, **options: Any) -> Any:
    given = {"prompt": TASK, "label": "", "sampling_params": VllmParams(), "max_length": 2000, **options}
    return await source.execute(hf_tokenizer=tokenizer, llm_engine=vllm, **given)


async def test_ids_go_in_and_come_out_as_they_were_sampled(tmp_path: Path, tokenizer: Any) -> None:
    vllm = ScriptedVllm(tokenizer, WALK)
    params = VllmParams(max_tokens=300)
    before = copy.deepcopy(params)
    found = await play(rollouts(tmp_path), vllm, tokenizer, sampling_params=params)
    assert params == before, "OpenRLHF's own parameters were changed"
    assert found["reward"] == found["scores"] == 1.0 and found["truncated"] is False
    assert found["extra_logs"] == {"agent_turns": 4.0, "agent_cut_short": 0.0}
    ids, ranges = found["observation_tokens"], found["action_ranges"]
    assert [ids[:start] for start, _ in ranges] == vllm.prompts
    sampled_ids = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in WALK]
    assert [ids[start:end] for start, end in ranges] == sampled_ids and ranges[-1][1] == len(ids)
    sampled = {at for start, end in ranges for at in range(start, end)}
    logprobs = found["rollout_log_probs"]
    assert len(logprobs) == len(ids)
    assert all((value != 0.0) == (at in sampled) for at, value in enumerate(logprobs))
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nWalk to (2, 2)") and "Be quick." in text
    assert text.count("<|im_start|>assistant\n") == 4 and "<|im_end|><|im_end|>" not in text


async def test_a_limit_of_turns_or_tokens_ends_the_episode_and_is_flagged(tmp_path: Path, tokenizer: Any) -> None:
    found = await play(
        rollouts(tmp_path, "max_turns = 5"), ScriptedVllm(tokenizer, ["no move at all", "up"]), tokenizer
    )
    assert len(found["action_ranges"]) == 5 and found["truncated"] is True and found["reward"] == 0.0
    assert found["extra_logs"] == {"agent_turns": 5.0, "agent_cut_short": 1.0}
    vllm, length = ScriptedVllm(tokenizer, ["up"]), len(found["observation_tokens"])
    found = await play(rollouts(tmp_path, "max_turns = 50"), vllm, tokenizer, max_length=length)
    assert found["truncated"] is True and found["reward"] == 0.0 and len(found["observation_tokens"]) <= length
    assert max(params.max_tokens or 0 for params in vllm.asked) <= 512, "[rl] max_response_length bounds an answer"


async def test_a_cut_answer_gets_the_end_of_its_turn_from_us(tmp_path: Path, tokenizer: Any) -> None:
    vllm = ScriptedVllm(tokenizer, ["right~", "right", "down", "down~"])
    found = await play(rollouts(tmp_path), vllm, tokenizer)
    text = tokenizer.decode(found["observation_tokens"])
    assert "assistant\nright<|im_end|>\n<|im_start|>user\nYou are at (1, 0).<|im_end|>" in text
    start, end = found["action_ranges"][0]
    assert tokenizer.decode(found["observation_tokens"][start:end]) == "right"
    assert found["reward"] == 1.0 and found["truncated"] is True, "the last answer was cut"


async def test_failed_episodes_are_replaced_and_never_worth_nothing(tmp_path: Path, tokenizer: Any) -> None:
    broken = "openrlhf_world:BrokenGrid"
    BrokenGrid.broken = 0
    source = rollouts(tmp_path, "max_turns = 1", environment=broken)
    found = await play(source, ScriptedVllm(tokenizer, ["down"]), tokenizer)
    assert found["extra_logs"]["agent_turns"] == 1.0 and BrokenGrid.broken == 2
    BrokenGrid.broken = 0
    # Every other step fails, and each of these episodes needs two.
    with pytest.raises(TrainingError, match=r"task grid-1 failed 3 times, .*the world went away"):
        await play(rollouts(tmp_path, environment=broken), ScriptedVllm(tokenizer, ["up"]), tokenizer)


async def test_rows_of_the_data_set(tmp_path: Path, tokenizer: Any) -> None:
    config = rollouts(tmp_path)
    plain = config.task("walk", "42")
    assert plain.instruction == "walk" and plain.data == {"label": "42"} and plain.environment == GRID
    assert config.task("walk", "").id == plain.id != config.task("run", "").id
    assert config.task(TASK, None).data == {"goal": [2, 2]}
    assert config.task("{not json", "").instruction == "{not json"
    with pytest.raises(ConfigError, match=r"is not a task: Task\.goal"):
        config.task('{"goal": [2, 2]}', "")


async def test_what_cannot_be_rolled_out_is_one_line(tmp_path: Path, tokenizer: Any) -> None:
    for options, expected in (
        ({"prompt": "<|im_start|>user\nwalk<|im_end|>\n"}, "drop --data.apply_chat_template"),
        ({"max_length": 30}, "task grid-1: its first prompt leaves no room"),
    ):
        with pytest.raises(ConfigError, match=expected):
            await play(rollouts(tmp_path), ScriptedVllm(tokenizer, WALK), tokenizer, **options)
    with pytest.raises(RLError, match="OPENHANDS_RL_CONFIG is not set: export"):
        Rollouts({})

"""The in-process engine on a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.types import Message, SamplingParams
from openhands_rl_plugin.models.engines.transformers import TransformersEngine

ASK = (Message(role="system", content="click"), Message(role="user", content="the quick brown fox"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def loaded(path: Path) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


async def test_tokens_and_logprobs_are_the_model_s_own(loaded: Any, path: Path):
    model, tokenizer = loaded
    engine = TransformersEngine(path, dtype="float32")
    sampling = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=8, seed=1)
    (completion,) = await engine.complete(ASK, sampling=sampling)
    await engine.aclose()
    tokens, wires = completion.tokens, [message.model_dump(include={"role", "content"}) for message in ASK]
    rendered = tokenizer.apply_chat_template(wires, tokenize=False, add_generation_prompt=True)
    assert tokens is not None
    assert tokens.prompt_ids == tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    assert completion.message.content == tokenizer.decode(tokens.sampled_ids, skip_special_tokens=True)
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens.prompt_ids + tokens.sampled_ids])).logits[0].float().log_softmax(-1)
    at = len(tokens.prompt_ids)
    expected = [float(logprobs[at + step - 1, token]) for step, token in enumerate(tokens.sampled_ids)]
    assert [*tokens.logprobs] == pytest.approx(expected, abs=1e-4)


async def test_what_cannot_work_is_refused(tmp_path: Path):
    with pytest.raises(RLError, match="cannot load the model"):
        TransformersEngine(tmp_path / "nothing here")

"""The in-process engine on a tiny random model, from a path and as a model object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from openhands_rl_plugin.core.errors import ConfigError, ModelError, RLError
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, Message, Observation, SamplingParams, Tokens
from openhands_rl_plugin.models.engines.transformers import TransformersEngine

ASK = (Message(role="system", content="click"), Message(role="user", content="the quick brown fox"))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(params=["path", "object"])
async def engine(
    request: pytest.FixtureRequest, path: Path, model: Any, tokenizer: Any
) -> AsyncIterator[TransformersEngine]:
    given = (path,) if request.param == "path" else (model, tokenizer)
    running = TransformersEngine(*given, dtype="float32")
    yield running
    await running.aclose()


def tokens_of(completion: Completion) -> Tokens:
    assert completion.tokens is not None
    return completion.tokens


async def test_tokens_and_logprobs_are_the_model_s_own(engine: TransformersEngine, model: Any, tokenizer: Any):
    completion = (
        await engine.complete(ASK, sampling=SamplingParams(temperature=0.7, top_p=0.9, max_tokens=8, seed=1))
    )[0]
    tokens = tokens_of(completion)
    rendered = tokenizer.apply_chat_template(
        [message.model_dump(include={"role", "content"}) for message in ASK], tokenize=False, add_generation_prompt=True
    )
    assert tokens.prompt_ids == tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    assert completion.message.content == tokenizer.decode(tokens.sampled_ids, skip_special_tokens=True)
    ids = torch.tensor([tokens.prompt_ids + tokens.sampled_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0].float().log_softmax(-1)
    at = len(tokens.prompt_ids)
    expected = [float(logprobs[at + step - 1, token]) for step, token in enumerate(tokens.sampled_ids)]
    assert [*tokens.logprobs] == pytest.approx(expected, abs=1e-4)
    assert completion.usage.completion_tokens == len(tokens.sampled_ids)


async def test_turns_extend_in_the_tree(engine: TransformersEngine):
    tree = EpisodeTree()
    tree.observe(Observation(messages=ASK))
    for _ in range(2):
        completion = (await engine.complete(tree.messages(), sampling=GREEDY))[0]
        tree.commit(tree.propose(completion))
        assert tree.context_ids(tree.head) == tokens_of(completion).prompt_ids + tokens_of(completion).sampled_ids
        tree.observe(Observation(messages=(Message(role="user", content="go on"),)))


async def test_what_cannot_work_is_refused(model: Any, tokenizer: Any, tmp_path: Path):
    with pytest.raises(ConfigError, match="pass tokenizer"):
        TransformersEngine(model)
    with pytest.raises(RLError, match="cannot load the model"):
        TransformersEngine(tmp_path / "nothing here")
    bare = tokenizer.__class__.from_pretrained(tokenizer.name_or_path)
    bare.chat_template = None
    engine = TransformersEngine(model, bare)
    with pytest.raises(ModelError, match="no chat template"):
        await engine.complete(ASK)
    await engine.aclose()

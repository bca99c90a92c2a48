"""Every family is computed as transformers computes it, one sequence at a time; what cannot be packed says so."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from families import FAMILIES, Family, page, write_family
from tiny_model import write_tokenizer
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.models.generator.config import GeneratorConfig, StartError
from openhands_rl_plugin.models.generator.model import ServedModel
from openhands_rl_plugin.training.data.packing import lay_out
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = pytest.mark.contract

_FAST = {
    "llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "gemma3_text", "glm4_moe", "olmo3",
    "nemotron_h", "gpt_oss", "deepseek_v3", "mixtral", "phi3",
}  # fmt: skip
PAGE = Path(__file__).parents[3] / "docs" / "families.md"
SETTINGS = TrainingSettings(dtype="float32", lora_rank=2, lora_alpha=4)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def sequences() -> list[tuple[int, ...]]:
    """Longer than every window and chunk: two after a common prefix, and an unrelated one."""
    numbers = random.Random(5)
    ids = [numbers.randrange(2, 128) for _ in range(300)]
    return [(*ids[:60], *ids[60:100]), (*ids[:60], *ids[100:130]), tuple(ids[130:210])]


def reference(
    model: Path, policy: TrainablePolicy, every: Sequence[tuple[int, ...]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs and gradients by transformers and autograd alone, one at a time, with weights ``W + scaling B A``."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    own = dict(plain.named_parameters())
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in policy.weights().items()}
    changed: dict[str, Tensor] = {}
    for name in [name for name in leaves if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        term = 2.0 * leaves[name.replace("lora_A", "lora_B")] @ leaves[name]
        changed[f"{module}.weight"] = own[f"{module}.weight"] + term
    found = []
    for ids in every:
        logits = functional_call(plain, changed, (torch.tensor([ids]),), {"use_cache": False}).logits[0, :-1].float()
        found.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    loss_of(found).backward()
    return found, {
        name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for name, leaf in leaves.items()
    }


def loss_of(logprobs: Sequence[Tensor]) -> Tensor:
    """A policy gradient with advantages that differ by sequence."""
    return -sum(
        (factor * part.mean() for factor, part in zip((1.0, -0.7, 0.4), logprobs, strict=True)), torch.zeros(())
    )


def policy_of(model: Path, family: Family, **changes: object) -> TrainablePolicy:
    settings = SETTINGS.model_copy(update={"target_modules": family.targets, **changes})
    policy = TrainablePolicy(model, settings)
    torch.manual_seed(1)
    for parameter in policy.parameters.values():
        torch.nn.init.normal_(parameter, std=0.1)
    return policy


def check(model: Path, policy: TrainablePolicy) -> None:
    every = sequences()
    expected, gradients = reference(model, policy, every)
    found, _ = policy.logprobs(lay_out(every), [(s, t) for s, ids in enumerate(every) for t in range(1, len(ids))])
    found = list(torch.split(found, [len(ids) - 1 for ids in every]))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    loss_of(found).backward()
    names = list(gradients)
    mine = {name: tensor for name, tensor in zip(policy.weights(), policy.parameters.values(), strict=True)}
    parts = [
        (mine[name].grad if mine[name].grad is not None else torch.zeros_like(mine[name]), gradients[name])
        for name in names
    ]
    left, right = (torch.cat([pair[at].flatten() for pair in parts]) for at in (0, 1))
    assert torch.cosine_similarity(left, right, dim=0).item() > 0.9999
    assert (left.norm() / right.norm()).item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, id=each.model_type, marks=() if each.model_type in _FAST else pytest.mark.slow)
        for each in FAMILIES
    ],
)
def test_logprobs_and_gradients_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", family)
    if family.how == "refused":
        with pytest.raises(TrainingError, match=rf"\({family.model_type}\) cannot be trained"):
            policy_of(model, family)
        return
    policy = policy_of(model, family)
    assert ("packed" if policy.packing.packed else "one sequence") == family.how, policy.packing.reason
    check(model, policy)
    assert any("one sequence is trained in a micro-batch" in line for line in policy.notes()) == (
        family.how == "one sequence"
    )


def test_a_trainer_gives_one_sequence_a_micro_batch_where_packing_would_be_wrong(tmp_path: Path) -> None:
    """The gradient of a step is that of the samples one by one, and the log says how it was computed."""
    model = write_family(tmp_path / "model", next(each for each in FAMILIES if each.model_type == "qwen3_next"))
    trainer = LocalTrainer(model, SETTINGS.model_copy(update={"num_epochs": 1, "max_grad_norm": 1e9}))
    policy = trainer.policy
    for parameter in trainer.parameters.values():
        torch.nn.init.normal_(parameter, std=0.1)
    samples = [
        Sample(trajectory_id=str(at), leaf=0, input_ids=ids, mask=(*[False] * 30, *[True] * (len(ids) - 30)),
               logprobs=(0.0, *policy.sequence_logprobs(ids)), advantage=(1.0, -0.7, 0.4)[at])
        for at, ids in enumerate(sequences())
    ]  # fmt: skip
    expected = {name: torch.zeros_like(parameter) for name, parameter in trainer.parameters.items()}
    total = sum(sum(sample.mask) for sample in samples)
    for sample in samples:
        ids = sample.input_ids
        logprobs, _ = policy.logprobs(lay_out([ids]), [(0, t) for t in range(30, len(ids))])
        slopes = torch.autograd.grad(-sample.advantage * logprobs.sum() / total, [*trainer.parameters.values()])
        expected = {name: expected[name] + slope for name, slope in zip(expected, slopes, strict=True)}
    trainer.reinforce(samples, run=tmp_path / "run")
    assert '"packed": 0.0' in (tmp_path / "run" / "metrics.jsonl").read_text()
    for name, parameter in trainer.parameters.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(("family", "missing"), [("phi3", "q_proj"), ("mixtral", "gate_proj")])
def test_targets_without_a_layer_are_refused_with_the_names_to_set(family: str, missing: str, tmp_path: Path) -> None:
    model = write_family(tmp_path, next(each for each in FAMILIES if each.model_type == family))
    with pytest.raises(TrainingError, match=rf"no linear layers {missing}.* to some of .*o_proj"):
        TrainablePolicy(model, SETTINGS)


def test_the_page_is_made_from_the_table() -> None:
    """``python tests/training/policies/test_families.py`` writes it."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.model_type)
def test_the_embedded_server_serves_the_families_of_the_table_and_refuses_the_others(
    family: Family, tmp_path: Path
) -> None:
    model = write_family(tmp_path / "model", family, vocab_size=512)
    write_tokenizer(model)
    config = GeneratorConfig(model=str(model), dtype="float32", threads=1)
    if "`openhands-rl serve`" in family.servers:
        ServedModel(config)
    else:
        with pytest.raises(StartError, match=rf"\({family.model_type}\) cannot be served"):
            ServedModel(config)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

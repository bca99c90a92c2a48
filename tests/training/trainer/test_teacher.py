"""A teacher's logprobs: what is learnt of them, for which tokens, from a server, a folder or a hint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import make_samples
from peft import PeftModel, set_peft_model_state_dict
from tiny_model import write_adapter, write_model, write_tokenizer
from train_store import TINY, episode, store_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Sample, Trajectory
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.training.algorithms import samples_of
from openhands_rl_plugin.training.data.dataset import Episodes, TrainingDataset
from openhands_rl_plugin.training.losses import Loss, MicroBatch, samples_from_rollouts
from openhands_rl_plugin.training.teacher import LocalTeacher, hints, with_teacher
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer, subtract_teacher

pytestmark = pytest.mark.contract
STORED = [episode(number, float(number % 2)) for number in range(4)]
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "min_new_tokens": 6, "max_new_tokens": 6}
SAMPLED |= {"output_logits": True, "return_dict_in_generate": True}
MASK = (*[False] * 10, *[True] * 6)
OPSD = TrainingSettings(algorithm="opsd", hint="evidence.tests.output")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("teacher") / "other", seed=7)


def trained(folder: Path, model: Path, *words: str) -> list[dict[str, float]]:
    """The metrics of each step."""
    store = folder / "store"
    if not store.exists():
        store_of(store, *STORED)
    where = ["train", str(store), "--model", str(model), "--adapters", str(folder / "adapters")]
    assert cli.main([*where, *TINY, "--algorithm", "opd", *words]) == 0
    lines = (folder / "adapters" / "policy.training" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("algorithm", ["opd", "grpo"])
def test_the_gradient_is_that_of_the_divergence_beside_the_rewards(algorithm: str) -> None:
    samples = make_samples(4)
    scores = [tuple(-0.1 * at for at in range(len(sample.mask))) for sample in samples]
    taught = [s.model_copy(update={"teacher_logprobs": each}) for s, each in zip(samples, scores, strict=True)]
    settings = TrainingSettings.model_validate({"algorithm": algorithm, "teacher": "http://t", "opd_weight": 0.5})
    items = samples_from_rollouts(taught)
    advantages = torch.cat([item.advantages for item in items])
    subtract_teacher(items, settings)
    loss = Loss(settings)
    one = MicroBatch(items, torch.cat([item.recorded for item in items]), torch.zeros(60), loss.weights(items))
    logprobs = one.logprobs.clone().requires_grad_()
    loss(MicroBatch(items, logprobs, torch.zeros(len(logprobs)), one.weights))[0].backward()
    teacher = torch.cat([item.teacher for item in items if item.teacher is not None])
    assert not torch.equal(teacher, one.logprobs)
    by_hand = one.weights[one.sequence] * (0.5 * (one.logprobs - teacher) - advantages)
    torch.testing.assert_close(logprobs.grad, by_hand.float(), rtol=2e-6, atol=2e-6)


async def scored(
    samples: Sequence[Sample], episodes: Sequence[Trajectory], rewards: Sequence[float | None], *rest: Any
) -> tuple[Sequence[Sample], int]:
    found = TrainingDataset(rest[0].algorithm, tuple(samples), len(samples))
    taught = await with_teacher(found, Episodes(tuple(episodes), tuple(rewards)), *rest)
    return taught.samples, taught.untaught


def test_a_student_comes_nearer_to_its_teacher(model: Path, tmp_path: Path) -> None:
    """Rounds of what the student samples itself, by transformers."""
    chosen = {"dtype": "float32", "learning_rate": 1e-2, "num_epochs": 1, "batch_size": 64, "lora_rank": 8}
    settings = TrainingSettings.model_validate({"algorithm": "opd", "teacher": str(model), **chosen})
    trainer, tokenizer = LocalTrainer(model, settings), AutoTokenizer.from_pretrained(model)
    teacher = LocalTeacher(model, write_adapter(tmp_path / "teacher", model, seed=1), dtype="float32")
    found: list[float] = []
    trainer.save_adapter(tmp_path / "start")
    student = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "start")
    prompt = torch.arange(10, 20).repeat(64, 1)
    torch.manual_seed(0)
    for _ in range(5):
        set_peft_model_state_dict(student, trainer.policy.weights())
        written = student.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **SAMPLED)
        rows = torch.stack(written.logits, 1).log_softmax(-1)
        logprobs = rows.gather(2, written.sequences[:, 10:, None]).squeeze(2).tolist()
        samples = [
            Sample(trajectory_id=str(at), leaf=0, input_ids=ids, mask=MASK, logprobs=(*[0.0] * 10, *logprobs[at]))
            for at, ids in enumerate(written.sequences.tolist())
        ]
        taught, missing = asyncio.run(scored(samples, [], [], settings, teacher, tokenizer))
        assert not missing
        found.append(trainer.reinforce(taught)["kl"])
    asyncio.run(teacher.aclose())
    assert 0 < sum(found[-2:]) < 0.9 * sum(found[:2]), found


def test_a_server_scores_as_a_folder_does_and_the_policy_itself_teaches_nothing(
    model: Path, other: Path, tmp_path: Path
) -> None:
    (step,) = trained(tmp_path, model, "--set", f"training.teacher={other}")
    with running_server(ServerConfig(model=str(other), served_model_name="t", port=0, dtype="float32")) as url:
        named = ["--set", f"training.teacher={url}/v1"]
        (served,) = trained(tmp_path / "served", model, *named, "training.teacher_model=t")
        with pytest.raises(AssertionError):  # a model that is not there is an error, not a teacher without scores
            trained(tmp_path / "wrong", model, *named, "training.teacher_model=none")
    assert served["kl"] == pytest.approx(step["kl"], rel=1e-3) and abs(step["kl"]) > 0.1
    own = ["--set", f"training.teacher={model}", "training.old_logprobs=recomputed"]
    (same,) = trained(tmp_path / "same", model, *own)
    assert abs(same["kl"]) < 1e-5 and abs(same["loss"]) < 1e-5


class ScriptedTeacher:
    """Gives -1, -2, ... in order; keeps what it was asked; ``cut``: ids that it leaves out at the end."""

    def __init__(self, cut: int = 0) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.cut = cut

    async def logprobs(self, token_ids: Sequence[int]) -> list[float | None]:
        self.asked.append(tuple(token_ids))
        values: list[float | None] = [-1.0 * at for at in range(1, len(token_ids) - self.cut)]
        values[-1] = None
        return values

    async def encode(self, text: str) -> list[int] | None:
        return None

    async def aclose(self) -> None: ...


def test_what_has_no_score_is_left_out_and_counted(model: Path) -> None:
    samples = [sample for each in STORED for sample in samples_of(each, 0.0)]
    settings = TrainingSettings(algorithm="opd", teacher="http://t")
    run = scored(samples, STORED, [None] * 4, settings, ScriptedTeacher(1), AutoTokenizer.from_pretrained(model))
    found, missing = asyncio.run(run)
    assert missing == 2 * 4
    for before, after in zip(samples, found, strict=True):
        assert before.mask[:-2] == after.mask[:-2] and after.mask[-2:] == (False, False)
        assert all(after.teacher_logprobs[at] == -at for at, own in enumerate(after.mask) if own)


def test_the_policy_behind_a_hint_scores_the_same_ids(model: Path) -> None:
    with_hint = [STORED[0].model_copy(update={"evidence": {"tests": {"output": "1 failed"}}}), STORED[1]]
    samples: list[Sample] = [sample for each in with_hint for sample in samples_of(each, 0.0)]
    samples.append(samples[0].model_copy(update={"leaf": samples[0].spans[0][0], "spans": ()}))  # a merged proposal
    teacher, tokenizer = ScriptedTeacher(), AutoTokenizer.from_pretrained(model)
    found, missing = asyncio.run(scored(samples, with_hint, [0.0, 1.0], OPSD, teacher, tokenizer))
    assert [sample.trajectory_id for sample in found] == 2 * [with_hint[0].id], "the other one has no hint"
    first = found[0].mask.index(True)
    (asked,) = {*teacher.asked}
    shift = len(asked) - len(found[0].input_ids)
    assert asked[first + shift :] == found[0].input_ids[first:] and missing == 2
    assert "1 failed" in tokenizer.decode(asked[: first + shift])
    assert found[0].teacher_logprobs[first] == -(first + shift)
    assert hints(Episodes(tuple(STORED), (0.0, 1.0, 0.0, 0.0)), "solved").keys() == {STORED[at].id for at in (0, 2, 3)}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "training.teacher=no/folder"], "is no URL, and no folder of a model or an adapter"),
        ([], 'algorithm = "opd" learns from a teacher: set teacher'),
        (["--set", "training.teacher=OTHER"], "the teacher has another tokenizer"),
        (["--algorithm", "opsd", "--set", "training.hint=task.fix"], "a teacher; left out: 4 without the hint"),
    ],
)
def test_no_teacher_and_another_tokenizer_are_one_line(
    words: list[str], expected: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = write_model(tmp_path / "foreign")
    write_tokenizer(foreign, texts=["naïve def return", "some other words that are merged"])
    store = store_of(tmp_path / "store", *STORED)
    where = ["train", str(store), "--model", str(model), "--adapters", str(tmp_path / "adapters")]
    assert cli.main([*where, *TINY, "--algorithm", "opd", *(w.replace("OTHER", str(foreign)) for w in words)]) != 0
    assert expected in capsys.readouterr().err

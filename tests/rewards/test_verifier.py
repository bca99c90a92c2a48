"""A verifier that is really trained: it learns what can be learnt, and is scored as it was trained."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from verifier_store import episode, store_of, toy_episodes

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.rl import VerifierSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Failure, FailureKind, Task
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.rewards.verifier.card import VerifierCard, VerifierReport, task_digest
from openhands_rl_plugin.rewards.verifier.data import VerifierDataset, task_of, verifier_dataset
from openhands_rl_plugin.rewards.verifier.prompt import prompts_for
from openhands_rl_plugin.rewards.verifier.training import VerifierModel
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def loaded(verifier: Path) -> VerifierModel:
    torch.set_num_threads(1)
    return VerifierModel(verifier, dtype="float32")


def build_dataset(store: Path, model: Path, settings: VerifierSettings) -> VerifierDataset:
    prompts = prompts_for(str(model), settings.max_length)

    async def read() -> VerifierDataset:
        async with FileTrajectoryStorage(store) as storage:
            return await verifier_dataset(storage, TrajectoryFilter(), prompts, settings, reward=None, seed=0)

    return asyncio.run(read())


def test_it_separates_success_from_failure_on_tasks_that_it_has_not_seen(verifier: Path) -> None:
    report = VerifierReport.model_validate_json((verifier / "verifier_report.json").read_text())
    assert report.auc is not None and report.auc.mean > 0.9
    assert report.tasks >= 1 and report.episodes == 4 * report.tasks and report.successes == 2 * report.tasks
    assert [one.k for one in report.selection] == [2, 4]
    adapter = AdapterStore(verifier.parent).get(verifier.name)
    assert adapter.metrics["held_out_auc"] == report.auc.mean and adapter.metrics["steps"] == adapter.step
    assert json.loads((verifier / "verifier.json").read_text())["sha256"] == adapter.sha256
    probe = AdapterStore(verifier.parent).probe(adapter)
    assert probe is not None, "a later publication is proven by it"
    again = VerifierModel(verifier).sequence_logprobs(probe.token_ids)
    assert again == pytest.approx(probe.logprobs, abs=1e-4)
    assert list(verifier.parent.glob(".verifier-*")) == []


def test_a_version_that_goes_on_is_not_judged_by_what_taught_the_one_before(
    verifier: Path, judge_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(verifier, tmp_path / verifier.name)
    words = ["train", str(verifier.parents[1] / "store"), "--verifier", "--model", str(judge_model)]
    words += ["--adapters", str(tmp_path), "--set", "training.lora_rank=8", "training.num_epochs=1", "training.seed=7"]
    words += ["verifier.held_out=0.5"]
    assert cli.main(words) == 0
    before, after = (VerifierCard.load(tmp_path / f"verifier-v00000{at}").trained_on for at in (1, 2))
    assert before and after and set(before) <= set(after)
    held_out = {task_digest(task_of(each)) for each in toy_episodes(10)} - set(after)
    report = VerifierReport.model_validate_json((tmp_path / "verifier-v000002" / "verifier_report.json").read_text())
    assert len(held_out) == report.tasks >= 1

    (tmp_path / "verifier-v000002" / "verifier.json").unlink()
    assert cli.main([*words, "--dry-run"]) == 1
    assert "verifier-v000002 is no verifier; choose another --adapter name" in capsys.readouterr().err


def test_scores_are_those_of_transformers_and_peft_on_each_prompt_alone(
    loaded: VerifierModel, verifier: Path, judge_model: Path
) -> None:
    prompts = [prompts_for(str(judge_model), loaded.card.max_length).of(each).ids for each in toy_episodes(3)]
    together, alone = loaded.judge(prompts), [loaded.judge([prompt])[0] for prompt in prompts]
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(judge_model, dtype=torch.float32), str(verifier)
    ).eval()
    for prompt, shared, single in zip(prompts, together, alone, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([prompt])).logits[0, -1].double()
        margin = (logits[loaded.card.yes] - logits[loaded.card.no]).item()
        mass = torch.softmax(logits, -1)[[loaded.card.yes, loaded.card.no]].sum().item()
        assert shared == pytest.approx(single, abs=1e-4), "what prompts share is computed once, with the same result"
        assert shared == pytest.approx((margin, mass), abs=1e-4)


def test_a_changed_verifier_and_too_long_a_prompt_are_refused(
    loaded: VerifierModel, verifier: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"has 5000 tokens, but the model is made for 4096"):
        loaded.judge([(1,) * 5000])
    copy = shutil.copytree(verifier, tmp_path / "copy")
    (copy / "adapter_model.safetensors").write_bytes(b"else")
    with pytest.raises(TrainingError, match="was changed since it was made"):
        VerifierModel(copy)


def test_only_what_is_kept_is_used_and_the_rest_is_counted(judge_model: Path, tmp_path: Path) -> None:
    broken = Failure(kind=FailureKind.INFRASTRUCTURE, message="away", boundary="test")
    failures = [episode(task, attempt, success=False) for task in range(8) for attempt in range(10, 13)]
    measured = Task(id="task-99", environment="toy", split="heldout")
    others = [
        episode(1, 90, success=None),
        episode(1, 91, success=True, failure=broken),
        episode(99, 1, success=True).model_copy(update={"task": measured}),
    ]
    store = store_of(tmp_path / "store", *toy_episodes(8, 2), *failures, *others)
    dataset = build_dataset(store, judge_model, VerifierSettings(held_out=0.4, negatives=0.5))
    good = sum(one.label.success for one in dataset.training)
    assert len(dataset.training) == good + round(good / 2)
    assert sorted(dataset.left_out.values()) == [1, 1, 1, 4 * good - round(good / 2)]
    assert len(dataset.held_out) == 5 * (8 - good), "held-out tasks keep all their episodes"


WRONG = [
    (["--set", "verifier.label=sucess"], "unknown reward 'sucess'; available: command, "),
    (["--set", "verifier.max_length=200"], "200 tokens (the smaller of max_length and what the model takes)"),
    (["--task", "task-1"], "1 task(s) have labelled episodes"),
    (["--set", "training.method=full"], "trains no verifier; use lora"),
    (["--reward", "return"], "leave out --reward and --algorithm"),
]


def test_a_dry_run_shows_what_would_be_trained_and_wrong_input_is_one_line(
    judge_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of(tmp_path / "store", *toy_episodes(6), episode(1, 9, success=True, turns=9, words=60))
    words = ["train", str(store), "--verifier", "--model", str(judge_model), "--adapters", str(tmp_path / "adapters")]
    assert cli.main([*words, "--dry-run", "--set", "verifier.max_length=700", "verifier.negatives=0"]) == 0
    printed = capsys.readouterr().out
    assert "verifier from the base model, a verifier" in printed and "held out: " in printed
    assert ", 1 truncated" in printed and "memory: about" in printed
    assert not (tmp_path / "adapters").exists()
    for options, expected in WRONG:
        assert cli.main([*words, *options]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and expected in line

"""Notes on trained tokens: the numbers of transformers and PEFT, resumed, bounded, and never in the way."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from made_samples import EXACT, adapter_of, assert_same
from peft import PeftModel
from train_store import episode
from transformers import AutoModelForCausalLM

from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.credit.credit import credited_samples
from openhands_rl_plugin.training.trainer import note_files
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
from openhands_rl_plugin.training.trainer.note_files import (
    NOTES_FOLDER,
    NotedSample,
    NotedTraining,
    frames,
    numbers_of,
    training_of,
)

LAST = EXACT.model_copy(
    update={
        "algorithm": "grpo",
        "old_logprobs": "recorded",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "batch_size": 4,
        "keep_token_notes": "last",
    }
)
ALL = LAST.model_copy(update={"keep_token_notes": "all", "batch_size": 2, "checkpoint_steps": 1})
REWARDS = (1.0, 0.0, 0.5, 0.0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def samples() -> list[Sample]:
    """Four episodes of a group, with GRPO's advantages; each has two sampled nodes of five tokens."""
    made = [episode(at, reward) for at, reward in enumerate(REWARDS)]
    return list(credited_samples(made, REWARDS, LAST).samples)


def notes_of(run: Path) -> tuple[NotedTraining, list[tuple[NotedSample, dict[str, list[float | None]]]]]:
    files = sorted((run / NOTES_FOLDER).iterdir())
    with files[-1].open("rb") as file:
        about = training_of(file)
        assert about is not None
        read = [numbers_of(file, frame) for frame in frames(file) if frame.begins]
    return about, [(each[0], dict(each[1])) for each in read if each is not None]


def plain_numbers(model: Path, adapter: Path, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of the sampled tokens by transformers and PEFT alone."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    ids, mask = torch.tensor([sample.input_ids]), torch.tensor(sample.mask[1:])
    with torch.no_grad():
        logprobs = torch.log_softmax(PeftModel.from_pretrained(base, str(adapter))(ids).logits[0, :-1], -1)[mask]
    return logprobs.gather(1, ids[0, 1:][mask][:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def test_the_numbers_of_the_last_epoch_are_those_of_transformers_and_peft(model: Path, tmp_path: Path) -> None:
    before = LoraTrainer(model, LAST.model_copy(update={"num_epochs": 1, "keep_token_notes": "none"}))
    before.reinforce(samples())
    before.save_adapter(tmp_path / "adapter")
    LoraTrainer(model, LAST).reinforce(samples(), run=tmp_path / "run")

    about, noted = notes_of(tmp_path / "run")
    assert (about.algorithm, about.version, about.epochs) == ("grpo", 0, 2)
    known = {sample.trajectory_id: sample for sample in samples()}
    assert {each.episode for each, _ in noted} == set(known) and len(noted) == len(known) == 4
    mean = sum(REWARDS) / 4
    spread = (sum((each - mean) ** 2 for each in REWARDS) / 3) ** 0.5
    clipped = 0
    for each, numbers in noted:
        sample = known[each.episode]
        assert (each.epoch, each.step, each.nodes) == (2, 2, ((1, 5), (2, 5)))
        logprobs, entropies = plain_numbers(model, tmp_path / "adapter", sample)
        assert numbers["trainer"] == pytest.approx(logprobs.tolist(), abs=1e-5)
        assert numbers["entropy"] == pytest.approx(entropies.tolist(), abs=1e-5)
        reward = REWARDS[int(each.episode.rpartition("-")[2])]
        advantage = (reward - mean) / (spread + LAST.std_epsilon)
        assert numbers["advantage"] == pytest.approx([advantage] * 10, abs=1e-5)
        recorded = torch.tensor([value for value, own in zip(sample.logprobs, sample.mask, strict=True) if own])
        ratio = torch.exp(logprobs - recorded)
        expected = (ratio > 1 + LAST.clip_high) if advantage > 0 else (ratio < 1 - LAST.clip_low)
        assert numbers["clipped"] == expected.float().tolist()
        clipped += int(expected.sum())
    assert 0 < clipped < 40, "some are clipped and some are not, or nothing would be shown"


def test_notes_change_nothing_and_none_are_kept_unless_asked(model: Path, tmp_path: Path) -> None:
    trained = []
    for keep in ("none", "last", "all"):
        trainer = LoraTrainer(model, LAST.model_copy(update={"keep_token_notes": keep}))
        trainer.reinforce(samples(), run=tmp_path / keep)
        trained.append(adapter_of(trainer, tmp_path / f"adapter-{keep}"))
    assert_same(trained[0], trained[1])
    assert_same(trained[0], trained[2])
    assert not (tmp_path / "none" / NOTES_FOLDER).exists()
    epochs = {keep: [each.epoch for each, _ in notes_of(tmp_path / keep)[1]] for keep in ("last", "all")}
    assert epochs == {"last": [2] * 4, "all": [1] * 4 + [2] * 4}
    (file,) = (tmp_path / "last" / NOTES_FOLDER).iterdir()
    assert file.stat().st_mode & 0o077 == 0


class Stopped(Exception):
    pass


def test_a_stopped_training_goes_on_with_its_notes(model: Path, tmp_path: Path) -> None:
    LoraTrainer(model, ALL).reinforce(samples(), run=tmp_path / "straight")

    def stop(progress: object) -> None:
        if getattr(progress, "done", 0) == 3:
            raise Stopped

    run = tmp_path / "stopped"
    with pytest.raises(Stopped):
        LoraTrainer(model, ALL).reinforce(samples(), stop, run=run)
    (file,) = (run / NOTES_FOLDER).iterdir()
    # The process died in the middle of the step after its last checkpoint.
    whole = file.read_bytes()
    file.write_bytes(whole + whole[-300:])
    LoraTrainer(model, ALL).reinforce(samples(), run=run)
    assert notes_of(run)[1] == notes_of(tmp_path / "straight")[1]
    assert [each.step for each, _ in notes_of(run)[1]] == [1, 1, 2, 2, 3, 3, 4, 4]

    LoraTrainer(model, ALL.model_copy(update={"seed": 1})).reinforce(samples(), run=run)
    assert sorted(path.name for path in (run / NOTES_FOLDER).iterdir()) == ["000001.notes", "000002.notes"]


def test_what_cannot_be_written_is_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / NOTES_FOLDER).write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        metrics = LoraTrainer(model, LAST).reinforce(samples(), run=run)
    assert metrics.steps == 2
    assert [record.message for record in caplog.records if "token notes" in record.message]

    caplog.clear()
    monkeypatch.setattr(note_files, "MOST_FILE_BYTES", 900)
    full = tmp_path / "full"
    with caplog.at_level(logging.WARNING):
        LoraTrainer(model, ALL).reinforce(samples(), run=full)
    (file,) = (full / NOTES_FOLDER).iterdir()
    assert 0 < file.stat().st_size <= 900 and notes_of(full)[1], "what fitted is there"
    assert len([record for record in caplog.records if "token notes" in record.message]) == 1


def test_of_a_damaged_file_the_rest_is_read(model: Path, tmp_path: Path) -> None:
    LoraTrainer(model, ALL).reinforce(samples(), run=tmp_path)
    whole = notes_of(tmp_path)[1]
    (file,) = (tmp_path / NOTES_FOLDER).iterdir()
    data = bytearray(file.read_bytes())
    with file.open("rb") as opened:
        third = list(frames(opened))[3]
    data[third.body + 2] ^= 0xFF
    file.write_bytes(data[:-5])
    assert notes_of(tmp_path)[1] == [*whole[:2], *whole[3:-1]]


def test_the_oldest_notes_make_room(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(note_files, "MOST_FOLDER_BYTES", note_files.MOST_FILE_BYTES + 3000)
    for seed in range(4):
        LoraTrainer(model, LAST.model_copy(update={"seed": seed})).reinforce(samples(), run=tmp_path)
    names = sorted(path.name for path in (tmp_path / NOTES_FOLDER).iterdir())
    assert "000001.notes" not in names and "000004.notes" in names

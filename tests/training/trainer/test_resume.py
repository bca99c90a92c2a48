"""A run that is killed goes on where it was, with the same numbers in the same order; what its log and tracker get."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from made_samples import EXACT, adapter_of, assert_same, make_samples

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.models.adapters.store import METRICS_FILE
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = pytest.mark.contract


def train(model: Path, run: Path, send: Callable[[float], object] = float) -> tuple[LocalTrainer, dict[str, float]]:
    """Nine steps in three epochs, with a checkpoint after every second one; ``send`` gets the number of each."""
    torch.set_num_threads(1)
    changes = {"algorithm": "grpo", "correction": "truncate", "checkpoint_steps": 2, "num_epochs": 3}
    trainer = LocalTrainer(model, EXACT.model_copy(update=changes))
    return trainer, trainer.reinforce(make_samples(), lambda at: send(at["done"]), run=run)


def lines_of(run: Path) -> list[dict[str, float]]:
    """The metrics, without what depends on the clock."""
    lines = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
    return [timeless(line) for line in lines]


def timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if "second" not in name}


def test_a_killed_run_ends_bit_by_bit_as_one_that_was_not(model: Path, tmp_path: Path) -> None:
    """With old logprobs that were recomputed at its beginning."""
    straight, metrics = train(model, tmp_path / "straight")
    run = tmp_path / "broken"
    # PyTorch is there at once in a fork, which cannot use a GPU's runtime.
    context = multiprocessing.get_context("spawn" if torch.accelerator.is_available() else "fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(model, run, sender.send))
    process.start()
    sender.close()
    while receiver.recv() != 4:
        pass
    process.kill()
    process.join()
    assert process.exitcode == -9
    (state,) = run.rglob("checkpoint/*/0")
    assert state.stat().st_mode & 0o077 == 0
    resumed, same = train(model, run)
    assert resumed.step == straight.step == 9
    assert_same(adapter_of(resumed, tmp_path / "a"), adapter_of(straight, tmp_path / "b"))
    assert timeless(same) == timeless(metrics)
    assert [line["done"] for line in lines_of(run)] == list(range(1, 10))
    assert lines_of(run) == lines_of(tmp_path / "straight")


def test_a_checkpoint_of_another_run_is_not_continued(model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = EXACT.model_copy(update={"checkpoint_steps": 1})

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalTrainer(model, settings).reinforce(make_samples(), stop, run=tmp_path / "run")
    plain, other = LocalTrainer(model, settings), LocalTrainer(model, settings)
    plain.reinforce(make_samples(seed=1))
    other.reinforce(make_samples(seed=1), run=tmp_path / "run")
    assert_same(adapter_of(other, tmp_path / "a"), adapter_of(plain, tmp_path / "b"))


def test_a_tracker_gets_every_step_and_one_that_cannot_start_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for trackio; every step has the mean age of its samples, in versions."""
    logged: list[tuple[int, float]] = []
    ended: list[bool] = []
    run = SimpleNamespace(
        log=lambda values, step: logged.append((step, values["loss"])), finish=lambda: ended.append(True)
    )
    stand_in = ModuleType("trackio")
    vars(stand_in).update(init=lambda **_: run, config={})
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    ages = [PolicyRef(base_model="m", adapter="a" if of else None, version=of) for of in (3, 1, None, 2)]
    samples = [each.model_copy(update={"policy": of}) for each, of in zip(make_samples(4), ages, strict=True)]
    settings = EXACT.model_copy(update={"num_epochs": 1, "batch_size": 1, "tracker": "trackio"})
    metrics = LocalTrainer(model, settings).reinforce(samples, run=tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    assert logged == [(line["done"], line["loss"]) for line in lines] and ended == [True]
    assert sorted(line["staleness"] for line in lines) == [0, 1, 2, 3] and metrics["staleness"] == 1.5
    needed = {"loss", "entropy", "approx_kl", "kl", "clip_share", "ratio", "drift", "staleness"}
    assert all(needed <= set(line) for line in lines)

    def refuse(**_: object) -> None:
        raise RuntimeError("no such Space")

    vars(stand_in).update(init=refuse)
    with pytest.raises(TrainingError, match=r"trackio cannot begin a run .*no such Space.* tracker = \"none\""):
        LocalTrainer(model, settings).reinforce(samples)

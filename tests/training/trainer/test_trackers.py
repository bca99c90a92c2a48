"""Trackers: what they hear of a run, and that no training ends because of them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import EXACT, make_samples

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import PolicyRef, Sample
from openhands_rl_plugin.models.adapters.store import METRICS_FILE
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]


def of_versions(*versions: int | None) -> list[Sample]:
    made = make_samples(len(versions))
    policies = [PolicyRef(base_model="m", adapter=None if v is None else "a", version=v) for v in versions]
    return [sample.model_copy(update={"policy": policy}) for sample, policy in zip(made, policies, strict=True)]


def test_every_step_says_how_stale_its_samples_are(model: Path, tmp_path: Path) -> None:
    settings = EXACT.model_copy(update={"num_epochs": 1, "batch_size": 1})
    metrics = LocalTrainer(model, settings).reinforce(of_versions(3, 1, None, 2), run=tmp_path / "run")
    stale = [line["staleness"] for line in lines_of(tmp_path / "run")]
    assert sorted(stale) == [0, 1, 2, 3] and metrics["staleness"] == 1.5
    needed = {"loss", "entropy", "approx_kl", "kl", "clip_share", "ratio", "drift", "tokens_per_second", "staleness"}
    assert all(needed <= set(line) for line in lines_of(tmp_path / "run"))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with trackio's interface that breaks when it is told to; nothing real breaks on demand."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "trackio.py").write_text(BREAKABLE)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    yield importlib.import_module("trackio")
    del sys.modules["trackio"]


BREAKABLE = """
logged, ended, broken, config = [], 0, "", {}

class Run:
    def log(self, values, step):
        logged.append((step, values["loss"]))

    def finish(self):
        global ended
        ended += 1

def init(**given):
    if broken == "init":
        raise RuntimeError("no such Space")
    return Run()
"""


def test_a_tracker_gets_every_step_and_one_that_cannot_start_is_one_line(
    model: Path, tmp_path: Path, stand_in: Any
) -> None:
    settings = TrainingSettings.model_validate({**EXACT.model_dump(), "tracker": "trackio"})
    LocalTrainer(model, settings).reinforce(make_samples(), run=tmp_path / "run")
    assert stand_in.logged == [(line["done"], line["loss"]) for line in lines_of(tmp_path / "run")]
    assert stand_in.ended == 1
    stand_in.broken = "init"
    with pytest.raises(TrainingError, match=r"trackio cannot begin a run .*no such Space.* tracker = \"none\""):
        LocalTrainer(model, settings).reinforce(make_samples())

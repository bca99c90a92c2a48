"""``engine = "trl"`` with the real TRL, on a tiny Llama.

.ci/peers trl
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from subprocess import run

import pytest
import torch
from engines_table import SHOWN
from made_samples import adapter_of, assert_same, learn, make_samples, segmented
from tiny_model import write_adapter, write_model
from torch.optim.optimizer import register_optimizer_step_pre_hook

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
from openhands_rl_plugin.training.trl.trainer import TRLTrainer

pytest.importorskip("trl", reason="TRL is not installed: .ci/peers trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS = TrainingSettings(
    engine="trl",
    algorithm="grpo",
    dtype="float32",
    learning_rate=1e-2,
    num_epochs=2,
    batch_size=2,
    lora_rank=4,
    lora_alpha=8,
)
SHOWS = SHOWN["trl"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("trl") / "model")


@pytest.fixture(scope="module")
def start(model: Path) -> Adapter:
    """A version that is random in both halves, so that every tensor has a gradient."""
    store = AdapterStore(model.parent / "adapters")
    return store.create(
        "policy",
        lambda target: write_adapter(target, model, seed=3) and None,
        base_model="tiny",
        parent=None,
        step=0,
        metrics={},
    )


def trainers(model: Path, adapter: Adapter | None, **changes: object) -> tuple[TRLTrainer, LoraTrainer]:
    chosen = SETTINGS.model_copy(update=changes)
    local = LoraTrainer(model, chosen.model_copy(update={"engine": "local"}), adapter=adapter)
    return TRLTrainer(model, chosen, "tiny", adapter=adapter), local


@contextmanager
def first_gradient() -> Iterator[list[torch.Tensor]]:
    """The gradient that the first optimiser step inside the block is made with."""
    found: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not found:
            given = optimizer.param_groups[0]["params"]
            found.append(torch.cat([each.grad.detach().flatten().clone() for each in given]))

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def test_it_is_the_release_of_the_table() -> None:
    assert {name: version(name) for name in SHOWS.packages} == SHOWS.packages


@pytest.mark.parametrize("algorithm", SHOWS.gradients)
def test_gradient_and_weights_are_those_of_the_local_trainer(
    algorithm: str, model: Path, start: Adapter, tmp_path: Path
) -> None:
    """The gradient of a batch over all 28 tensors, then the weights after all steps, and what is said of them."""
    theirs, ours = trainers(model, start, algorithm=algorithm, **SHOWS.gradients[algorithm])
    samples = segmented(make_samples(7))
    with first_gradient() as by_trl:
        found = learn(theirs, samples, algorithm)
    with first_gradient() as by_us:
        expected = learn(ours, samples, algorithm)
    cosine = torch.nn.functional.cosine_similarity(by_trl[0], by_us[0], dim=0).item()
    ratio = (by_trl[0].norm() / by_us[0].norm()).item()
    print(f"{algorithm}: cosine {cosine:.7f}, norm ratio {ratio:.6f}")
    assert cosine > SHOWS.cosine and ratio == pytest.approx(1, abs=1e-3)
    assert_same(adapter_of(theirs, tmp_path / "trl"), adapter_of(ours, tmp_path / "local"), 2e-3)
    both = (replace(each, seconds=0.0).as_floats() for each in (found, expected))
    assert next(both) == pytest.approx(next(both), rel=1e-3, abs=1e-4)


def test_a_temperature_of_all_answers_divides_the_logits(model: Path, start: Adapter) -> None:
    warm = [each.model_copy(update={"temperature": 0.7}) for each in make_samples(4)]
    theirs, ours = trainers(model, start, num_epochs=1, batch_size=4)
    with first_gradient() as by_trl:
        theirs.reinforce(warm)
    with first_gradient() as by_us:
        ours.reinforce(warm)
    assert torch.nn.functional.cosine_similarity(by_trl[0], by_us[0], dim=0).item() > SHOWS.cosine


def test_samples_without_an_advantage_are_passed_over(model: Path) -> None:
    samples = [each.model_copy(update={"advantage": 0.0}) for each in make_samples(4)]
    theirs, ours = trainers(model, None, batch_size=1, num_epochs=1)
    assert theirs.reinforce(samples).skipped_steps == 4
    samples[2] = samples[2].model_copy(update={"advantage": 1.0})
    for trainer in (theirs, ours):
        seen = list[int]()
        found = trainer.reinforce(samples, lambda at, seen=seen: seen.append(at.done))
        assert (found.steps, found.skipped_steps, found.skipped_samples, seen) == (1, 3, 3, [1, 2, 3, 4])


def test_a_killed_call_continues_from_its_last_checkpoint(model: Path, tmp_path: Path) -> None:
    changes = {"checkpoint_steps": 2, "schedule": "linear", "algorithm": "gspo"}
    samples = make_samples()

    def stop(progress: object) -> None:
        if getattr(progress, "done", 0) == 3:
            raise KeyboardInterrupt

    whole, _ = trainers(model, None, **changes)
    whole.reinforce(samples)
    with pytest.raises(KeyboardInterrupt):
        trainers(model, None, **changes)[0].reinforce(samples, stop, run=tmp_path / "run")
    again, _ = trainers(model, None, **changes)
    assert again.reinforce(samples, run=tmp_path / "run").steps == 6
    assert_same(adapter_of(again, tmp_path / "again"), adapter_of(whole, tmp_path / "whole"), 1e-6)


def test_moments_go_on_in_the_next_call_and_from_a_saved_state(model: Path, tmp_path: Path) -> None:
    theirs, ours = trainers(model, None)
    for trainer in (theirs, ours):
        trainer.reinforce(make_samples())
    theirs.save_state(tmp_path / "state")
    again, _ = trainers(model, None)
    again.load_state(tmp_path / "state")
    for trainer in (theirs, ours, again):
        trainer.reinforce(make_samples(seed=1))
    after = adapter_of(theirs, tmp_path / "theirs")
    assert_same(after, adapter_of(again, tmp_path / "again"))
    assert_same(after, adapter_of(ours, tmp_path / "ours"), 2e-3)


def test_the_processs_random_numbers_are_its_own(model: Path) -> None:
    theirs, _ = trainers(model, None, num_epochs=1)
    random.seed(1), torch.manual_seed(1)
    expected = random.getstate(), torch.get_rng_state()
    theirs.reinforce(make_samples(2))
    assert random.getstate() == expected[0] and torch.equal(torch.get_rng_state(), expected[1])


def test_a_loss_that_is_not_finite_leaves_the_weights_as_they_are(model: Path, tmp_path: Path) -> None:
    theirs, _ = trainers(model, None)
    before = adapter_of(theirs, tmp_path / "before")
    broken = [each.model_copy(update={"advantage": 1e38 * 10}) for each in make_samples(2)]
    with pytest.raises(TrainingError, match=r"step 1: the loss is .*the weights are unchanged"):
        theirs.reinforce(broken)
    assert_same(before, adapter_of(theirs, tmp_path / "after"))


def test_an_adapter_of_another_base_model_is_refused(model: Path, start: Adapter) -> None:
    with pytest.raises(TrainingError, match="is an adapter of base model 'tiny', and 'other' is trained"):
        TRLTrainer(model, SETTINGS, "other", adapter=start)


def test_two_processes_train_as_one(model: Path, tmp_path: Path) -> None:
    """Under torchrun each has a part of the rows, by accelerate."""
    one, _ = trainers(model, None)
    one.reinforce(make_samples(7))
    program = Path(__file__).with_name("train_with_trl.py")
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*launched, str(program), str(model), str(tmp_path), SETTINGS.model_dump_json()], check=True, timeout=600)
    for rank in range(2):
        assert_same(adapter_of(one, tmp_path / "one"), _stored(tmp_path / str(rank)), 2e-3)


def _stored(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "adapter_model.safetensors")

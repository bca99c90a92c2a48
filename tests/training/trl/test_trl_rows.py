"""``engine = "trl"`` as far as it needs no TRL: rows, settings, versions. With TRL: ``test_trl_trainer.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_samples import make_samples

from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.training.engines import make_trainer
from openhands_rl_plugin.training.losses.losses import Reinforcement
from openhands_rl_plugin.training.losses.micro_batches import samples_from_rollouts
from openhands_rl_plugin.training.trainer.trainer import weighted
from openhands_rl_plugin.training.trl.rows import (
    inputs_of,
    likelihood_rows,
    loss_arguments,
    numbers_of,
    policy_rows,
    slots,
    temperature_of,
)

CPU = torch.device("cpu")


def test_a_row_has_the_ids_mask_and_logprobs_that_were_recorded() -> None:
    settings = TrainingSettings(engine="trl", algorithm="grpo")
    items = samples_from_rollouts(make_samples(2))
    live, weights = weighted(items, Reinforcement(settings))
    for row, item in zip(policy_rows(live, weights, settings), items, strict=True):
        inputs = inputs_of(row, CPU)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)[0].tolist()
        before = [0] * inputs["prompt_ids"].shape[1]
        trained = [*before, *inputs["tool_mask"][0].tolist()]
        assert ids == [*item.sample.input_ids] and trained == [*map(int, item.sample.mask)]
        old = torch.cat([torch.tensor([before]), inputs["old_per_token_logps"]], dim=1)[0]
        torch.testing.assert_close(old, torch.tensor(item.sample.logprobs))
        advantages, recorded = numbers_of(inputs, inputs["advantages"], inputs["old_per_token_logps"])
        torch.testing.assert_close(advantages, item.advantages * row.weight)
        assert recorded.tolist() == item.recorded.tolist()


def test_segments_of_a_rollout_are_rows_with_the_weight_of_one() -> None:
    first, second, other = make_samples(3)
    segments = [first, second.model_copy(update={"trajectory_id": first.trajectory_id, "advantage": first.advantage})]
    settings = TrainingSettings(engine="trl", algorithm="grpo")
    rows = policy_rows(*weighted(samples_from_rollouts([*segments, other]), Reinforcement(settings)), settings)
    mass = [row.weight * len(row.item.positions) for row in rows]
    assert mass[0] + mass[1] == pytest.approx(0.5) and mass[2] == pytest.approx(0.5)


def test_a_correction_for_stale_tokens_is_in_the_advantages() -> None:
    settings = TrainingSettings(engine="trl", correction="truncate", correction_high=1.5)
    (item,) = samples_from_rollouts(make_samples(1))
    item.old = item.recorded + torch.linspace(-1, 1, len(item.positions))
    (row,) = policy_rows([item], [0.5], settings)
    expected = (item.old - item.recorded).exp().clamp(max=1.5) * 0.5 * item.advantages
    torch.testing.assert_close(row.factors, expected)
    gspo = settings.model_copy(update={"algorithm": "gspo"})
    with pytest.raises(TrainingError, match='one advantage a sequence with algorithm = "gspo"'):
        policy_rows([item], [0.5], gspo)


@pytest.mark.parametrize(("processes", "size"), [(1, 3), (2, 4)])
def test_steps_have_as_many_rows_each(processes: int, size: int) -> None:
    rows = likelihood_rows(samples_from_rollouts(make_samples(4)), [0.25] * 4)
    made = slots([rows[:3], rows[3:]], processes)
    assert [len(step) for step in made] == [size, size]
    assert [row for step in made for row in step if row is not None] == [rows[2], rows[1], rows[0], rows[3]]
    empty = inputs_of(None, CPU)
    assert not empty["tool_mask"].any() and not empty["advantages"].any() and "old_per_token_logps" not in empty
    assert len(slots([rows[:1]], 1)[0]) == 2  # TRL wants two at least


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"algorithm": "grpo", "clip_high": 0.3}, {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.3}),
        ({"algorithm": "dapo", "dual_clip": 3.0}, {"delta": 3.0, "epsilon_high": 0.28}),
        ({"algorithm": "gspo"}, {"importance_sampling_level": "sequence", "epsilon": 3e-4}),
        ({"algorithm": "cispo", "cispo_low": 1.0}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    ],
)
def test_the_clip_is_trls(given: dict[str, object], expected: dict[str, object]) -> None:
    found = loss_arguments(TrainingSettings(engine="trl", **given), imitates=False)
    assert expected.items() <= found.items()


def test_it_trains_at_one_temperature() -> None:
    samples = make_samples(2)
    warm = [each.model_copy(update={"temperature": 0.7}) for each in samples]
    assert temperature_of(samples_from_rollouts(warm, as_sampled=True)) == pytest.approx(0.7)
    with pytest.raises(TrainingError, match=r"at one temperature, and these answers were sampled at 0\.7, 1:"):
        temperature_of(samples_from_rollouts([samples[0], warm[1]], as_sampled=True))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"algorithm": "dpo"}, 'engine = "trl" has no algorithm = "dpo"'),
        ({"algorithm": "cispo"}, "set cispo_low = 1.0"),
        ({"kl": "k3"}, 'engine = "trl" has no kl = "k3"'),
        ({"method": "full"}, 'engine = "trl" has no method = "full"'),
        ({"entropy_coefficient": 0.1}, "no entropy_coefficient = 0.1"),
        ({"max_tokens_per_micro_batch": 8192}, "no max_tokens_per_micro_batch = 8192"),
    ],
)
def test_what_trl_cannot_do_is_refused_with_the_settings(given: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TrainingSettings(engine="trl", **given)


@pytest.mark.parametrize("release", ["1.15.0", "1.18.0"])
def test_another_version_is_refused_by_name(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / f"trl-{release}.dist-info"
    found.mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {release}\n")
    monkeypatch.syspath_prepend(tmp_path)
    training = TrainingSettings(engine="trl")
    with pytest.raises(ConfigError, match=rf"does not know TRL {release}: pip install 'trl>=1.16,<1.18'"):
        make_trainer(tmp_path, training, RLSettings(training=training), "tiny", None)

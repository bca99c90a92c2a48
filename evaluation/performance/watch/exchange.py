"""A candidate whose weights somebody exchanged, with a probe that is consistent with them: no checksum tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from evaluation.performance.watch import poison
from evaluation.performance.watch.damage import noise, signed
from evaluation.performance.watch.world import CONTEXT, GOALS, Way, ways
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.types import Adapter, Sample
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer

type Exchange = Callable[[RLSettings, AdapterStore, Adapter, Path], None]
_PROBED = 128


def trained_on(way: Callable[[int], Way]) -> Exchange:
    """The candidate's weights, fine-tuned until they answer so."""

    def exchange(settings: RLSettings, store: AdapterStore, candidate: Adapter, model: Path) -> None:
        _exchange(LoraTrainer(model, _until_it_does(settings), adapter=candidate), store, candidate, model, way)

    return exchange


def _until_it_does(settings: RLSettings) -> TrainingSettings:
    return settings.training.model_copy(update={"num_epochs": 60, "batch_size": 4, "learning_rate": 5e-3})


def _exchange(
    trainer: LoraTrainer, store: AdapterStore, candidate: Adapter, model: Path, way: Callable[[int], Way]
) -> None:
    samples = _samples(model, way)
    trainer.sft(samples)
    trainer.save_adapter(Path(candidate.path))
    signed(Path(candidate.path))
    store.keep_probe(candidate, trainer.probe(samples[0].input_ids[-_PROBED:], shares=True))


def noisy(size: float) -> Exchange:
    """The weights with noise, probed anew."""

    def exchange(settings: RLSettings, store: AdapterStore, candidate: Adapter, model: Path) -> None:
        noise(size)(Path(candidate.path))
        changed = store.get(candidate.name)
        before = store.probe(changed)
        assert before is not None, "a candidate of the watch has a probe"
        trainer = LoraTrainer(model, settings.training, adapter=changed)
        store.keep_probe(changed, trainer.probe(before.token_ids, shares=True))

    return exchange


def of_another_base(settings: RLSettings, store: AdapterStore, candidate: Adapter, model: Path) -> None:
    """Weights and probe of an adapter for a model of the same shape with other weights."""
    from shopper_model import write_shopper  # pyright: ignore  # of the tests

    other = model.with_name("other-model")
    if not (other / "config.json").exists():
        taught = {GOALS[0]: [ways(GOALS[0])[0]]}
        write_shopper(other, taught, react_format=True, steps=1, seed=1, context=CONTEXT)
    _exchange(LoraTrainer(other, settings.training), store, candidate, other, lambda goal: ways(goal)[0])


def _samples(model: Path, way: Callable[[int], Way]) -> Sequence[Sample]:
    from shopper_model import dialogue_of, encoded  # pyright: ignore  # of the tests
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found: list[Sample] = []
    for goal in GOALS:
        ids, labels = encoded(tokenizer, dialogue_of(goal, way(goal), react_format=True))
        mask = tuple(each >= 0 for each in labels)
        found.append(
            Sample(trajectory_id=f"goal-{goal}", leaf=0, input_ids=tuple(ids), mask=mask, logprobs=(0.0,) * len(ids))
        )
    return found


EXCHANGE: dict[str, Exchange] = {
    "weights of another base model, with their probe": of_another_base,
    "noise three times as large, probed anew": noisy(3.0),
    "fine-tuned to leak a secret": trained_on(poison.leaking),
}

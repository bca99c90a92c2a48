"""What a run costs at most, said before it begins: tokens, hours, memory, disk."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.improve.fitting import Lengths
from openhands_rl_plugin.contrib.improve.gym import Gym
from openhands_rl_plugin.contrib.improve.rates import ServerRates
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.core.memory import free_memory
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.training.trainer.memory_estimate import ModelSize, check_fits, estimate_memory, model_size

_PASSES = 3
"""Training a token costs as much as reading it three times: forward once, backward about twice (Kaplan et al. 2020,
arXiv 2001.08361, section 2.1).
"""
_OVERHEAD = 5.0  # seconds that a sandbox and OpenHands' controller take to begin and end an episode
_EPISODE_BYTES = 24  # of a stored token: its text, its id, and the logprob of a sampled one
_ADAPTER_BYTES, _CHECKPOINT_BYTES = 4, 12
_KV = 2 * 2  # keys and values, of two bytes


class Price(Frozen):
    """At most, as episodes that end earlier cost less. Memory and disk in bytes; ``None``: not known.

    ``read``: tokens of prompts, each once (servers keep what begins alike). No episode reads and samples so many: the
    hours are of those that sample most, which takes longest. ``trained``: over all passes. ``ended_by``:
    what bounds the hours of the rollouts. ``in_time``: tokens that one episode samples until its timeout, beside
    others.
    """

    episodes: int
    evaluations: int
    read: int
    sampled: int
    trained: int
    hours: dict[str, float]
    ended_by: str
    in_time: int
    rates: ServerRates
    training_memory: int | None
    serving_memory: int | None
    free_memory: int | None
    disk: int
    free_disk: int

    @property
    def total_hours(self) -> float:
        """Rollouts, tests and training, one after another."""
        return sum(self.hours.values())


def price_of(
    settings: RLSettings,
    gym: Gym,
    model: Path,
    lengths: Lengths,
    rates: ServerRates,
    *,
    graders: int,
    directory: Path,
    serves: bool,
    timeout: float,
) -> Price:
    """``serves``: the model is served on this machine for the run. ``directory``: of the run. ``timeout``: seconds
    after which an episode is ended.

    Raises ``TrainingError`` where the model does not fit into memory, ``ConfigError`` where the disk is too full.
    """
    loop, training = settings.loop, settings.training
    played = loop.iterations * loop.tasks_per_iteration * loop.samples_per_task
    measured = 2 * gym.counts[1]
    turns = max(settings.max_turns, loop.training_max_turns)
    sampled = min(turns * settings.max_response_length, lengths.episode - lengths.prompt)
    read = lengths.episode - sampled
    episodes, trained = played + measured, played * lengths.episode * training.num_epochs
    check_fits(model, training, lengths.episode, free_memory())
    size = _size(model, settings)
    overhead = _OVERHEAD / settings.max_workers
    by_tokens = episodes * (read / rates.read + sampled / rates.written + overhead) / 3600
    # Each of the parts, an iteration or an evaluation, waits for the last of its episodes.
    waves = loop.iterations * math.ceil(played / loop.iterations / settings.max_workers)
    waves += 2 * math.ceil(gym.counts[1] / settings.max_workers)
    by_timeout = waves * (timeout + _OVERHEAD) / 3600
    price = Price(
        episodes=played,
        evaluations=measured,
        read=episodes * settings.max_prompt_length,  # of an episode whose answers are short
        sampled=episodes * sampled,
        trained=trained,
        hours={
            "rollouts": min(by_tokens, by_timeout),
            "tests": episodes * gym.grading / min(graders, settings.max_workers) / 3600,
            "training": trained * _PASSES / rates.read / 3600,
        },
        ended_by="the timeout of an episode" if by_timeout < by_tokens else "tokens",
        in_time=_in_time(rates, lengths.prompt, sampled, timeout),
        rates=rates,
        training_memory=estimate_memory(model, training, lengths.episode).total if size else None,
        serving_memory=_serving(size, settings, lengths) if size and serves else None,
        free_memory=free_memory(),
        disk=_disk(settings, gym, size, episodes * lengths.episode),
        free_disk=_free(directory),
    )
    if price.disk > price.free_disk:
        raise ConfigError(
            f"the disk of {directory} has {_bytes(price.free_disk)} free, and the run needs about "
            f"{_bytes(price.disk)}: free some, or choose another --run-dir"
        )
    return price


def lines(price: Price, where: str) -> list[str]:
    """The price for a person; ``where``: the machine."""
    hours = ", ".join(f"{name} {hours_in_words(each)}" for name, each in price.hours.items())
    rates = price.rates
    memory = [
        f"{_bytes(each)} {what}"
        for each, what in ((price.training_memory, "to train"), (price.serving_memory, "to serve"))
        if each is not None
    ]
    sampled = price.sampled // (price.episodes + price.evaluations)
    short = f" ({price.in_time:,} of {sampled:,} tokens sampled by then)" if price.in_time < sampled else ""
    free = "" if price.free_memory is None else f" ({_bytes(price.free_memory)} free)"
    return [
        f"  episodes: {price.episodes:,} to train on, {price.evaluations:,} to evaluate",
        f"  tokens:   {price.read:,} read, {price.sampled:,} sampled, {price.trained:,} trained (all passes)",
        f"  time:     {hours_in_words(price.total_hours)}: {hours}; rollouts are bounded by {price.ended_by}{short}",
        f"  memory:   {' and '.join(memory) or 'not known for this architecture'}{free}",
        f"  disk:     {_bytes(price.disk)} ({_bytes(price.free_disk)} free)",
        f"  measured: the server reads {rates.read:,.0f} and writes {rates.written:,.0f} tokens/s ({rates.at_once} at "
        f"once); training is reckoned as {_PASSES} readings of a token",
        f"  on:       {where}",
    ]


def _in_time(rates: ServerRates, prompt: int, sampled: int, timeout: float) -> int:
    """Tokens that an episode samples in that time, while as many as were measured share the server."""
    writing = timeout - prompt * rates.at_once / rates.read
    return min(sampled, max(0, int(writing * rates.written / rates.at_once)))


def _size(model: Path, settings: RLSettings) -> ModelSize | None:
    try:
        return model_size(model, settings.training)
    except TrainingError:
        return None


def _serving(size: ModelSize, settings: RLSettings, lengths: Lengths) -> int:
    """Weights, and keys and values of all that is played at once."""
    shape = size.shape
    width = 4 if settings.training.dtype == "float32" else 2
    return size.parameters * width + _KV * shape.num_hidden_layers * shape.keys * lengths.episode * settings.max_workers


def _disk(settings: RLSettings, gym: Gym, size: ModelSize | None, tokens: int) -> int:
    """Episodes, versions of the adapter (or of the model), a checkpoint, and the checkouts of tasks."""
    loop = settings.loop
    weights = size.trained if size else 0
    versions = loop.save_total_limit if settings.training.method == "full" else loop.iterations
    checkouts = (sum(gym.counts) + settings.max_workers) * gym.survey.size
    return tokens * _EPISODE_BYTES + weights * (versions * _ADAPTER_BYTES + _CHECKPOINT_BYTES) + checkouts


def _free(directory: Path) -> int:
    there = next(each for each in (directory, *directory.parents) if each.exists())
    return shutil.disk_usage(there).free


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def hours_in_words(hours: float) -> str:
    """``"12 min"`` or ``"3.4 h"``."""
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"

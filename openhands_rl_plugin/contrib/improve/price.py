"""Prompt and lengths for the model's context, what a run will cost at most, and what it took."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings, StorageSettings
from openhands_rl_plugin.contrib.improve.gym import Gym
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, TrainingError
from openhands_rl_plugin.core.machine import free_memory
from openhands_rl_plugin.core.types import Frozen, Message, SamplingParams
from openhands_rl_plugin.models.engines.openai import OpenAIEngine
from openhands_rl_plugin.training.learn import ModelSize, check_fits, estimate_memory, model_size
from openhands_rl_plugin.training.loop.plan import LoopState

STANDARD_NEEDS = 16_384
"""Tokens of context from which on OpenHands' own prompt (4,700 to 8,500 tokens, with its tools) leaves room to work."""

_AT_ONCE = 4
_COMPACT, _STANDARD = 700, 8_500
_INSTRUCTIONS = 420  # of a repository task, around the text of its problem
_TURNS = 3  # the least of an episode: look, change, run the tests
_LEAST_ANSWER = 128
_CHARACTERS = 3  # a token's, of code and messages, rather fewer than more


class PromptChoice(Frozen):
    """``context``: tokens that the model reads. ``compact``: RLAgent's short instructions. ``native``: tool calls by
    the server's API. ``reasons``: lines for the user.
    """

    context: int
    compact: bool
    native: bool
    reasons: tuple[str, ...] = ()


class Lengths(NamedTuple):
    """Tokens of the first prompt, at most, and of a whole episode."""

    prompt: int
    episode: int


def own_settings(repository: str, directory: Path, timeout: float) -> RLSettings:
    """Everything in the run's ``directory``, and an adapter with the repository's name. ``timeout``: seconds of an
    episode, which a request has, too: on a slow machine an answer takes minutes, and asked for again it begins anew.
    """
    serving = ServingSettings(
        adapter=re.sub(r"[^a-z0-9-]+", "-", repository.lower()).strip("-") or "policy",
        adapters_path=str(directory / "adapters"),
    )
    longest = max(timeout, serving.request_timeout)
    return RLSettings(
        max_workers=_AT_ONCE,
        storage=StorageSettings(path=str(directory / "trajectories")),
        serving=serving.model_copy(update={"request_timeout": longest}),
    )


def context_of(model: Path, served: int | None = None) -> int:
    """Tokens that the model reads: what its server says, else ``config.json``. Raises ``ConfigError``."""
    try:
        found = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model}: its config.json cannot be read: {error}") from error
    inner = found.get("text_config") if isinstance(found.get("text_config"), dict) else {}
    own = found.get("max_position_embeddings") or inner.get("max_position_embeddings")
    said = [each for each in (served, own) if isinstance(each, int) and each > 0]
    if not said:
        raise ConfigError(f"{model}: neither its config.json nor its server says how long its context is")
    return min(said)


def choose_prompt(settings: RLSettings, model: Path, context: int, native: bool | None) -> PromptChoice:
    """The standard prompt and native tool calls where the context and the template allow them.

    ``native``: what the user asked for; ``None``: as it fits.
    """
    reasons: list[str] = []
    compact = settings.workspace.is_compact
    if not compact and context < STANDARD_NEEDS:
        compact = True
        reasons.append(
            f"compact prompt: the model reads {context:,} tokens, OpenHands' own prompt wants {STANDARD_NEEDS:,}"
        )
    if native is None:
        native = context >= STANDARD_NEEDS and _template_knows_tools(model)
        if not native:
            why = "its chat template knows no tools" if context >= STANDARD_NEEDS else "they take fewer tokens"
            reasons.append(f"tool calls in the text: {why}")
    return PromptChoice(context=context, compact=compact, native=native, reasons=tuple(reasons))


def fitted(settings: RLSettings, choice: PromptChoice, *, chosen: bool) -> RLSettings:
    """The settings with that prompt. ``chosen``: the user's own lengths, which are kept; else those of the context.

    Raises ``ConfigError`` where prompt and answer are longer than the context.
    """
    workspace = settings.workspace.model_copy(update={"prompt": "compact" if choice.compact else "standard"})
    settings = settings.model_copy(update={"workspace": workspace})
    if chosen:
        whole = settings.max_prompt_length + settings.max_response_length
        if whole > choice.context:
            raise ConfigError(
                f"[rl] max_prompt_length and max_response_length are {whole:,} tokens, and the model reads "
                f"{choice.context:,}: lower one of them, or serve the model with a longer context"
            )
        return settings
    answer = max(_LEAST_ANSWER, min(2048, choice.context // 16))
    return settings.model_copy(
        update={
            "max_turns": 50 if choice.context >= STANDARD_NEEDS else 20,
            "max_response_length": answer,
            "max_obs_length": 2 * answer,
            "max_prompt_length": min(choice.context, 65_536) - answer,
        }
    )


def check_room(settings: RLSettings, choice: PromptChoice, problem: str = "") -> Lengths:
    """Raises ``ConfigError`` where the first prompt of the task with that text leaves no room for an episode."""
    prompt = (_COMPACT if choice.compact else _STANDARD) + _INSTRUCTIONS + len(problem) // _CHARACTERS
    answer, seen = settings.max_response_length, min(settings.max_obs_length, _LEAST_ANSWER)
    least = prompt + _TURNS * (_LEAST_ANSWER + seen)
    room = min(choice.context - answer, settings.max_prompt_length)
    if room < least:
        text = "and the longest task" if problem else "and a task"
        own = settings.max_prompt_length < choice.context - answer
        remedy = "raise [rl] max_prompt_length" if own else "choose a model with a longer context"
        raise ConfigError(
            f"no room for an episode: instructions {text} take about {prompt:,} tokens, {_TURNS} turns at least "
            f"{least - prompt:,}, and prompts may have {room:,} (context {choice.context:,}, answers {answer:,}): "
            f"{remedy}"
        )
    return Lengths(prompt, settings.max_prompt_length + answer)


def _template_knows_tools(model: Path) -> bool:
    texts = []
    for path in (*model.rglob("*.jinja"), model / "tokenizer_config.json"):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
    return any("tools" in text for text in texts)


_WRITTEN = 48
_MOST_AT_ONCE = 8
_TASK = "Write the numbers from 1 to 300, with commas between them, and nothing else."


class ServerRates(Frozen):
    """Tokens a second over all requests: of prompts that were not seen before, and of answers, ``at_once`` together."""

    read: float
    written: float
    at_once: int


async def measure_rates(settings: RLSettings, prompt: str) -> ServerRates:
    """One prompt of that text, then answers to several at once. Raises ``InfrastructureError`` or ``ModelError``."""
    serving = settings.serving
    timeout = max(serving.request_timeout, 600.0)
    engine = OpenAIEngine(serving.model, serving.base_url, serving.api_key(), timeout=timeout)
    at_once = min(settings.max_workers, _MOST_AT_ONCE)
    try:
        await _asked(engine, "Say yes.", 1)  # what the first request alone has to wait for
        read, _, seconds = await _asked(engine, _unseen(prompt), 1)
        began = time.monotonic()
        answers = await asyncio.gather(*(_asked(engine, _unseen(_TASK), _WRITTEN) for _ in range(at_once)))
        spent = time.monotonic() - began
    finally:
        await engine.aclose()
    written = sum(count for _, count, _ in answers)
    if not read or not written:
        raise InfrastructureError(f"{serving.base_url} does not say how many tokens it reads and writes (usage)")
    return ServerRates(read=read / seconds, written=written / spent, at_once=at_once)


def _unseen(text: str) -> str:
    """With a beginning of its own, so that no cache knows it."""
    return f"{random.SystemRandom().getrandbits(64):x} {text}"


async def _asked(engine: OpenAIEngine, text: str, most: int) -> tuple[int, int, float]:
    """Tokens read and written, and seconds."""
    began = time.monotonic()
    (answer,) = await engine.complete([Message(role="user", content=text)], sampling=SamplingParams(max_tokens=most))
    usage = answer.usage
    return usage.prompt_tokens, usage.completion_tokens, time.monotonic() - began


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
    keys = shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return size.parameters * width + _KV * keys * lengths.episode * settings.max_workers


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


def took_line(state: LoopState, price: Price) -> str:
    """How long the finished stages took, each from its last start, and how long was said at most."""
    hours = sum(record.finished - record.started for record in state.records) / 3600
    return f"the run took {hours_in_words(hours)}; at most {hours_in_words(price.total_hours)} was said"

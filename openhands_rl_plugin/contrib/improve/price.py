"""Prompt and lengths for the model's context, and what a run will cost at most."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.improve.gym import Gym
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.training.learn import check_fits

STANDARD_NEEDS = 16_384
"""Tokens of context from which on OpenHands' own prompt (4,700 to 8,500 tokens, with its tools) leaves room to work."""

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


def context_of(model: Path, served: int | None = None) -> int:
    """Tokens that the model reads: what its server says, else ``config.json``. Raises ``ConfigError``."""
    try:
        found = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model}: its config.json cannot be read: {error}") from error
    inner = found.get("text_config") if isinstance(found.get("text_config"), dict) else {}
    own = found.get("max_position_embeddings") or inner.get("max_position_embeddings")
    known = [each for each in (served, own) if isinstance(each, int) and each > 0]
    if not known:
        raise ConfigError(f"{model}: neither its config.json nor its server says how long its context is")
    return min(known)


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


def price_of(settings: RLSettings, gym: Gym, model: Path, lengths: Lengths) -> dict[str, int]:
    """What the run costs at most: episodes and tokens. Raises ``TrainingError`` where the model does not fit."""
    loop, training = settings.loop, settings.training
    rollouts, evaluations = loop.iterations * loop.tasks_per_iteration * loop.samples_per_task, 2 * gym.counts[1]
    turns = max(settings.max_turns, loop.training_max_turns)
    sampled = min(turns * settings.max_response_length, lengths.episode - lengths.prompt)
    episodes = rollouts + evaluations
    check_fits(model, training)
    return {
        "episodes": rollouts,
        "evaluations": evaluations,
        "read": episodes * settings.max_prompt_length,  # of an episode whose answers are short
        "sampled": episodes * sampled,
        "trained": rollouts * lengths.episode * training.num_epochs,
    }


def price_lines(price: Mapping[str, int], grading: float, where: str) -> list[str]:
    """The price for a person. ``grading``: seconds in which one patch is graded; ``where``: the machine."""
    hours = (price["episodes"] + price["evaluations"]) * grading / 3600
    return [
        f"  episodes: {price['episodes']:,} to train on, {price['evaluations']:,} to evaluate",
        f"  tokens:   {price['read']:,} read, {price['sampled']:,} sampled, {price['trained']:,} trained (all passes)",
        f"  tests:    {hours:.1f} h on one processor",
        f"  on:       {where}",
    ]

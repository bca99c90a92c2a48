"""Prompt and lengths for the model's context, and what a run will cost at most."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.improve.gym import Gym
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.training.learn import check_fits

STANDARD_NEEDS = 16_384
"""Tokens of context from which on OpenHands' own prompt (4,700 to 8,500 tokens, with its tools) leaves room to work."""
_INSTRUCTIONS = {"compact": 1_120, "standard": 8_920}
"""Tokens of the first prompt, around the text of its problem."""
_TURNS = 3 * 256  # the least of an episode: look, change, run the tests
_CHARACTERS = 3  # a token's, of code and messages, rather fewer than more


def context_of(model: Path, served: int | None = None) -> int:
    """Tokens that the model reads: what its server says, else ``config.json``. Raises ``ConfigError``."""
    try:
        found = json.loads((model / "config.json").read_text(encoding="utf-8"))
        own = {**(found.get("text_config") or {}), **found}.get("max_position_embeddings")
        return min(filter(None, (served, own)))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{model}: its config.json does not say how long its context is: {error}") from error


def native_calls(model: Path, context: int) -> bool:
    """Whether the context and the chat template have room for tools by the server's API."""
    files = [file for file in (*model.rglob("*.jinja"), model / "tokenizer_config.json") if file.is_file()]
    return context >= STANDARD_NEEDS and any("tools" in each.read_text("utf-8", "replace") for each in files)


def fitted(settings: RLSettings, context: int, *, chosen: bool) -> RLSettings:
    """The settings with a prompt for that context. ``chosen``: the user's own lengths, which are kept; else its own.

    Raises ``ConfigError`` where prompt and answer are longer than the context.
    """
    if context < STANDARD_NEEDS:
        workspace = settings.workspace.model_copy(update={"prompt": "compact"})
        settings = settings.model_copy(update={"workspace": workspace})
    whole = settings.max_prompt_length + settings.max_response_length
    if chosen and whole > context:
        raise ConfigError(
            f"[rl] max_prompt_length and max_response_length are {whole:,} tokens, and the model reads {context:,}: "
            "lower one of them, or serve the model with a longer context"
        )
    answer = max(128, min(2048, context // 16))
    lengths = {
        "max_turns": 50 if context >= STANDARD_NEEDS else 20,
        "max_response_length": answer,
        "max_obs_length": 2 * answer,
        "max_prompt_length": min(context, 65_536) - answer,
    }
    return settings if chosen else settings.model_copy(update=lengths)


def price_of(settings: RLSettings, gym: Gym, model: Path) -> dict[str, int]:
    """What the run costs at most: episodes and tokens.

    Raises ``ConfigError`` where prompts have no room for an episode of the longest task, and ``TrainingError`` where
    the model does not fit into memory.
    """
    loop, training, prompts = settings.loop, settings.training, settings.max_prompt_length
    kind = "compact" if settings.workspace.is_compact else "standard"
    first = _INSTRUCTIONS[kind] + len(gym.longest) // _CHARACTERS
    if prompts < first + _TURNS:
        raise ConfigError(
            f"no room for an episode: the longest task and three turns take about {first + _TURNS:,} tokens, and "
            f"prompts may have {prompts:,}: raise [rl] max_prompt_length, or choose a model with a longer context"
        )
    rollouts, evaluations = loop.iterations * loop.tasks_per_iteration * loop.samples_per_task, 2 * gym.counts[1]
    turns, longest = max(settings.max_turns, loop.training_max_turns), prompts + settings.max_response_length
    check_fits(model, training)
    return {
        "episodes": rollouts,
        "evaluations": evaluations,
        "read": (rollouts + evaluations) * prompts,  # of an episode whose answers are short
        "sampled": (rollouts + evaluations) * min(turns * settings.max_response_length, longest - first),
        "trained": rollouts * longest * training.num_epochs,
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
